"""RoToR: one global order of the segments, arranged in a ring in which every segment is its own last."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

from invariant_rag.arrangement import Block, Causal, Layout, Row, RowArrangement, Run, Span, natural_positions
from invariant_rag.methods.base import Method


@dataclass(frozen=True)
class Ring:
    """The segments of one set in a ring: each sees the prefix, the segments after it, those before it, then itself.

    A segment that ends at `e` sees the segments after it at the shift `-T`, where `T` is the length of the set, the
    segments before it at their natural positions, and the prefix at the shift `e - stop` (arXiv 2502.08662, section
    3.2). The last segment of the set sees everything at its natural position, as in a plain causal model, so it is no
    part of the block.

    Attributes:
        origin: First token of the set: the length of the prefix.
        ends: End of every segment of the set that has tokens, in memory order; at least two.
    """

    origin: int
    ends: tuple[int, ...]

    @property
    def stop(self) -> int:
        """End of the set."""
        return self.ends[-1]

    @property
    def shift(self) -> int:
        """Shift of the segments after the one that sees them."""
        return self.origin - self.stop

    @cached_property
    def segments(self) -> tuple[Span, ...]:
        """The segments of the block: all of the set but the last."""
        return tuple(Span(a, b) for a, b in pairwise((self.origin, *self.ends[:-1])))

    def prefix_shift(self, segment: Span) -> int:
        """Shift of the prefix, as a segment of the block sees it."""
        return segment.stop - self.stop

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """One row for each segment of the block."""
        return tuple(
            Row(
                each,
                (
                    *((Run(0, self.origin, self.prefix_shift(each)),) if self.origin else ()),
                    Run(each.stop, self.stop, self.shift),
                    Run(self.origin, each.stop, 0),
                ),
            )
            for each in self.segments
        )


class RoToR(Method):
    """Circular arrangement around one global, content-based order (arXiv 2502.08662, section 3.2).

    Segment i of n sees the segments i+1 to n-1 and then 0 to i: the ring, cut after itself.
    """

    name: ClassVar[str] = "rotor"
    paper: ClassVar[str] = "arXiv 2502.08662"
    cost: ClassVar[str] = "attention both ways"

    def arrange(self, layout: Layout) -> RowArrangement:
        """Arrange every set as a ring; texts see everything before them at its natural position."""
        blocks: list[Block] = []
        causal_from = 0
        for spans in layout.set_spans:
            segments = [span for span in spans if len(span)]
            if len(segments) < 2:
                continue
            if causal_from < segments[0].start:
                blocks.append(Causal(Span(causal_from, segments[0].start)))
            blocks.append(Ring(segments[0].start, tuple([span.stop for span in segments])))
            causal_from = segments[-1].start
        if causal_from < layout.length:
            blocks.append(Causal(Span(causal_from, layout.length)))
        return RowArrangement(layout, tuple(blocks), natural_positions(layout))
