"""Attention over some of the keys at a time, without masks, merged by log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from invariant_rag.arrangement import Row
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.fused import attention_with_lse


class AttentionState(NamedTuple):
    """Attention to some of the keys.

    Attributes:
        out: Outputs `[H, Q, D_v]`.
        lse: Log-sum-exps of the scores `[H, Q]`, at least in float32.
    """

    out: torch.Tensor
    lse: torch.Tensor


def partial_attention(
    call: AttentionCall,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> AttentionState:
    """Attend from queries to some of the keys.

    Args:
        call: The layer's constants.
        queries: `[H, Q, D]`.
        keys: `[H_kv, S, D]`.
        values: `[H_kv, S, D_v]`, at most as wide as the keys.
        is_causal: Query t sees the keys 0 to t.
        mask: Boolean `[Q, S]`: what each query sees, at least one key each. None: everything.
    """
    heads, count, _ = queries.shape
    if not is_causal:
        # The heads that share keys are stacked along the queries: one larger product instead of several small ones.
        queries = queries.reshape(keys.shape[0], -1, queries.shape[-1])
        if mask is not None:
            bias = torch.zeros(mask.shape, dtype=queries.dtype).masked_fill_(~mask, float("-inf"))
            mask = bias.repeat(call.num_key_value_groups, 1)[None, None]
    out, lse = attention_with_lse(
        queries[None], keys[None], values[None], scaling=call.scaling, is_causal=is_causal, mask=mask
    )
    return AttentionState(out[0].reshape(heads, count, -1), lse[0].reshape(heads, count))


def attend_row_runs(call: AttentionCall, row: Row) -> list[AttentionState]:
    """Attend from the queries of a row to each of its runs, queries rotated instead of keys; no ranked sets."""
    queries, first, (*before, own) = call.queries_of(row.queries), row.queries.start, row.runs
    parts = [*before, replace(own, stop=first)] if own.start < first else before
    states = []
    for run in [*parts, replace(own, start=first)]:
        keys, values = call.keys[:, run.start : run.stop], call.values[:, run.start : run.stop]
        sharpened = replace(call, scaling=call.scaling / run.weighting.temperature)
        rotated = call.rotation.rotate(queries, -run.shift)
        out, lse = partial_attention(sharpened, rotated, keys, values, is_causal=run.stop == own.stop)
        states.append(AttentionState(out, lse * run.weighting.factor + run.weighting.offset))
    return states


def merge_attn_states(states: Sequence[AttentionState]) -> AttentionState:
    """Merge attention to disjoint keys into attention to all of them."""
    if len(states) == 1:
        return states[0]
    first, *others = states
    lse = first.lse
    for each in others:
        lse = torch.logaddexp(lse, each.lse)
    out = first.out * (first.lse - lse).exp()[..., None]
    for each in others:
        out.addcmul_(each.out.to(out.dtype), (each.lse - lse).exp()[..., None])
    return AttentionState(out.to(first.out.dtype), lse)


def merge_stacked(outs: torch.Tensor, lses: torch.Tensor) -> AttentionState:
    """Merge attention to disjoint keys, stacked along a first dimension; minus infinity is attention to nothing.

    Args:
        outs: Outputs `[M, ..., D_v]`.
        lses: Log-sum-exps `[M, ...]`.
    """
    if outs.shape[0] == 1:
        return AttentionState(outs[0], lses[0])
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse).exp().nan_to_num(0.0)  # a query that sees nothing has no weights
    return AttentionState((outs * weights[..., None]).sum(dim=0).to(outs.dtype), lse)
