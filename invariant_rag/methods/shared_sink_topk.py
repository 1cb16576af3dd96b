"""Parallel segments that share an attention sink, of which each text reads the few that it attends to most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from invariant_rag.arrangement import Block, Layout, Row, RowArrangement, Rows, Run, Span, all_but, shared_positions
from invariant_rag.checks import check_number
from invariant_rag.methods.base import Method, refuse_sliding_window

if TYPE_CHECKING:
    import torch

    from invariant_rag.attention.call import AttentionCall, Backend

Choose = Callable[[Span], Sequence[Sequence[float]]]
"""Returns, for queries that choose together, how much they attend to each segment of each set before them."""

_SCRATCH = "hidden segments"


@dataclass(frozen=True)
class ChosenRows(RowArrangement):
    """Rows of exactly the queries of one call, with the choice made."""

    def blocks_from(self, query_start: int, stop: int) -> tuple[Block, ...]:
        """Return all blocks: they are those of the call."""
        return self.blocks


@dataclass(frozen=True)
class ChoosingArrangement(RowArrangement):
    """Rows of segments and texts, of which every text after a set hides most segments, in each layer anew.

    Attributes:
        top: How many segments of a set a text sees.
    """

    top: int

    @property
    def is_plain(self) -> bool:
        """Whether this is plain causal attention: no set has more than one segment."""
        return all(len(segments) < 2 for segments in self.layout.sets)

    def attend(self, backend: Backend, call: AttentionCall) -> torch.Tensor:
        """Return the attention output `[H, Q, D_v]` of one layer for one prompt.

        Raises:
            UnsupportedCombination: The layer has a sliding window.
        """
        refuse_sliding_window(call, SharedSinkTopK.name, "which keys the window covers when segments are left out")
        return backend.chosen(self, call) if max(self.layout.counts, default=0) > self.top else backend.rows(self, call)

    def sets_before(self, queries: Span) -> tuple[tuple[Span, ...], ...]:
        """Return the segments of every set, an empty one too, that ends before a text or a generated token."""
        return self.layout.set_spans[: sum(text.start <= queries.start for text in self.layout.text_spans[1:])]

    def resolve(self, call: AttentionCall, choose: Choose) -> ChosenRows:
        """Return the rows of a call's queries: a text, and each generated token, sees what it chooses.

        A text chooses as a whole, so a later call about a part of it keeps its choice.
        """
        last, stop = self.layout.text_spans[-1], call.keys.shape[1]
        rows = [] if call.query_start else [row for row in self.rows if row.queries not in self.layout.text_spans[1:]]
        for text in self.layout.text_spans[1:]:
            if len(text) and call.query_start <= text.start:
                hidden = self._hidden(choose(text))
                rows.append(Row(text, all_but(hidden, text.stop)))
                if text == last:
                    call.scratch[_SCRATCH] = hidden
        if last.start < call.query_start < last.stop:
            part = Span(call.query_start, min(stop, last.stop))
            rows.append(Row(part, all_but(call.scratch[_SCRATCH], part.stop)))
        for index in range(max(call.query_start, last.stop), stop):
            token = Span(index, index + 1)
            rows.append(Row(token, all_but(self._hidden(choose(token)), token.stop)))
        rows.sort(key=lambda row: row.queries.start)
        return ChosenRows(self.layout, (Rows(tuple(rows)),), self.positions)

    def _hidden(self, scores: Sequence[Sequence[float]]) -> tuple[Span, ...]:
        """Return all segments but the best of each set, in memory order; of equal ones, the first are seen."""
        hidden: list[Span] = []
        for spans, given in zip(self.layout.set_spans, scores, strict=False):
            filled = [index for index, span in enumerate(spans) if len(span)]
            seen = sorted(filled, key=lambda index: -given[index])[: self.top]
            hidden += [span for index, span in enumerate(spans) if index not in seen]
        return tuple(hidden)


@dataclass(frozen=True)
class SharedSinkTopK(Method):
    """A shared sink, and selective attention to the `top` segments of a set (arXiv 2412.16545, section 4).

    Segments see the prefix, which is the sink that they share, and themselves. In each layer, a text after the set
    scores each segment by its attention: for every head and token the five largest weights in the segment are summed,
    and of these sums the five largest again. It sees the `top` segments with the largest scores, the prefix and itself.
    Generated tokens choose one by one. These are the constants of the published code for retrieval and examples
    (`score_topk`, `aggr_topk`, `aggr_dims:head,seq sel_topk:2` in zzsfornlp/parallel_context_encoding_analysis).

    All segments of a set are spread evenly over the length of the longest, at fractional positions (its `ME`), and the
    text goes on after that. Without a prefix there is no sink. A text chooses by all of its tokens, so its first depend
    on its last, and a cache cannot reuse it.

    Attributes:
        top: How many segments of a set a text sees.

    Raises:
        InvalidChoice: `top` is not a whole number from 1 on.
    """

    top: int = 2
    name: ClassVar[str] = "shared-sink-topk"
    paper: ClassVar[str] = "arXiv 2412.16545"
    cost: ClassVar[str] = "less than plain"
    fair: ClassVar[bool] = True
    reads_ahead: ClassVar[bool] = True
    stock_decoding: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_number("top", self.top, 1)

    def arrange(self, layout: Layout) -> ChoosingArrangement:
        """Return which keys every token of a prompt with this layout sees, before texts choose."""
        rows: list[Row] = []
        for text, segments in zip(layout.text_spans, (*layout.set_spans, ()), strict=True):
            rows.append(Row(text, (Run(0, text.stop, 0),)))
            for own in segments:
                seen = ((0, text.stop), (own.start, own.stop)) if own.start > text.stop else ((0, own.stop),)
                rows.append(Row(own, tuple(Run(start, stop, 0) for start, stop in seen if start < stop)))
        blocks = (Rows(tuple(row for row in rows if len(row.queries))),)
        return ChoosingArrangement(layout, blocks, shared_positions(layout, align="spread"), self.top)
