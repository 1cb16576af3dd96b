"""Softmax attention of one row: in parts that their log-sum-exps merge, or at once with a mask."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from invariant_rag.arrangement import UNWEIGHTED, Row, Run, Span, Weighting
from invariant_rag.attention.base import AttentionCall

_QUERY_BLOCK = 512  # queries per call with a mask, so that memory is linear in the number of keys
_logger = logging.getLogger(__name__)
_SCORE_BLOCK = 64  # queries at a time that hold their scores against every key in float32


def attend_row(call: AttentionCall, row: Row) -> torch.Tensor:
    """Return the attention outputs `[H, Q, D_v]` of a row without ranked sets."""
    if row.length <= call.max_split:
        return merge_attn_states(attend_row_runs(call, row)).out
    if row.is_weighted or call.softcap is not None or call.sinks is not None:
        return attend_with_mask(call, row)
    queries, window = call.queries_of(row.queries), call.sliding_window
    keys, values = rotated_keys(call, row.runs)
    options: dict[str, Any] = {"scale": call.scaling, "dropout_p": call.dropout}
    count, length = queries.shape[1], keys.shape[1]
    if count == length and (window is None or window >= length):
        is_grouped = call.num_key_value_groups > 1
        return F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], is_causal=True, enable_gqa=is_grouped, **options
        )[0]
    blocks = []
    for start in range(0, count, _QUERY_BLOCK):
        block = queries[:, start : start + _QUERY_BLOCK]
        last = length - count + start + block.shape[1]
        first = 0 if window is None else max(0, length - count + start + 1 - window)
        mask = causal_mask(block.shape[1], last - first, window, queries.device)
        # Heads that share keys are stacked along the query dimension: one large product instead of several small ones.
        out = F.scaled_dot_product_attention(
            block.reshape(1, keys.shape[0], -1, block.shape[-1]),
            keys[None, :, first:last],
            values[None, :, first:last],
            attn_mask=mask.repeat(call.num_key_value_groups, 1),
            **options,
        )
        blocks.append(out.reshape(*block.shape[:2], values.shape[-1]))
    return torch.cat(blocks, dim=1)


def rotated_keys(call: AttentionCall, runs: Sequence[Run]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of some runs at their shifts `[H_kv, K, D]`, and their values."""
    keys, values = [], []
    for run in runs:
        own = call.keys[:, run.start : run.stop]
        keys.append(call.rotation.rotate_by(own, run.shift) if run.shift else own)
        values.append(call.values[:, run.start : run.stop])
    return torch.cat(keys, dim=1), torch.cat(values, dim=1)


def plain_attention(call: AttentionCall) -> torch.Tensor:
    """Return the attention outputs `[H, Q, D_v]` of the plain causal model."""
    length = call.keys.shape[1]
    return attend_row(call, Row(Span(call.query_start, length), (Run(0, length, 0),)))


def causal_mask(queries: int, keys: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """Return a boolean mask `[Q, S]`, True where one of the last Q of S tokens attends to a key."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) if sliding_window is None else (distance >= 0) & (distance < sliding_window)


def apply_softcap(call: AttentionCall, scores: torch.Tensor) -> torch.Tensor:
    """Apply the layer's soft cap to scaled scores, if it has one."""
    return scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)


# --- in parts ---


class AttentionState(NamedTuple):
    """Attention to some of the keys."""

    out: torch.Tensor  # outputs `[H, Q, D_v]`
    lse: torch.Tensor  # log-sum-exps of the scores `[H, Q]`, at least in float32


def partial_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> AttentionState:
    """Attend from queries `[H, Q, D]` to some keys `[H_kv, S, D]`, with values `[H_kv, S, D_v]` and `D_v <= D`.

    With `is_causal`, query t attends to the keys 0 to t; a boolean mask `[Q, S]` leaves each query at least one key.
    """
    (heads, count, _), (key_heads, _, width) = queries.shape, values.shape
    if not is_causal:
        # The heads that share keys are stacked along the queries: one larger product instead of several small ones.
        queries = queries.reshape(key_heads, -1, queries.shape[-1])
        if mask is not None:
            bias = torch.zeros(mask.shape, dtype=queries.dtype).masked_fill_(~mask, float("-inf"))
            mask = bias.repeat(heads // key_heads, 1)[None, None]
    if width < keys.shape[-1]:  # the kernel wants one width
        values = F.pad(values, (0, keys.shape[-1] - width))
    out, lse = _kernel()(queries[None], keys[None], values[None], is_causal=is_causal, attn_mask=mask, scale=scaling)
    return AttentionState(out[0, ..., :width].reshape(heads, count, width), lse[0].reshape(heads, count))


def attend_row_runs(call: AttentionCall, row: Row) -> list[AttentionState]:
    """Attend from the queries of a row to each of its runs, queries rotated instead of keys; no ranked sets."""
    queries, first, (*before, own) = call.queries_of(row.queries), row.queries.start, row.runs
    parts = [*before, replace(own, stop=first)] if own.start < first else before
    states = []
    for run in [*parts, replace(own, start=first)]:
        keys, values = call.keys[:, run.start : run.stop], call.values[:, run.start : run.stop]
        rotated = call.rotation.rotate_by(queries, -run.shift) if run.shift else queries
        scaling = call.scaling / run.weighting.temperature
        out, lse = partial_attention(rotated, keys, values, scaling=scaling, is_causal=run.stop == own.stop)
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
    """Merge attention to disjoint keys, `[M, ..., D_v]` and `[M, ...]`; a log-sum-exp of minus infinity: to no key."""
    if outs.shape[0] == 1:
        return AttentionState(outs[0], lses[0])
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse).exp().nan_to_num(0.0)  # a query without keys has no weights
    return AttentionState((outs * weights[..., None]).sum(dim=0).to(outs.dtype), lse)


# --- with a mask: layers that cannot be computed in parts, with weights or ranks ---


def attend_with_mask(call: AttentionCall, row: Row, shifts: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Return the attention outputs `[H, Q, D_v]` of a row, with one softmax for each query.

    Each of its ranked sets has shifts of its segments `[H, Q or 1, N]`.
    """
    ranked = [
        (Run(span.start, span.stop, 0), shift[..., index])
        for each, shift in zip(row.ranked, shifts, strict=True)
        for index, span in enumerate(each.segments)
        if index != each.own
    ]
    blocks = []
    for start in range(row.queries.start, row.queries.stop, _SCORE_BLOCK):
        stop = min(start + _SCORE_BLOCK, row.queries.stop)
        inside = slice(start - row.queries.start, stop - row.queries.start)
        parts = [(run, shift if shift.shape[1] == 1 else shift[:, inside]) for run, shift in ranked]
        blocks.append(_attend_block(call, row.part(start, stop), parts))
    return torch.cat(blocks, dim=1)


def _attend_block(call: AttentionCall, row: Row, ranked: list[tuple[Run, torch.Tensor]]) -> torch.Tensor:
    queries = call.queries_of(row.queries)
    index = torch.arange(row.queries.start, row.queries.stop, device=queries.device)
    position = row.queries.stop - sum(map(len, row.runs))  # where the row begins, if it ends with its last query
    scores, values = [], []
    for whole in row.runs:
        # Sliding windows count keys along the row. With ranked sets the row is stacked: its indices are its positions.
        along = whole.shift if ranked else position - whole.start
        position += len(whole)
        # Keys that the first query is too far from, all queries are too far from.
        hidden = 0 if call.sliding_window is None else row.queries.start - along - call.sliding_window + 1
        run = replace(whole, start=min(max(whole.start, hidden), whole.stop))
        distance = (index - along)[:, None] - torch.arange(run.start, run.stop, device=index.device)
        rotated = call.rotation.rotate_by(queries, -run.shift) if run.shift else queries
        scores.append(_scores(call, rotated, run, distance, run.weighting))
        values.append(call.values[:, run.start : run.stop])
    for run, shift in ranked:
        shifts = shift.expand(queries.shape[:2])
        rotated = call.rotation.rotate_each(queries, -shifts, call.reach).to(queries.dtype)
        distance = (index - shifts)[..., None] - torch.arange(run.start, run.stop, device=index.device)
        scores.append(_scores(call, rotated, run, distance, UNWEIGHTED))
        values.append(call.values[:, run.start : run.stop])
    return _softmax_values(call, torch.cat(scores, dim=-1), torch.cat(values, dim=1))


def _scores(
    call: AttentionCall, queries: torch.Tensor, run: Run, distance: torch.Tensor, weighting: Weighting
) -> torch.Tensor:
    """Return the scores of a run `[H, Q, K]`, minus infinity where masked, such that one softmax merges all runs.

    A constant that is added to all scores of a run changes its weight and nothing inside it.
    """
    keys = call.keys[:, run.start : run.stop]
    packed = queries.reshape(keys.shape[0], -1, keys.shape[-1])
    scores = apply_softcap(call, (packed @ keys.mT).reshape(*queries.shape[:2], -1).float() * call.scaling)
    hidden = (distance < 0) if call.sliding_window is None else (distance < 0) | (distance >= call.sliding_window)
    scores = scores.masked_fill(hidden, float("-inf")) / weighting.temperature
    if weighting.factor == 1.0:
        return scores + weighting.offset
    lse = scores.logsumexp(dim=-1, keepdim=True)
    # Where a sliding window hides the whole run there is nothing to weigh.
    return scores + (weighting.factor * lse + weighting.offset - lse).nan_to_num(0.0)


def _softmax_values(call: AttentionCall, scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return outputs `[H, Q, D_v]` for scores `[H, Q, S]` that are minus infinity where masked."""
    if call.sinks is not None:
        sinks = call.sinks.to(scores).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : values.shape[1]]
    weights = F.dropout(weights, call.dropout).to(values.dtype)
    packed = weights.reshape(values.shape[0], -1, weights.shape[-1])
    return (packed @ values).reshape(*scores.shape[:2], values.shape[-1])


# --- with log-sum-exps: the only code that calls a private operator of PyTorch ---

# PyTorch's fused CPU kernel computes the log-sum-exps, but its public name, `scaled_dot_product_attention`, does not
# return them. A release may rename or change the operator. Then matrix products compute the same, slower, with a
# warning.
OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"

Result: TypeAlias = tuple[Tensor, Tensor]
Kernel: TypeAlias = Callable[..., Result]
"""Takes queries `[B, H, Q, D]`, keys and values `[B, H_kv, S, D]`, and by name as PyTorch's operator: `is_causal`,
`attn_mask` (additive, broadcasts to `[B, H, Q, S]`, or None), and `scale`, the factor on the scores."""


@cache
def _kernel() -> Kernel:
    """Return the fastest kernel that computes the right thing with this PyTorch."""
    wrong, operator = "there is none", getattr(torch.ops.aten, OPERATOR, None)
    for kernel in () if operator is None else (operator, ungrouped_kernel):
        wrong = _difference(kernel)
        if not wrong:
            return kernel
    _logger.warning(
        "PyTorch %s has no usable operator aten::%s (%s): attention on this CPU is computed by matrix products, which "
        "is slower; results agree up to rounding. Install a PyTorch that invariant-rag was tested with.",
        torch.__version__,
        OPERATOR,
        wrong,
    )
    return matmul_kernel


def _difference(kernel: Kernel) -> str:
    """Return how a kernel differs from matrix products on grouped heads; empty if it does not."""
    queries, keys = torch.linspace(-1, 1, 48).reshape(1, 2, 3, 8), torch.linspace(1, -1, 24).reshape(1, 1, 3, 8)
    for is_causal in (True, False):
        try:
            results = kernel(queries, keys, keys, is_causal=is_causal, attn_mask=None, scale=0.5)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            return str(error)
        expected = matmul_kernel(queries, keys, keys, is_causal=is_causal, attn_mask=None, scale=0.5)
        for result, right in zip(results, expected, strict=True):
            if result.shape != right.shape or not torch.allclose(result, right, atol=1e-5):
                return "its results are not those of matrix products"
    return ""


def ungrouped_kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Result:
    """Compute attention with the fused CPU kernel of PyTorch below 2.9, which is wrong for grouped heads."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (each.repeat_interleave(groups, dim=1) for each in (k, v))
    result: Result = getattr(torch.ops.aten, OPERATOR)(q, keys, values, **options)
    return result


def matmul_kernel(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, attn_mask: Tensor | None, scale: float
) -> Result:
    """Compute attention by matrix products, in float32 or wider; memory grows with Q times S."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    keys, values = (each.to(wide).repeat_interleave(groups, dim=1) for each in (k, v))
    scores = q.to(wide) @ keys.mT * scale
    if attn_mask is not None:
        scores = scores + attn_mask.to(wide)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)  # a query without keys has no weights
    return (weights @ values).to(q.dtype), lse
