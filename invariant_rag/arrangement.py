"""Layouts and arrangements: which keys every token of a prompt attends to, and at which rotary shift.

Rotary scores depend on position differences only. So a token keeps its own position, nearly always its index in memory,
and keys that it should see elsewhere are rotated by a constant shift per segment. An arrangement is a list of *blocks*
of neighbouring queries (causal, rows, or RoToR's ring).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from invariant_rag.errors import InvalidChoice

if TYPE_CHECKING:
    from invariant_rag.attention.call import AttentionCall

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
        found = []
        for text, segments in zip(self.text_spans, self.sets, strict=False):
            bounds = list(accumulate(segments, initial=text.stop))
            found.append(tuple(map(Span, bounds, bounds[1:])))
        return tuple(found)


@dataclass(frozen=True)
class Run:
    """Keys `start` to `stop` (exclusive), seen as if they lay `shift` positions later (earlier when negative)."""

    start: int
    stop: int
    shift: int


@dataclass(frozen=True)
class Row:
    """What the tokens of one span see: runs of keys from far to near.

    The last run ends with the span itself, and attention within the span is causal. Positions along the row are running
    sums of the runs' lengths, so the last key of a row lies at the last token of the span.

    Attributes:
        queries: The span.
        runs: The keys.
    """

    queries: Span
    runs: tuple[Run, ...]

    @property
    def length(self) -> int:
        """Number of keys in the row."""
        return sum(run.stop - run.start for run in self.runs)

    @property
    def is_causal(self) -> bool:
        """Whether the span sees everything before it at its natural position, as in a plain causal model."""
        return self.runs == (Run(0, self.queries.stop, 0),)


class Block(Protocol):
    """Neighbouring queries that a backend computes together."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The block as rows, for backends without a kernel for its kind."""
        ...


@dataclass(frozen=True)
class Causal:
    """Queries that see everything before them at its natural position, as in a plain causal model."""

    queries: Span

    @property
    def rows(self) -> tuple[Row, ...]:
        """One row with one run."""
        return (Row(self.queries, (Run(0, self.queries.stop, 0),)),)


@dataclass(frozen=True)
class Rows:
    """Neighbouring rows of any kind."""

    rows: tuple[Row, ...]


class Arrangement(Protocol):
    """What a method decides for the lengths of a prompt. A backend computes it."""

    @property
    def layout(self) -> Layout:
        """Where the texts and segments of the prompt lie in memory."""
        ...

    @property
    def positions(self) -> tuple[int, ...]:
        """Rotary position of every token of the prompt; generated tokens count on from the last one."""
        ...

    @property
    def is_plain(self) -> bool:
        """Whether this is plain causal attention, so that the model can run with its own attention."""
        ...

    def keys_of_queries(self, call: AttentionCall, head: int) -> Iterator[Sequence[tuple[int, int]]]:
        """Yield what each query of a head attends to: index and position of every key, far to near, itself last.

        This is what the arrangement means: `reference` computes it as it is. Positions are those along the row, and a
        sliding window covers the last keys. The queries are all tokens of the prompt, or a stretch of its last text and
        the tokens generated after it.
        """
        ...

    def weighted_from(self, start: int) -> Weighted:
        """Return the keys that a token weighs, or a row or block that starts with it."""
        ...


@dataclass(frozen=True)
class RowArrangement:
    """An arrangement that is the same for every layer, head and input.

    Attributes:
        layout: Where the texts and segments lie in memory.
        blocks: Blocks that cover the prompt, in memory order.
        positions: Rotary position of every token.
    """

    layout: Layout
    blocks: tuple[Block, ...]
    positions: tuple[int, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all blocks."""
        return tuple(row for block in self.blocks for row in block.rows)

    @cached_property
    def is_plain(self) -> bool:
        """Whether this is plain causal attention, so that the model can run with its own attention."""
        is_causal = self.blocks in ((), (Causal(Span(0, self.layout.length)),))
        return is_causal and self.positions == natural_positions(self.layout)

    def blocks_from(self, query_start: int, stop: int) -> tuple[Block, ...]:
        """Return the blocks of the queries `query_start` to `stop`.

        The last text, and tokens that continue it, see everything before them at its natural position.
        """
        if query_start >= max(1, self.layout.text_spans[-1].start):
            return (Causal(Span(query_start, stop)),)
        behind = Span(self.layout.length, stop)
        blocks = _behind(self.blocks, query_start)
        return (*blocks, Causal(behind)) if len(behind) > 0 else blocks

    def keys_of_queries(self, call: AttentionCall, head: int) -> Iterator[Sequence[tuple[int, int]]]:
        """Yield what each query of a head attends to: index and position of every key, far to near, itself last."""
        for block in self.blocks_from(call.query_start, call.keys.shape[1]):
            for row in block.rows:
                keys = [(key, key + run.shift) for run in row.runs for key in range(run.start, run.stop)]
                for later in reversed(range(len(row.queries))):
                    yield keys[: row.length - later]

    def weighted_from(self, start: int) -> Weighted:
        """Return no keys: rows attend by a plain softmax."""
        return ()


@dataclass(frozen=True)
class Weighting:
    """How some keys are weighed against all others.

    They get a softmax of their own, over scores divided by the temperature. It is merged with the rest by log-sum-exps,
    of which theirs becomes `factor * log-sum-exp + offset`. An offset of `log(n)` counts every key n times.
    """

    temperature: float = 1.0
    factor: float = 1.0
    offset: float = 0.0


Weighted: TypeAlias = tuple[tuple[Span, Weighting], ...]


@dataclass(frozen=True)
class WeightedArrangement(RowArrangement):
    """Rows whose tokens weigh some of the keys that they see.

    Attributes:
        weighted: Disjoint stretches of keys, each with its weighting, for tokens that have no whole set before them,
            for tokens that have one, and so on: `len(sets) + 1` entries.
    """

    weighted: tuple[Weighted, ...]

    def weighted_from(self, start: int) -> Weighted:
        """Return the keys that a token weighs, or a row or block that starts with it."""
        return self.weighted[sum(text.start <= start for text in self.layout.text_spans[1:])]


def _behind(blocks: tuple[Block, ...], start: int) -> tuple[Block, ...]:
    """Return the blocks of the queries from a token on: whole prompts keep theirs, parts of them are rows."""
    if not start:
        return blocks
    return _blocks(
        Row(
            Span(max(start, row.queries.start), row.queries.stop),
            _joined((run.start, run.stop, run.shift) for run in row.runs),
        )
        for block in blocks
        for row in block.rows
        if row.queries.stop > start
    )


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


def arrange_rows(
    layout: Layout, orders: Sequence[Sequence[Sequence[int]]], *, slots: Slots = "stacked"
) -> RowArrangement:
    """Arrange every segment by the list of segments that it sees.

    Args:
        layout: Where the texts and segments lie in memory.
        orders: For each set and each of its segments, the segments that it sees, far to near, itself last. Texts see
            everything before them at its natural position.
        slots: Where a row sees its segments. `stacked`: one after the other. `natural`: at their natural positions.
            `shared`: likewise, but all segments of a set have the same positions.

    Raises:
        InvalidChoice: A row does not end with its own segment.
    """
    rows: list[Row] = []
    for text, spans, order in zip(layout.text_spans, (*layout.set_spans, ()), (*orders, ()), strict=True):
        rows.append(Row(text, (Run(0, text.stop, 0),)))
        for own, (segment, seen) in enumerate(zip(spans, order, strict=True)):
            if not seen or seen[-1] != own:
                raise InvalidChoice(f"expected the row of segment {own} to end with itself, got {list(seen)}")
            others = [spans[j] for j in seen]
            in_place = [(0, text.stop, 0), *((span.start, span.stop, 0) for span in others)]
            rows.append(Row(segment, _stacked(text.stop, others) if slots == "stacked" else _joined(in_place)))
    positions = shared_positions(layout) if slots == "shared" else natural_positions(layout)
    return RowArrangement(layout, _blocks(row for row in rows if len(row.queries)), positions)


def _blocks(rows: Iterable[Row]) -> tuple[Block, ...]:
    """Group neighbouring rows: plain causal ones into one block, and stretches of others into another."""
    blocks: list[Block] = []
    for causal, group in groupby(rows, key=attrgetter("is_causal")):
        some = tuple(group)
        blocks.append(Causal(Span(some[0].queries.start, some[-1].queries.stop)) if causal else Rows(some))
    return tuple(blocks)


def _stacked(prefix: int, row: Sequence[Span]) -> tuple[Run, ...]:
    """Return the runs of a row whose spans are stacked one after the other, as the last of them sees it."""
    starts = list(accumulate((len(span) for span in row), initial=prefix))
    moved = starts[-2] - row[-1].start  # distance of the row's own segment from its natural position
    seen = ((span.start, span.stop, at - span.start - moved) for at, span in zip(starts, row, strict=False))
    return _joined([(0, prefix, -moved), *seen])


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
    return tuple(Run(*each) for each in result)
