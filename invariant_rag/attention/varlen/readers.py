"""PINE's windows: which tokens rank the segments of which set, and what else they see. Plain integers, no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from invariant_rag.arrangement import Run, Span
from invariant_rag.attention.varlen.windows import Window, Windows
from invariant_rag.methods.pine import RankedArrangement


@dataclass(frozen=True)
class Readers:
    """Neighbouring queries that rank the segments of one set.

    Attributes:
        queries: The queries, among those of the batch.
        segments: The segments of the set that have tokens, in their prompt.
        offset: Where the first token of the prompt lies among the keys of the batch.
        own: If the queries are a segment of the set, its index: they rank the others, all alike. None: each for itself.
    """

    queries: Span
    segments: tuple[Span, ...]
    offset: int
    own: int | None = None

    @property
    def own_shift(self) -> int:
        """By how much a segment moves to the end of its set."""
        if self.own is None:
            return 0
        return self.segments[-1].stop - self.segments[self.own].stop


def lay_ranked_windows(
    arrangements: Sequence[RankedArrangement], padding: Sequence[int], num_queries: int, num_keys: int
) -> tuple[Windows, tuple[tuple[Readers, ...], ...]]:
    """Return what the tokens of a left-padded batch see that is not ranked, and who ranks what.

    Args:
        arrangements: The prompts.
        padding: Tokens of padding of each row.
        num_queries: Queries of each row: the last of its tokens.
        num_keys: Keys of each row.

    Returns:
        The windows; and for the first, second... set that a token ranks, its readers, in the order of the queries.
    """
    causal: list[Window] = []
    others: list[list[Window]] = []
    levels: list[list[Readers]] = []
    unasked = num_keys - num_queries
    for number, (arrangement, padded) in enumerate(zip(arrangements, padding, strict=True)):
        key = number * num_keys + padded
        query = number * num_queries + padded - unasked
        if padded > unasked:
            causal.append(Window(Span(number * num_queries, query), Span(key - padded + unasked, key)))
        for tokens, seen, ranked in _parts(arrangement, max(0, unasked - padded), num_keys - padded):
            queries = Span(tokens.start + query, tokens.stop + query)
            causal.append(Window(queries, Span(tokens.start + key, tokens.stop + key)))
            for slot, (span, shift) in enumerate(seen):
                others += [[]] if slot == len(others) else []
                others[slot].append(Window(queries, Span(span.start + key, span.stop + key), shift))
            for level, (segments, own) in enumerate(ranked):
                levels += [[]] if level == len(levels) else []
                levels[level].append(Readers(queries, segments, key, own))
    tape = (Run(0, len(arrangements) * num_keys, 0),)
    return Windows(tape, tuple(causal), tuple(map(tuple, others))), tuple(map(tuple, levels))


_Part = tuple[Span, list[tuple[Span, int]], list[tuple[tuple[Span, ...], int | None]]]


def _parts(arrangement: RankedArrangement, start: int, stop: int) -> Iterator[_Part]:
    """Yield the texts and segments from a token on: their tokens, what they see unranked, and the sets they rank."""
    layout = arrangement.layout
    texts: list[tuple[Span, int]] = []
    sets: list[tuple[tuple[Span, ...], int | None]] = []
    for number, text in enumerate(layout.text_spans):
        is_last = number == len(layout.sets)
        tokens = Span(max(text.start, start), stop if is_last else text.stop)
        if tokens.start < tokens.stop:
            earlier = [(Span(text.start, tokens.start), 0)] if tokens.start > text.start else []
            yield tokens, [*texts, *earlier], list(sets)
        if is_last:
            return
        texts += [(text, 0)] if len(text) else []
        spans = tuple(span for span in layout.set_spans[number] if len(span))
        for own, segment in enumerate(spans):
            if segment.start >= start:
                moved = spans[-1].stop - segment.stop
                before = [(Span(0, spans[0].start), -moved)] if spans[0].start else []
                yield segment, before, [(spans, own)] if len(spans) > 1 else []
        sets += [(spans, None)] if spans else []
