"""Layouts and arrangements: which keys every token of a prompt attends to, and at which rotary shift.

Rotary scores depend on position differences only. So a token keeps its own position, nearly always its index in memory,
and keys that it attends to elsewhere are rotated by a constant shift per segment. An arrangement is a list of *rows*:
neighbouring queries, runs of keys with one shift each, and sets whose shifts follow from queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Literal, TypeAlias

from invariant_rag.errors import InvalidChoice

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
    """Lengths of the texts and the segments of a prompt, in memory order."""

    texts: tuple[int, ...]  # lengths, in tokens, of the `len(sets) + 1` texts
    sets: tuple[tuple[int, ...], ...]  # of each set, those of its segments in physical order, farthest first

    @property
    def counts(self) -> tuple[int, ...]:
        """For each set, how many of its segments have tokens."""
        return tuple(sum(map(bool, segments)) for segments in self.sets)

    @cached_property
    def length(self) -> int:
        """Tokens of the whole prompt."""
        return self.text_spans[-1].stop

    @cached_property
    def text_spans(self) -> tuple[Span, ...]:
        """One span for each text."""
        spans = [Span(0, self.texts[0])]
        for segments, text in zip(self.sets, self.texts[1:], strict=True):
            start = spans[-1].stop + sum(segments)
            spans.append(Span(start, start + text))
        return tuple(spans)

    @cached_property
    def set_spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each set, one span for each segment, in physical order."""
        segment_spans = []
        for text, segments in zip(self.text_spans, self.sets, strict=False):
            bounds = list(accumulate(segments, initial=text.stop))
            segment_spans.append(tuple(map(Span, bounds, bounds[1:])))
        return tuple(segment_spans)


@dataclass(frozen=True)
class Weighting:
    """How the keys of a run weigh against all others.

    They have a softmax of their own, over scores divided by the temperature. It is merged with the rest by
    log-sum-exps, of which theirs becomes `factor * lse + offset`. An offset of `log(n)` counts every key n times.
    """

    temperature: float = 1.0
    factor: float = 1.0
    offset: float = 0.0


UNWEIGHTED = Weighting()
_weighting = attrgetter("weighting")


@dataclass(frozen=True)
class Run:
    """Keys `start` to `stop` (exclusive), as if they were `shift` positions later (earlier when negative)."""

    start: int
    stop: int
    shift: int
    weighting: Weighting = UNWEIGHTED

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class RankedSet:
    """Segments that every head ranks by their importance to the queries (PINE, arXiv 2407.01100, section 3.3).

    They are stacked one after the other, from the position of the first of them in memory on. Importance is softmax
    attention without positions over the tokens of all segments but `own`, summed over the queries and over the tokens
    of a segment, divided by its length. Ties keep the order in memory. If the queries are one of the segments, its own
    ones, they rank the others together, and the others are stacked as if it came last; else each query ranks all.
    """

    segments: tuple[Span, ...]  # those that have tokens, in memory order; at least two
    own: int | None = None
    reverse: bool = False  # whether the most important segment is placed farthest instead of nearest

    @property
    def first_position(self) -> int:
        """Position of the first token of the farthest segment, for queries that have their index as position."""
        if self.own is None:
            return self.segments[0].start
        return self.segments[0].start - self.segments[-1].stop + self.segments[self.own].stop

    @property
    def others(self) -> tuple[Span, ...]:
        """The segments that are ranked."""
        return tuple(span for index, span in enumerate(self.segments) if index != self.own)


@dataclass(frozen=True)
class Row:
    """What the tokens of one span attend to: runs of keys from far to near, and ranked sets.

    The last run ends with the span itself, and attention within the span is causal. The last key of a row is at the
    position of the last token of the span. Sliding windows count keys along the row.
    """

    queries: Span
    runs: tuple[Run, ...]  # keys at shifts that are known; of a row with ranked sets, the rest is stacked
    ranked: tuple[RankedSet, ...] = ()  # keys at shifts that follow from queries and keys

    @cached_property
    def length(self) -> int:
        """Number of keys in the row."""
        length = 0
        for each in self.runs:
            length += each.stop - each.start
        for ranked in self.ranked:
            length += sum(map(len, ranked.others))
        return length

    @cached_property
    def is_weighted(self) -> bool:
        """Whether a run has a weighting."""
        return {*map(_weighting, self.runs)} != {UNWEIGHTED}

    @cached_property
    def is_causal(self) -> bool:
        """Whether the span attends to everything before it, as in a plain causal model."""
        return self.runs == (Run(0, self.queries.stop, 0),) and not self.ranked

    def part(self, start: int, stop: int) -> Row:
        """Return the row of the queries `start` to `stop`, which may continue the span."""
        *before, own = self.runs
        return Row(Span(start, stop), (*before, replace(own, stop=stop)), self.ranked)


Weighted: TypeAlias = Sequence[tuple[Span, Weighting]]


@dataclass(frozen=True)
class Arrangement:
    """What every token of a prompt attends to. A backend computes it, and knows no methods.

    Rows cover the prompt, in memory order. Generated tokens continue the last one, which alone may be without queries,
    and count on from the last position.
    """

    layout: Layout
    rows: tuple[Row, ...]
    positions: tuple[int, ...]  # rotary position of every token

    @classmethod
    def of(cls, layout: Layout, rows: Iterable[Row], positions: tuple[int, ...] | None = None) -> Arrangement:
        """Return the arrangement of one row for each text and each segment, the last text's last.

        Plain causal rows that are neighbours are joined, empty ones left out. Positions default to indices.
        """
        joined: list[Row] = []
        follows_causal = False
        *_, last = every = [*rows]
        for row in every:
            start, stop = row.queries.start, row.queries.stop
            is_causal = row.runs == (Run(0, stop, 0),) and not row.ranked
            if is_causal and follows_causal:
                joined[-1] = Row(Span(joined[-1].queries.start, stop), row.runs)
            elif start < stop or row is last:
                joined.append(row)
                follows_causal = is_causal
        return cls(layout, tuple(joined), natural_positions(layout) if positions is None else positions)

    @cached_property
    def is_plain(self) -> bool:
        """Whether this is plain causal attention, so that the model can run with its own attention."""
        return len(self.rows) == 1 and self.rows[0].is_causal and self.positions == natural_positions(self.layout)

    def rows_from(self, start: int, stop: int) -> tuple[Row, ...]:
        """Return the rows of the queries `start` to `stop`; tokens after the prompt continue its last row."""
        *before, last = self.rows
        if start == 0 and stop == last.queries.stop:
            return self.rows if last.queries.start < stop else tuple(before)
        parts = [
            row if row.queries.start >= start else row.part(start, row.queries.stop)
            for row in before
            if row.queries.stop > start
        ]
        first = max(start, last.queries.start)
        return (*parts, last.part(first, stop)) if first < stop else tuple(parts)

    def weighted(self, weighted: Sequence[Weighted]) -> Arrangement:
        """Return the arrangement with weights for some of the keys.

        Args:
            weighted: For tokens that have 0, 1, ... `len(sets)` whole sets before them, disjoint stretches of keys with
                their weightings.
        """
        texts = self.layout.text_spans[1:]
        rows = []
        for row in self.rows:
            of_row, (*before, own) = weighted[sum(text.start <= row.queries.start for text in texts)], row.runs
            runs = [part for run in before for part in _split(run, of_row)]
            rows.append(replace(row, runs=(*runs, *_split(own, of_row, more=row is self.rows[-1]))))
        return replace(self, rows=tuple(rows))


def _split(run: Run, weighted: Weighted, *, more: bool = False) -> list[Run]:
    """Return the parts of a run that weigh alike; the last may be empty if there are `more` keys to come."""
    ends = {run.start, run.stop + more, *(end for span, _ in weighted for end in (span.start, span.stop))}
    parts: list[Run] = []
    for start, stop in pairwise(sorted(end for end in ends if run.start <= end <= run.stop + more)):
        weighting = next((each for span, each in weighted if span.start <= start < span.stop), UNWEIGHTED)
        # Neighbours share a softmax where that changes nothing; sets with no text between them keep their own.
        is_plain = weighting.temperature == weighting.factor == 1.0
        first = parts.pop().start if is_plain and parts and parts[-1].weighting == weighting else start
        parts.append(Run(first, min(stop, run.stop), run.shift, weighting))
    return parts


def natural_positions(layout: Layout) -> tuple[int, ...]:
    """Return every token's index as its position."""
    return tuple(range(layout.length))


def shared_positions(layout: Layout, *, align: Literal["left", "right"] = "left") -> tuple[int, ...]:
    """Return positions at which the segments of a set start alike, or end alike; the next text follows the longest."""
    positions: list[int] = []
    start = 0
    for text, segments in zip(layout.texts, (*layout.sets, ()), strict=True):
        positions += range(start, start + text)
        start += text
        longest = max(segments, default=0)
        for length in segments:
            at = start + longest - length if align == "right" else start
            positions += range(at, at + length)
        start += longest
    return tuple(positions)


def arrange_rows(layout: Layout, orders: Sequence[Sequence[Sequence[int]]], *, slots: Slots = "stacked") -> Arrangement:
    """Arrange every segment by the list of segments that it attends to.

    Args:
        layout: Lengths of the texts and segments, in memory order.
        orders: For each set and each of its segments, the segments that it attends to, far to near, itself last. Texts
            attend to everything before them at its natural position.
        slots: Where the segments of a row are. `stacked`: one after the other. `natural`: at their natural positions.
            `shared`: likewise, but all segments of a set have the same positions.
    """
    rows: list[Row] = []
    for text, spans, order in zip(layout.text_spans, (*layout.set_spans, ()), (*orders, ()), strict=True):
        rows.append(Row(text, (Run(0, text.stop, 0),)))
        for own, (segment, attended) in enumerate(zip(spans, order, strict=True)):
            if not attended or attended[-1] != own:
                raise InvalidChoice(f"expected the row of segment {own} to end with itself, got {list(attended)}")
            others = [spans[j] for j in attended]
            in_place = [(0, text.stop, 0), *((span.start, span.stop, 0) for span in others)]
            rows.append(Row(segment, _stacked(text.stop, others) if slots == "stacked" else _joined(in_place)))
    return Arrangement.of(layout, rows, shared_positions(layout) if slots == "shared" else None)


def _stacked(prefix: int, row: Sequence[Span]) -> tuple[Run, ...]:
    """Return the runs of a row whose spans are stacked one after the other, as the last of them attends to it."""
    starts = list(accumulate((len(span) for span in row), initial=prefix))
    moved = starts[-2] - row[-1].start  # distance of the row's own segment from its natural position
    segments = ((span.start, span.stop, at - span.start - moved) for at, span in zip(starts, row, strict=False))
    return _joined([(0, prefix, -moved), *segments])


def _joined(runs: Iterable[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Join runs (start, stop, shift) that are neighbours in memory and share a shift; leave out empty ones."""
    result: list[list[int]] = []
    for start, stop, shift in runs:
        if start == stop:
            continue
        if result and result[-1][1:] == [start, shift]:
            result[-1][1] = stop
        else:
            result.append([start, stop, shift])
    return tuple(Run(start, stop, shift) for start, stop, shift in result)
