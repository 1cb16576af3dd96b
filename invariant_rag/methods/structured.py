"""Structured Prompting: parallel windows whose keys share the attention weight."""

from __future__ import annotations

from math import log
from typing import ClassVar

from invariant_rag.arrangement import Layout, WeightedArrangement, Weighting
from invariant_rag.methods.parallel_windows import ParallelWindows


class Structured(ParallelWindows):
    """Parallel windows whose keys have 1/n of the weight for the tokens after them (arXiv 2212.06713, section 3.3)."""

    name: ClassVar[str] = "structured"
    paper: ClassVar[str] = "arXiv 2212.06713"
    stock_decoding: ClassVar[bool] = False

    def arrange(self, layout: Layout) -> WeightedArrangement:
        """Return which keys every token of a prompt with this layout sees."""
        rows = super().arrange(layout)
        counts = [sum(map(bool, segments)) for segments in layout.sets]
        shares = [Weighting(offset=-log(count)) if count > 1 else None for count in counts]
        return WeightedArrangement(layout, rows.blocks, rows.positions, tuple(shares))
