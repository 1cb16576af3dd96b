"""Methods that are one rule of rows: the plain model, NIA, and Set-Based Prompting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from invariant_rag.arrangement import Slots
from invariant_rag.methods.base import RowMethod


class Sequential(RowMethod):
    """Plain causal attention: a segment attends to those before it. Invariant exactly when its ordering is."""

    name: ClassVar[str] = "sequential"
    paper: ClassVar[str] = "the model as it is"
    cost: ClassVar[str] = "none"
    invariant: ClassVar[bool] = False
    default_ordering: ClassVar[str] = "given"

    def row(self, segment: int, count: int) -> Sequence[int]:
        """Everything before it, then itself."""
        return range(segment + 1)


class Isolated(RowMethod):
    """No inter-segment attention: a segment attends to prefix and itself, at natural positions (arXiv 2407.01100)."""

    name: ClassVar[str] = "isolated"
    paper: ClassVar[str] = "arXiv 2407.01100"
    cost: ClassVar[str] = "less than plain"
    slots: ClassVar[Slots] = "natural"

    def row(self, segment: int, count: int) -> Sequence[int]:
        """Only itself."""
        return [segment]


class SetBased(RowMethod):
    """Segments start at one position, without attention between them; the suffix attends to all (arXiv 2406.06581).

    The prefix exists once, and the suffix starts after the longest segment. Segments differ in their contents alone, so
    the answer is fair: up to rounding, it ignores the ordering too. A sliding window counts tokens in memory order.
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
