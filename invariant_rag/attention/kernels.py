"""Softmax attention from neighbouring queries to keys that were already put in place: what backends share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.merge_states import can_split, merged, part

_BLOCK = 512  # queries at a time where there is a mask, so that memory is linear in tokens


def attend(call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend from neighbouring queries to keys that lie as the queries see them.

    The queries are the last of the keys' tokens, and see causally within the layer's window.

    Args:
        call: The layer's constants.
        queries: `[H, Q, D]`.
        keys: `[H_kv, S, D]`.
        values: `[H_kv, S, D_v]`.

    Returns:
        `[H, Q, D_v]`.
    """
    count, length = queries.shape[1], keys.shape[1]
    if can_split(call, length):
        return _attend_in_halves(call, queries, keys, values)
    if call.softcap is None and call.sinks is None and count == length and (call.window or length) >= length:
        return F.scaled_dot_product_attention(
            queries[None],
            keys[None],
            values[None],
            is_causal=True,
            scale=call.scaling,
            dropout_p=call.dropout,
            enable_gqa=call.groups > 1,
        )[0]
    blocks = []
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        last = length - count + stop
        first = 0 if call.window is None else max(0, length - count + start + 1 - call.window)
        blocks.append(_attend_masked(call, queries[:, start:stop], keys[:, first:last], values[:, first:last]))
    return torch.cat(blocks, dim=1)


def _attend_masked(
    call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    mask = visible(queries.shape[1], keys.shape[1], call.window, queries.device)
    # The heads that share keys are stacked along the queries: one larger product instead of several small ones.
    packed = queries.reshape(keys.shape[0], -1, queries.shape[-1])
    if call.softcap is not None or call.sinks is not None:
        scores = (packed @ keys.transpose(1, 2)).reshape(*queries.shape[:2], -1)
        return weigh(call, scores * call.scaling, values, mask)
    out = F.scaled_dot_product_attention(
        packed[None],
        keys[None],
        values[None],
        attn_mask=mask.repeat(call.groups, 1),
        scale=call.scaling,
        dropout_p=call.dropout,
    )
    return out.reshape(*queries.shape[:2], values.shape[-1])


def _attend_in_halves(
    call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Attend without a mask: to what lies before the queries, all of it, and causally to their own keys."""
    before = keys.shape[1] - queries.shape[1]
    own = part(call, queries, keys[:, before:], values[:, before:], causal=True)
    return merged([part(call, queries, keys[:, :before], values[:, :before]), own] if before else [own])


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean `[Q, S]`: which of S keys each of the last Q tokens sees."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def weigh(call: AttentionCall, scores: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Turn scaled scores `[H, Q, S]` into outputs `[H, Q, D_v]`. The mask broadcasts against the scores."""
    return mix(call, capped(call, scores).masked_fill(~mask, float("-inf")), values)


def capped(call: AttentionCall, scores: torch.Tensor) -> torch.Tensor:
    """Squash scaled scores as the layer does."""
    return scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)


def mix(call: AttentionCall, scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Turn final scores `[H, Q, S]`, minus infinity where nothing is seen, into outputs `[H, Q, D_v]`."""
    if call.sinks is not None:
        sinks = call.sinks.to(scores).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : values.shape[1]]
    weights = F.dropout(weights, call.dropout).to(values.dtype)
    packed = weights.reshape(values.shape[0], -1, weights.shape[-1])
    return (packed @ values).reshape(*scores.shape[:2], values.shape[-1])
