"""Windows: which neighbouring keys neighbouring queries see, for all rows of a batch. Plain integers, no tensors.

Variable-length kernels take packed queries and keys, and for each stretch of queries one window of the keys. A row of
an arrangement is a few such windows: one that ends with its own tokens, which is causal, and one for every other run of
keys, for which the queries are turned instead of the keys. Only a ring gets keys of its own: its set stands twice on
the *tape*, `[set, turned by the shift of the ring | set]`, so that what a segment sees of the whole set (the segments
after it, those before it, and itself) is one window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from invariant_rag.arrangement import Block, RowArrangement, Run, Span, Weighted, Weighting
from invariant_rag.methods.rotor import Ring

_PLAIN = Weighting()


@dataclass(frozen=True)
class Window:
    """Neighbouring queries, and neighbouring keys that they see.

    Attributes:
        queries: The queries.
        keys: The keys.
        shift: Positions by which the keys are seen later than they lie. The queries are turned earlier instead.
        weighting: How the keys are weighed against those of other windows.
    """

    queries: Span
    keys: Span
    shift: int = 0
    weighting: Weighting = _PLAIN


@dataclass(frozen=True)
class Windows:
    """What all queries of a batch see.

    Attributes:
        tape: The keys of the tape: runs of the batch's keys, each turned by its shift.
        causal: Windows of the tape, each of which ends with its own queries. They cover all queries, in order.
        others: Windows of the batch's keys, by *slot*: those of a slot have no query in common, and are in order.
    """

    tape: tuple[Run, ...]
    causal: tuple[Window, ...]
    others: tuple[tuple[Window, ...], ...]


def lay_windows(
    arrangements: Sequence[RowArrangement], padding: Sequence[int], num_queries: int, num_keys: int
) -> Windows:
    """Return the windows of a left-padded batch, whose queries `[B, num_queries]` are the last of its tokens.

    Args:
        arrangements: What the tokens of each row of the batch see.
        padding: Tokens of padding of each row. They see one another, so that every query sees something.
        num_queries: Queries of each row.
        num_keys: Keys of each row.

    Returns:
        The windows.
    """
    tape: list[Run] = []
    causal: list[Window] = []
    others: list[list[Window]] = []
    unasked = num_keys - num_queries  # tokens of each row, padding among them, that have no query
    for number, (arrangement, padded) in enumerate(zip(arrangements, padding, strict=True)):
        blocks = arrangement.blocks_from(max(0, unasked - padded), num_keys - padded)
        row_tape = _Tape(blocks, padded, num_keys)
        # Where the first token of the row, behind its padding, is among the queries, on the tape, and among the keys.
        query, place = number * num_queries + padded - unasked, sum(map(_length, tape)) + padded
        key = number * num_keys + padded
        if padded > unasked:
            causal.append(Window(Span(number * num_queries, query), Span(place - padded + unasked, place)))
        for own, rest in _row_windows(arrangement, blocks, row_tape):
            causal.append(_moved(own, query, place))
            for slot, window in enumerate(rest):
                others += [[]] if slot == len(others) else []
                others[slot].append(_moved(window, query, key))
        tape += (Run(run.start + key, run.stop + key, run.shift) for run in row_tape.runs)
    return Windows(tuple(tape), tuple(causal), tuple(map(tuple, others)))


def _length(run: Run) -> int:
    return run.stop - run.start


def _moved(window: Window, queries: int, keys: int) -> Window:
    seen = Span(window.keys.start + keys, window.keys.stop + keys)
    return replace(window, queries=Span(window.queries.start + queries, window.queries.stop + queries), keys=seen)


class _Tape:
    """The keys of one row of the batch on the tape: the set of each ring once more, turned, in front of itself.

    Attributes:
        runs: The keys, as tokens of the row; those of padding are negative.
    """

    def __init__(self, blocks: Iterable[Block], padding: int, num_keys: int) -> None:
        self.runs: list[Run] = []
        self._pieces = [(0, 0)]
        start = -padding
        for ring in (block for block in blocks if isinstance(block, Ring)):
            self.runs += [Run(start, ring.origin, 0), Run(ring.origin, ring.stop, ring.shift)]
            self._pieces.append((ring.origin, self._pieces[-1][1] + ring.stop - ring.origin))
            start = ring.origin
        self.runs.append(Run(start, num_keys - padding, 0))

    def piece(self, token: int) -> tuple[int, int]:
        """Return from which token on the keys up to a token are neighbours, and how much later these lie."""
        return max(piece for piece in self._pieces if piece[0] <= token)


def _row_windows(
    arrangement: RowArrangement, blocks: Iterable[Block], tape: _Tape
) -> Iterator[tuple[Window, list[Window]]]:
    """Yield the windows of each row: the causal one on the tape, and those among the keys, as tokens of the row."""
    for block in blocks:
        if isinstance(block, Ring):
            _, later = tape.piece(block.origin)
            length = block.stop - block.origin
            for segment in block.segments:
                own = Window(segment, Span(segment.stop + later - length, segment.stop + later))
                prefix = Window(segment, Span(0, block.origin), block.prefix_shift(segment))
                yield own, [prefix] if block.origin else []
            continue
        for row in block.rows:
            weighted = arrangement.weighted_from(row.queries.start)
            *before, (seen, weighting) = [
                (Run(part.start, part.stop, run.shift), weighting)
                for run in row.runs
                for part, weighting in _split(run, weighted, tape.piece(row.queries.start)[0])
            ]
            later = tape.piece(row.queries.start)[1]
            own = Window(row.queries, Span(seen.start + later, seen.stop + later), weighting=weighting)
            yield own, [Window(row.queries, Span(run.start, run.stop), run.shift, weight) for run, weight in before]


def _split(run: Run, weighted: Weighted, piece: int) -> Iterator[tuple[Span, Weighting]]:
    """Yield the parts of a run that are weighed alike, and do not reach over the first token of a piece of the tape."""
    cuts = {run.start, run.stop, piece, *(end for span, _ in weighted for end in (span.start, span.stop))}
    inside = sorted(cut for cut in cuts if run.start <= cut <= run.stop)
    for start, stop in pairwise(inside):
        at = (weighting for span, weighting in weighted if span.start <= start < span.stop)
        yield Span(start, stop), next(at, _PLAIN)
