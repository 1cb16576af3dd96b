"""Attention in parts: over some of the keys at a time, without masks, merged by log-sum-exps."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch

from invariant_rag.attention.call import AttentionCall

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""PyTorch's fused attention on a CPU: the only public name of it does not hand out the log-sum-exps."""


class Part(NamedTuple):
    """Attention to some keys: outputs `[H, Q, D_v]`, and log-sum-exps of the scores `[H, Q]`, at least in float32."""

    out: torch.Tensor
    total: torch.Tensor


def can_split(call: AttentionCall, length: int) -> bool:
    """Whether attention over `length` keys may be computed in parts: on a CPU, softmax attention and nothing else."""
    return (
        call.queries.device.type == "cpu"
        and call.queries.shape[-1] == call.values.shape[-1]
        and call.softcap is None
        and call.sinks is None
        and call.dropout == 0.0
        and (call.window is None or call.window >= length)
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in (call.queries, call.keys, call.values)))
    )


def part(
    call: AttentionCall,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> Part:
    """Attend from queries `[H, Q, D]` to keys and values `[H_kv, S, D]`.

    Args:
        call: The layer's constants.
        queries: `[H, Q, D]`.
        keys: `[H_kv, S, D]`.
        values: `[H_kv, S, D]`.
        causal: Query t sees the keys 0 to t.
        mask: Boolean `[Q, S]`: what each query sees, at least one key each. None: everything.
    """
    heads, count, _ = queries.shape
    if not causal:
        # The heads that share keys are stacked along the queries: one larger product instead of several small ones.
        queries = queries.reshape(keys.shape[0], -1, queries.shape[-1])
        if mask is not None:
            bias = torch.zeros(mask.shape, dtype=queries.dtype).masked_fill_(~mask, float("-inf"))
            mask = bias.repeat(call.groups, 1)[None, None]
    out, total = _fused(queries[None], keys[None], values[None], is_causal=causal, attn_mask=mask, scale=call.scaling)
    return Part(out[0].reshape(heads, count, -1), total[0].reshape(heads, count))


def merged(parts: list[Part]) -> torch.Tensor:
    """Return attention over the keys of all parts `[H, Q, D_v]`."""
    return joined(parts).out


def joined(parts: list[Part]) -> Part:
    """Return attention over the keys of all parts, as a part."""
    if len(parts) == 1:
        return parts[0]
    total = reduce(torch.logaddexp, (each.total for each in parts))
    out = parts[0].out * (parts[0].total - total).exp()[..., None]
    for each in parts[1:]:
        out.addcmul_(each.out.to(out.dtype), (each.total - total).exp()[..., None])
    return Part(out.to(parts[0].out.dtype), total)
