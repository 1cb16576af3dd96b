"""InvICL: every segment is read alone, and once more after all others; the suffix sees the second reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from invariant_rag.arrangement import Layout, RowArrangement, arrange_views, shared_positions
from invariant_rag.methods.base import Method


class InvICL(Method):
    """Segments lie in memory twice: drafts see themselves, segments see the drafts of all others (arXiv 2505.04994).

    A segment sees the drafts of the other segments and itself, never its own draft, and texts see no draft (section
    3.3, figure 2d). Every draft and every segment starts at the same position, and the suffix starts after the longest
    (appendix A.1). So the answer is fair: up to rounding, it ignores the ordering. Text before the set, of which the
    paper has none, is seen by drafts and segments. The paper fine-tunes its models with this attention, as
    `InvariantModel.arranged` does.
    """

    name: ClassVar[str] = "invicl"
    paper: ClassVar[str] = "arXiv 2505.04994"
    cost: ClassVar[str] = "segments twice, each after all others"
    training_free: ClassVar[bool] = False
    fair: ClassVar[bool] = True
    reads_later_positions: ClassVar[bool] = True
    stock_decoding: ClassVar[bool] = False

    def drafts(self, sources: Sequence[Sequence[int]]) -> Sequence[int]:
        """Every segment, unless there are no others that would see its draft."""
        return range(len(sources)) if len(sources) > 1 else ()

    def arrange(self, layout: Layout) -> RowArrangement:
        """Return which keys every token of a prompt with this layout sees."""
        views = [
            [[draft for other, draft in enumerate(drafts) if other != own] for own in range(len(segments))]
            for drafts, segments in zip(layout.draft_spans, layout.set_spans, strict=True)
        ]
        return arrange_views(layout, views, shared_positions(layout), hide_drafts=True)
