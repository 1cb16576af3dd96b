"""PINE and its two ablations: bidirectional attention between segments, positions by importance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from invariant_rag.arrangement import Arrangement, Layout, Slots, natural_positions
from invariant_rag.methods.base import Method, RowMethod

if TYPE_CHECKING:
    import torch

    from invariant_rag.attention.call import AttentionCall, Backend


@dataclass(frozen=True)
class RankedArrangement:
    """Rows that depend on the input: every head ranks the segments of a set, for each segment and each text token.

    Attributes:
        layout: Where the texts and segments lie in memory.
        reverse: Whether the most important segment is placed farthest instead of nearest.
    """

    layout: Layout
    reverse: bool = False

    @property
    def positions(self) -> tuple[int, ...]:
        """Every token at its index; queries are rotated instead of keys."""
        return natural_positions(self.layout)

    @property
    def is_plain(self) -> bool:
        """Whether this is plain causal attention: no set has more than one segment."""
        return all(len(segments) < 2 for segments in self.layout.sets)

    def attend(self, backend: Backend, call: AttentionCall) -> torch.Tensor:
        """Return the attention output `[H, Q, D_v]` of one layer for one prompt."""
        return backend.ranked(self, call)

    def far_to_near(self, importance: Sequence[float]) -> list[int]:
        """Return the segments from far to near by importance; ties keep their physical order."""
        sign = -1.0 if self.reverse else 1.0
        return sorted(range(len(importance)), key=lambda i: sign * importance[i])


class PINE(Method):
    """Every segment sees all others, the most important nearest (arXiv 2407.01100, section 3.3).

    The ordering decides between equally important segments only.
    """

    name: ClassVar[str] = "pine"
    paper: ClassVar[str] = "arXiv 2407.01100"
    cost: ClassVar[str] = "attention both ways, rankings"
    fair: ClassVar[bool] = True
    stock_decoding: ClassVar[bool] = False

    def arrange(self, layout: Layout) -> Arrangement:
        """Return which keys every token of a prompt with this layout sees."""
        return RankedArrangement(layout)


class PINEReverse(PINE):
    """Ablation: the most important segment is placed farthest (arXiv 2407.01100, section 3.4)."""

    name: ClassVar[str] = "pine-reverse"

    def arrange(self, layout: Layout) -> Arrangement:
        """Return which keys every token of a prompt with this layout sees."""
        return RankedArrangement(layout, reverse=True)


class PINEInPlace(RowMethod):
    """Ablation: segments see all others, and no position is re-assigned (arXiv 2407.01100, section 4.3).

    In a model with a sliding window, a segment counts as standing after all others, as in PINE.
    """

    name: ClassVar[str] = "pine-in-place"
    paper: ClassVar[str] = "arXiv 2407.01100"
    cost: ClassVar[str] = "attention both ways"
    reads_later_positions: ClassVar[bool] = True
    slots: ClassVar[Slots] = "natural"

    def row(self, segment: int, count: int) -> Sequence[int]:
        """All others, then itself."""
        return [*(other for other in range(count) if other != segment), segment]
