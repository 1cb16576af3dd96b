"""How much a text attends to each segment: the scores by which `shared-sink-topk` chooses (arXiv 2412.16545)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from invariant_rag.arrangement import Span
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.kernels import apply_softcap, causal_mask

if TYPE_CHECKING:
    from invariant_rag.methods.shared_sink_topk import ChoosingArrangement

TOP_WEIGHTS = 5
"""Of a segment's weights for one head and token, and of these sums over heads and tokens, so many count."""

_BLOCK = 64  # queries at a time: each holds its weights of every key in float32


def attention_to_segments(
    arrangement: ChoosingArrangement, call: AttentionCall, queries: Span
) -> Sequence[Sequence[float]]:
    """Return, for each set before a text or a generated token, how much its tokens attend to each segment."""
    sets = arrangement.sets_before(queries)
    sums: list[list[list[torch.Tensor]]] = [[[] for _ in spans] for spans in sets]
    for start in range(queries.start, queries.stop, _BLOCK):
        weights = _weights(call, Span(start, min(start + _BLOCK, queries.stop)))
        for spans, found in zip(sets, sums, strict=True):
            for span, parts in zip(spans, found, strict=True):
                parts.append(_largest(weights[..., span.start : span.stop]).flatten())
    return [[float(_largest(torch.cat(parts))) for parts in found] for found in sums]


def _largest(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the largest values along the last dimension."""
    return values.topk(min(TOP_WEIGHTS, values.shape[-1]), dim=-1).values.sum(dim=-1)


def _weights(call: AttentionCall, queries: Span) -> torch.Tensor:
    """Return the attention weights `[H, Q, S]` of consecutive tokens over everything up to the last of them."""
    keys = call.keys[:, : queries.stop]
    chosen = call.queries[:, queries.start - call.query_start : queries.stop - call.query_start]
    packed = chosen.reshape(keys.shape[0], -1, keys.shape[-1])
    scores = (packed @ keys.transpose(1, 2)).reshape(*chosen.shape[:2], -1).float() * call.scaling
    mask = causal_mask(len(queries), queries.stop, None, keys.device)
    scores = apply_softcap(call, scores).masked_fill(~mask, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.to(scores).view(-1, 1, 1).expand(-1, len(queries), 1)
        scores = torch.cat((scores, sinks), dim=-1)
    return torch.softmax(scores, dim=-1)
