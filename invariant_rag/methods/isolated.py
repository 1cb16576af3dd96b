"""NIA: no attention between segments, and nothing else changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from invariant_rag.arrangement import Slots
from invariant_rag.methods.base import RowMethod


class Isolated(RowMethod):
    """No inter-segment attention: each segment sees the prefix and itself, at natural positions (arXiv 2407.01100)."""

    name: ClassVar[str] = "isolated"
    paper: ClassVar[str] = "arXiv 2407.01100"
    cost: ClassVar[str] = "less than plain"
    slots: ClassVar[Slots] = "natural"

    def row(self, segment: int, count: int) -> Sequence[int]:
        """Only itself."""
        return [segment]
