"""PINE and its two ablations: bidirectional attention between segments, positions by importance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from invariant_rag.arrangement import Arrangement, Layout, RankedSet, Row, Run, Slots
from invariant_rag.methods.base import Method, RowMethod


class PINE(Method):
    """Every segment attends to all others, the most important nearest (arXiv 2407.01100, section 3.3).

    The ordering decides between equally important segments only.
    """

    name: ClassVar[str] = "pine"
    paper: ClassVar[str] = "arXiv 2407.01100"
    cost: ClassVar[str] = "attention both ways, rankings"
    fair: ClassVar[bool] = True
    stock_decoding: ClassVar[bool] = False
    reverse: ClassVar[bool] = False

    def arrange(self, layout: Layout) -> Arrangement:
        """Return rows in which segments rank the others of their set, and texts rank the sets before them.

        A set of at most one segment has no ranks. A segment attends to earlier sets as to a text.
        """
        rows: list[Row] = []
        before: list[Run] = []  # texts between the ranked sets
        ranked: list[RankedSet] = []
        start = 0  # after the last ranked set
        for text, spans in zip(layout.text_spans, (*layout.set_spans, ()), strict=True):
            rows.append(Row(text, (*before, Run(start, text.stop, 0)), tuple(ranked)))
            segments = tuple(span for span in spans if len(span))
            if len(segments) < 2:
                rows += [Row(segment, (Run(0, segment.stop, 0),)) for segment in segments]
                continue
            origin = segments[0].start
            for own, segment in enumerate(segments):
                others = RankedSet(segments, own, self.reverse)
                prefix = [Run(0, origin, others.first_position - origin)] if origin else []
                rows.append(Row(segment, (*prefix, Run(segment.start, segment.stop, 0)), (others,)))
            before += [Run(start, origin, 0)] if origin > start else []
            ranked.append(RankedSet(segments, None, self.reverse))
            start = segments[-1].stop
        return Arrangement.of(layout, rows)


class PINEReverse(PINE):
    """Ablation: the most important segment is placed farthest (arXiv 2407.01100, section 3.4)."""

    name: ClassVar[str] = "pine-reverse"
    reverse: ClassVar[bool] = True


class PINEInPlace(RowMethod):
    """Ablation: segments attend to all others, and no position is re-assigned (arXiv 2407.01100, section 4.3).

    For a sliding window, a segment is the last of its set, as in PINE.
    """

    name: ClassVar[str] = "pine-in-place"
    paper: ClassVar[str] = "arXiv 2407.01100"
    cost: ClassVar[str] = "attention both ways"
    attends_to_later_positions: ClassVar[bool] = True
    slots: ClassVar[Slots] = "natural"

    def row(self, segment: int, count: int) -> Sequence[int]:
        """All others, then itself."""
        return [*(other for other in range(count) if other != segment), segment]
