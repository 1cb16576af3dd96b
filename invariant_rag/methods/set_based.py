"""Set-Based Prompting: segments side by side, which do not see each other and share their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from invariant_rag.arrangement import Slots
from invariant_rag.methods.base import RowMethod


class SetBased(RowMethod):
    """Segments start at the same position and do not see each other; the suffix sees all (arXiv 2406.06581).

    The prefix exists once, and the suffix starts after the longest segment. Nothing tells the segments apart but their
    contents, so the answer is fair: up to rounding, it ignores the ordering too. In a model with a sliding window, the
    window counts tokens as they lie in memory.
    """

    name: ClassVar[str] = "set-based"
    paper: ClassVar[str] = "arXiv 2406.06581"
    cost: ClassVar[str] = "less than plain"
    fair: ClassVar[bool] = True
    context_free_segments: ClassVar[bool] = True
    slots: ClassVar[Slots] = "shared"

    def row(self, segment: int, count: int) -> Sequence[int]:
        """Only itself."""
        return [segment]
