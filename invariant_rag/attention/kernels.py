"""Causal softmax attention over keys that are already rotated to their positions; shared by the backends."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.merge_states import merge_attn_states, partial_attention

_QUERY_BLOCK = 512  # queries per call with a mask, so that memory is linear in the number of keys


def attend(
    call: AttentionCall,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Attend causally, within the layer's sliding window, from the last Q of S tokens.

    Args:
        call: The layer's constants.
        queries: `[H, Q, D]`.
        keys: `[H_kv, S, D]`, rotated to their positions relative to the queries.
        values: `[H_kv, S, D_v]`.

    Returns:
        `[H, Q, D_v]`.
    """
    count, length = queries.shape[1], keys.shape[1]
    if length <= call.max_split:
        return _attend_unmasked(call, queries, keys, values)
    unmasked = count == length and (call.sliding_window or length) >= length
    if call.softcap is None and call.sinks is None and unmasked:
        return F.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            is_causal=True,
            scale=call.scaling,
            dropout_p=call.dropout,
            enable_gqa=call.num_key_value_groups > 1,
        )[0]
    blocks = []
    for start in range(0, count, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, count)
        last = length - count + stop
        first = 0 if call.sliding_window is None else max(0, length - count + start + 1 - call.sliding_window)
        visible = causal_mask(stop - start, last - first, call.sliding_window, queries.device)
        blocks.append(_attend_masked(call, queries[:, start:stop], keys[:, first:last], values[:, first:last], visible))
    return torch.cat(blocks, dim=1)


def _attend_masked(
    call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attend with an explicit boolean mask `[Q, S]`."""
    # Heads that share keys are stacked along the query dimension: one large product instead of several small ones.
    packed = queries.reshape(keys.shape[0], -1, queries.shape[-1])
    if call.softcap is not None or call.sinks is not None:
        scores = (packed @ keys.transpose(1, 2)).reshape(*queries.shape[:2], -1)
        return masked_softmax_values(call, scores * call.scaling, values, mask)
    out = F.scaled_dot_product_attention(
        packed[None],
        keys[None],
        values[None],
        attn_mask=mask.repeat(call.num_key_value_groups, 1),
        scale=call.scaling,
        dropout_p=call.dropout,
    )
    return out.reshape(*queries.shape[:2], values.shape[-1])


def _attend_unmasked(
    call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attend without a mask: fully to the keys before the queries, and causally to the queries' own keys."""
    before = keys.shape[1] - queries.shape[1]
    own = partial_attention(call, queries, keys[:, before:], values[:, before:], is_causal=True)
    if not before:
        return own.out
    return merge_attn_states([partial_attention(call, queries, keys[:, :before], values[:, :before]), own]).out


def causal_mask(queries: int, keys: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """Return a boolean mask `[Q, S]`, True where one of the last Q of S tokens sees a key."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) if sliding_window is None else (distance >= 0) & (distance < sliding_window)


def masked_softmax_values(
    call: AttentionCall, scores: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Apply soft cap, mask and softmax to scaled scores `[H, Q, S]`; return outputs `[H, Q, D_v]`.

    The boolean mask broadcasts against the scores.
    """
    return softmax_values(call, apply_softcap(call, scores).masked_fill(~mask, float("-inf")), values)


def apply_softcap(call: AttentionCall, scores: torch.Tensor) -> torch.Tensor:
    """Apply the layer's soft cap to scaled scores, if it has one."""
    return scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)


def softmax_values(call: AttentionCall, scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return outputs `[H, Q, D_v]` for scores `[H, Q, S]` that are minus infinity where masked."""
    if call.sinks is not None:
        sinks = call.sinks.to(scores).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : values.shape[1]]
    weights = F.dropout(weights, call.dropout).to(values.dtype)
    packed = weights.reshape(values.shape[0], -1, weights.shape[-1])
    return (packed @ values).reshape(*scores.shape[:2], values.shape[-1])
