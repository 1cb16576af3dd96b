"""RoToR: one global order of the segments, arranged in a ring in which every segment is its own last."""

from __future__ import annotations

from typing import ClassVar

from invariant_rag.arrangement import Arrangement, Layout, Row, Run
from invariant_rag.methods.base import Method


class RoToR(Method):
    """Circular arrangement around one global, content-based order (arXiv 2502.08662, section 3.2).

    Segment i of n attends to the segments i+1 to n-1 and then 0 to i: the ring, cut after itself.
    """

    name: ClassVar[str] = "rotor"
    paper: ClassVar[str] = "arXiv 2502.08662"
    cost: ClassVar[str] = "attention both ways"

    def arrange(self, layout: Layout) -> Arrangement:
        """Arrange every set as a ring; texts attend to everything before them at its natural position.

        A segment that ends at `e` attends to the segments after it at the shift `-T`, where `T` is the length of the
        set, to those before it at their natural positions, and to the prefix at the shift `e - stop`, where `stop` is
        the end of the set. So the last segment attends as in a plain causal model.
        """
        rows: list[Row] = []
        for text, spans in zip(layout.text_spans, (*layout.set_spans, ()), strict=True):
            rows.append(Row(text, (Run(0, text.stop, 0),)))
            segments = [span for span in spans if span.start < span.stop]
            for segment in segments[:-1]:
                origin, stop = text.stop, segments[-1].stop
                prefix = [Run(0, origin, segment.stop - stop)] if origin else []
                after = Run(segment.stop, stop, origin - stop)
                rows.append(Row(segment, (*prefix, after, Run(origin, segment.stop, 0))))
            if segments:
                rows.append(Row(segments[-1], (Run(0, segments[-1].stop, 0),)))
        return Arrangement.of(layout, rows)
