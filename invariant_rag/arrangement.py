"""Layouts, rows and runs: which keys a token sees, and at which rotary shift.

Rotary scores depend on position differences only. So a token never has to be moved: it stays at its own position,
which is nearly always its index, and the keys it should see elsewhere are seen through a constant shift per segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from invariant_rag.errors import InvalidChoice

if TYPE_CHECKING:
    import torch

    from invariant_rag.attention.call import AttentionCall, Backend

Slots: TypeAlias = Literal["stacked", "natural", "shared"]


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `stop` (exclusive), in memory order."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Where the texts and the segments of a prompt lie in memory.

    Attributes:
        texts: Lengths, in tokens, of the `len(sets) + 1` texts.
        sets: For each set, the lengths of its segments in physical order (farthest from the suffix first).
    """

    texts: tuple[int, ...]
    sets: tuple[tuple[int, ...], ...]

    @cached_property
    def _ends(self) -> list[int]:
        lengths = [self.texts[0]]
        for segments, text in zip(self.sets, self.texts[1:], strict=True):
            lengths += [*segments, text]
        return list(accumulate(lengths))

    @property
    def length(self) -> int:
        """Tokens of the whole prompt."""
        return self._ends[-1]

    @cached_property
    def text_spans(self) -> tuple[Span, ...]:
        """One span for each text."""
        spans, index = [Span(0, self._ends[0])], 0
        for segments in self.sets:
            index += len(segments) + 1
            spans.append(Span(self._ends[index - 1], self._ends[index]))
        return tuple(spans)

    @cached_property
    def set_spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each set, one span for each segment, in physical order."""
        result, start = [], self.texts[0]
        for segments, text in zip(self.sets, self.texts[1:], strict=True):
            ends = list(accumulate(segments, initial=start))
            result.append(tuple(Span(a, b) for a, b in pairwise(ends)))
            start = ends[-1] + text
        return tuple(result)


@dataclass(frozen=True)
class Run:
    """Keys `start` to `stop`, seen as if they lay `shift` positions later (earlier when negative)."""

    start: int
    stop: int
    shift: int


@dataclass(frozen=True)
class Row:
    """What the tokens of one span see: runs of keys from far to near.

    The last run ends with the span itself, and within the span attention is causal. Positions along the row are
    running sums of the runs' lengths, so the last key of a row lies right at the last token of the span.
    """

    queries: Span
    runs: tuple[Run, ...]

    @property
    def length(self) -> int:
        """Keys in the row."""
        return sum(run.stop - run.start for run in self.runs)

    @property
    def is_causal_prefix(self) -> bool:
        """Whether the span sees everything before it where it lies, as in a plain causal model."""
        return len(self.runs) == 1 and self.runs[0] == Run(0, self.queries.stop, 0)


class Arrangement(Protocol):
    """What a method decides for given lengths. A backend carries it out."""

    @property
    def layout(self) -> Layout:
        """Where everything lies."""
        ...

    @property
    def positions(self) -> tuple[int, ...]:
        """Rotary position of every token of the prompt; the tokens that follow count on from the last one."""
        ...

    @property
    def is_plain(self) -> bool:
        """Whether this is plain causal attention, so that the model can run as it is."""
        ...

    def attend(self, backend: Backend, call: AttentionCall) -> torch.Tensor:
        """Return the attention output `[H, Q, D]` of one layer for one prompt, or for the end of it.

        The queries are the prompt's, or its last text's and those of tokens behind it.
        """
        ...


@dataclass(frozen=True)
class RowArrangement:
    """An arrangement that is the same for every layer, head and input: a list of rows that cover the prompt."""

    layout: Layout
    rows: tuple[Row, ...]
    positions: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Whether this is plain causal attention, so that the model can run as it is."""
        return all(row.is_causal_prefix for row in self.rows) and self.positions == natural_positions(self.layout)

    def rows_from(self, first: int, stop: int) -> Sequence[Row]:
        """The rows of the tokens `first` to `stop`: all of the prompt, or tokens of its last text and those behind it.

        The last text, which generated tokens join, sees everything before it where it lies.
        """
        return [Row(Span(first, stop), (Run(0, stop, 0),))] if first else self.rows

    def attend(self, backend: Backend, call: AttentionCall) -> torch.Tensor:
        """Return the attention output `[H, Q, D]` of one layer for one prompt."""
        return backend.rows(self, call)


@dataclass(frozen=True)
class Weighting:
    """How the texts behind a set weigh its segments against everything else.

    The keys of the set have a softmax of their own, over scores divided by the temperature. It is merged with the rest
    by log-sum-exps, of which the set's becomes `factor * log-sum-exp + offset`.
    """

    temperature: float = 1.0
    factor: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True)
class WeightedArrangement(RowArrangement):
    """Rows, and a weighting for each set that the texts behind it apply. None: the set is read like any other keys."""

    weightings: tuple[Weighting | None, ...]

    def behind(self, start: int) -> list[tuple[Span, Weighting]]:
        """The sets that a token at or behind `start` weighs, and how: those that end before it."""
        pairs = zip(self.layout.set_spans, self.weightings, strict=True)
        sets = [(Span(spans[0].start, spans[-1].stop), each) for spans, each in pairs if each is not None]
        return [(span, each) for span, each in sets if span.stop <= start]

    def attend(self, backend: Backend, call: AttentionCall) -> torch.Tensor:
        """Return the attention output `[H, Q, D]` of one layer for one prompt."""
        return backend.weighted(self, call)


def natural_positions(layout: Layout) -> tuple[int, ...]:
    """Every token at its index."""
    return tuple(range(layout.length))


def shared_positions(layout: Layout) -> tuple[int, ...]:
    """All segments of a set at the same positions; what follows starts behind the longest of them."""
    positions: list[int] = []
    start = 0
    for text, segments in zip(layout.texts, (*layout.sets, ()), strict=True):
        positions += range(start, start + text)
        start += text
        for length in segments:
            positions += range(start, start + length)
        start += max(segments, default=0)
    return tuple(positions)


def arrange_rows(
    layout: Layout, orders: Sequence[Sequence[Sequence[int]]], *, slots: Slots = "stacked"
) -> RowArrangement:
    """Turn lists of segments into rows.

    Args:
        layout: Where everything lies.
        orders: For each set and each of its segments, the segments that it sees, far to near, itself last. Texts see
            everything before them where it lies.
        slots: Where a row sees its segments. `stacked`: one behind the other. `natural`: each where it lies. `shared`:
            likewise, but all segments of a set lie at the same positions.

    Returns:
        The arrangement, with neighbouring rows merged where together they are plain causal attention.

    Raises:
        InvalidChoice: A row does not end with its own segment.
    """
    place = _stacked if slots == "stacked" else _in_place
    rows: list[Row] = []
    for text, spans, order in zip(layout.text_spans, (*layout.set_spans, ()), (*orders, ()), strict=True):
        _append(rows, Row(text, (Run(0, text.stop, 0),)))
        for own, (segment, seen) in enumerate(zip(spans, order, strict=True)):
            if not seen or seen[-1] != own:
                raise InvalidChoice(f"expected the row of segment {own} to end with itself, got {list(seen)}")
            row = [spans[j] for j in seen]
            _append(rows, Row(segment, place(text.stop, row)))
    positions = shared_positions(layout) if slots == "shared" else natural_positions(layout)
    return RowArrangement(layout, tuple(rows), positions)


def _stacked(prefix: int, row: Sequence[Span]) -> tuple[Run, ...]:
    """Runs of a row whose spans stand one behind the other, as the last of them sees it."""
    starts = list(accumulate((len(span) for span in row), initial=prefix))
    moved = starts[-2] - row[-1].start  # how far the reader itself stands from its natural position
    seen = ((span.start, span.stop, at - span.start - moved) for at, span in zip(starts, row, strict=False))
    return _merged([(0, prefix, -moved), *seen])


def _in_place(prefix: int, row: Sequence[Span]) -> tuple[Run, ...]:
    """Runs of a row whose spans are seen where they lie."""
    return _merged([(0, prefix, 0), *((span.start, span.stop, 0) for span in row)])


def _merged(runs: Iterable[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Join runs (start, stop, shift) that are neighbours in memory and share a shift; leave out empty ones."""
    result: list[list[int]] = []
    for start, stop, shift in runs:
        if start == stop:
            continue
        if result and result[-1][1:] == [start, shift]:
            result[-1][1] = stop
        else:
            result.append([start, stop, shift])
    return tuple(Run(*each) for each in result)


def _append(rows: list[Row], row: Row) -> None:
    """Append a row, joining it with the one before where both together are plain causal attention."""
    if not len(row.queries):
        return
    if rows and rows[-1].is_causal_prefix and row.is_causal_prefix:
        start = rows.pop().queries.start
        row = Row(Span(start, row.queries.stop), row.runs)
    rows.append(row)
