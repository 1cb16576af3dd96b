"""RoToR: one global order of the segments, arranged in a ring in which every segment stands last for itself."""

from __future__ import annotations

from typing import ClassVar

from invariant_rag.arrangement import Layout, RowArrangement, arrange_ring
from invariant_rag.methods.base import Method


class RoToR(Method):
    """Circular arrangement around one global, content-based order (arXiv 2502.08662, section 3.2).

    Segment i of n sees the segments i+1 to n-1 and then 0 to i: the ring, cut behind itself. In rotary positions that
    is one constant shift, minus the length of the set, for the segments behind it: see `arrangement.Ring`.
    """

    name: ClassVar[str] = "rotor"
    paper: ClassVar[str] = "arXiv 2502.08662"
    cost: ClassVar[str] = "attention both ways"

    def arrange(self, layout: Layout) -> RowArrangement:
        """Arrange every set of the layout as a ring."""
        return arrange_ring(layout)
