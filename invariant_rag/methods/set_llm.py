"""Set-LLM: the whole prompt reads itself both ways, but segments of a set do not see each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from invariant_rag.arrangement import Block, Causal, Layout, Row, RowArrangement, Rows, Run, Span
from invariant_rag.methods.base import Method, refuse_sliding_window

if TYPE_CHECKING:
    import torch

    from invariant_rag.attention.call import AttentionCall, Backend


@dataclass(frozen=True)
class SetMask(RowArrangement):
    """Rows that see both ways, and tokens after the prompt that see everything before them."""

    def blocks_from(self, query_start: int, stop: int) -> tuple[Block, ...]:
        """Return the blocks of the queries `query_start` to `stop`: the whole prompt, or a part of its last text."""
        end = self.layout.length
        blocks = list(self.blocks) if not query_start else []
        if 0 < query_start < end:
            blocks.append(Rows((Row(Span(query_start, min(stop, end)), (Run(0, end, 0),), both_ways=True),)))
        if stop > end:
            blocks.append(Causal(Span(max(query_start, end), stop)))
        return tuple(blocks)

    def attend(self, backend: Backend, call: AttentionCall) -> torch.Tensor:
        """Return the attention output `[H, Q, D_v]` of one layer for one prompt.

        Raises:
            UnsupportedCombination: The layer has a sliding window.
        """
        refuse_sliding_window(call, SetLLM.name, "how far a token sees ahead")
        return super().attend(backend, call)


class SetLLM(Method):
    """SetMask and SetPE: every token of the prompt sees all others, but no other segment of its set (arXiv 2505.15433).

    Segments of a set start at the same position, and the text after a set goes on where it would without sets
    (Algorithm 1). Text sees the segments before and after it. Generated tokens see everything before them.

    Without sets a model reads the prompt as a prefix language model, which is not how it was trained. So this method is
    for a model that was fine-tuned with it, in `InvariantModel.arranged`. The segments see each other as little as with
    `set-based`, which reads one way only and needs no training.
    """

    name: ClassVar[str] = "set-llm"
    paper: ClassVar[str] = "arXiv 2505.15433"
    cost: ClassVar[str] = "texts read both ways"
    training_free: ClassVar[bool] = False
    fair: ClassVar[bool] = True
    reads_later_positions: ClassVar[bool] = True
    reads_ahead: ClassVar[bool] = True

    def arrange(self, layout: Layout) -> SetMask:
        """Return which keys every token of a prompt with this layout sees."""
        end = layout.length
        rows = [Row(text, (Run(0, end, 0),), both_ways=True) for text in layout.text_spans]
        positions = list(range(end))
        for segments in layout.set_spans:
            for own in segments:
                seen = (Run(0, segments[0].start, 0), Run(own.start, own.stop, 0), Run(segments[-1].stop, end, 0))
                rows.append(Row(own, tuple(run for run in seen if run.start < run.stop), both_ways=True))
                positions[own.start : own.stop] = range(segments[0].start, segments[0].start + len(own))
        rows = sorted((row for row in rows if len(row.queries)), key=lambda row: row.queries.start)
        return SetMask(layout, (Rows(tuple(rows)),), tuple(positions))
