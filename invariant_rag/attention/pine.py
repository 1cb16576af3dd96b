"""PINE's attention: every head ranks the segments by importance, for each segment and each text token (section 3.3).

Instead of rotating the keys of a segment to its ranked position, the queries are rotated by the opposite shift, once
per segment, so keys are never copied. Importance is computed in float32.

Short segments are kept in tiles of one size, so that a few matrix products attend to all of them; to long ones, one
fused call each is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from invariant_rag.arrangement import RankedSet, Row, Span
from invariant_rag.attention.base import AttentionCall
from invariant_rag.attention.softmax import (
    AttentionState,
    attend_row_runs,
    attend_with_mask,
    merge_attn_states,
    partial_attention,
)

_QUERY_BLOCK = 128  # queries per call, to limit the memory of float32 scores against all keys of a set
_CPU_SCORES = 1 << 21  # scores per call on a CPU: more leave its cache, and fewer wait for the slowest thread
_SHORT = 64  # maximum size of tiles at which matrix products are faster than one fused call per segment
_FEW_ROWS = 16  # queries, over the heads that share keys, up to which one product for all heads is fastest


def attend_ranked(call: AttentionCall, row: Row) -> torch.Tensor:
    """Return `[H, Q, D_v]` for a row with ranked sets, computed in blocks of queries."""
    together = [segment_shifts(call, each, row.queries) for each in row.ranked if each.own is not None]
    blocks = []
    for start in range(row.queries.start, row.queries.stop, _QUERY_BLOCK):
        part = row.part(start, min(start + _QUERY_BLOCK, row.queries.stop))
        shifts = together or [segment_shifts(call, each, part.queries) for each in row.ranked]
        blocks.append(_attend_block(call, part, shifts))
    return torch.cat(blocks, dim=1)


# --- ranks ---


def stack_by_importance(importance: torch.Tensor, lengths: torch.Tensor, dim: int) -> torch.Tensor:
    """Return where segments start, along `dim`, if the most important is stacked last; ties keep their order."""
    far_to_near = torch.sort(importance, dim=dim, stable=True).indices
    sorted_lengths = lengths.expand_as(importance).gather(dim, far_to_near)
    starts = sorted_lengths.cumsum(dim=dim) - sorted_lengths
    return torch.empty_like(starts).scatter_(dim, far_to_near, starts)


@torch.no_grad()  # ranks have no gradient
def segment_shifts(call: AttentionCall, ranked: RankedSet, queries: Span) -> torch.Tensor:
    """Return by how much each head shifts each segment for some queries `[H, Q, N]`.

    `[H, 1, N]` if the queries are one of the segments, whose own entry is undefined.
    """
    bounds = [(span.start, len(span)) for span in ranked.segments]
    table: torch.Tensor = call.cached(f"bounds {bounds[0][0]}", lambda: torch.tensor(bounds, device=call.keys.device).T)
    starts, lengths = table.contiguous().unbind()
    weights = _token_weights(call, queries, ranked) if ranked.own is None else _weights_in_segment(call, ranked)
    rows = weights.flatten(0, 1)
    sums = torch.segment_reduce(rows, "sum", lengths=lengths.expand(len(rows), -1), axis=1, unsafe=True)
    importance = sums.view(*weights.shape[:-1], -1) / lengths
    rank = -importance if ranked.reverse else importance
    if ranked.own is not None:
        rank[..., ranked.own] = float("inf")
    return stack_by_importance(rank, lengths, -1) + ranked.first_position - starts


def _token_weights(call: AttentionCall, queries: Span, ranked: RankedSet) -> torch.Tensor:
    """Return the weights of the tokens of a set for each query, without rotary positions `[H, Q, T]`, in float32."""
    keys, unrotated = _unrotated_keys(call, ranked), _unrotated_queries(call, queries)
    packed = unrotated.reshape(keys.shape[0], -1, keys.shape[-1])
    # For one token, keys are the left factor; see `_attend_token`.
    scores = (keys @ packed.mT).mT if len(queries) == 1 else packed @ keys.mT
    return torch.softmax(scores.reshape(*unrotated.shape[:2], -1), dim=-1)


def _weights_in_segment(call: AttentionCall, ranked: RankedSet) -> torch.Tensor:
    """Return the weights of the tokens of a set for one of its segments `[H, 1, T]`; its own tokens have none."""
    segment, first = ranked.segments[ranked.own or 0], ranked.segments[0].start
    keys, queries = _unrotated_keys(call, ranked), _unrotated_queries(call, segment)
    queries = queries.unflatten(0, (len(keys), -1))
    key_heads, groups, count, _ = queries.shape
    total = keys.new_zeros(key_heads, groups, keys.shape[1])
    block = _QUERY_BLOCK
    if keys.device.type == "cpu":
        most = max(8, _CPU_SCORES // (len(call.queries) * keys.shape[1]))
        block = math.ceil(count / math.ceil(count / most))  # as even as possible
    buffer = keys.new_empty(len(call.queries) * min(block, count) * keys.shape[1])
    for start in range(0, count, block):
        block_queries = queries[:, :, start : start + block]
        shape = (*block_queries.shape[:3], keys.shape[1])
        weights = buffer[: math.prod(shape)].view(key_heads, -1, keys.shape[1])
        torch.bmm(block_queries.flatten(1, 2), keys.transpose(1, 2), out=weights)
        weights[..., segment.start - first : segment.stop - first] = float("-inf")
        torch.softmax(weights, dim=-1, out=weights)
        total += weights.view(shape).sum(dim=2)
    return total.flatten(0, 1)[:, None]


def _unrotated_keys(call: AttentionCall, ranked: RankedSet) -> torch.Tensor:
    """Return the keys of a set as they are projected `[H_kv, T, D]`, in float32; each layer keeps them."""

    def make() -> torch.Tensor:
        first, stop = ranked.segments[0].start, ranked.segments[-1].stop
        positions = torch.arange(first, stop, device=call.keys.device)
        return call.rotation.unscaled(call.rotation.rotate_each(call.keys[:, first:stop], -positions, call.reach))

    keys: torch.Tensor = call.cached(f"unrotated {ranked.segments[0].start}", make)
    return keys


def _unrotated_queries(call: AttentionCall, queries: Span) -> torch.Tensor:
    """Return queries `[H, Q, D]` as they are projected, times the factor on the scores, in float32."""
    rotated = call.queries_of(queries)
    positions = torch.arange(queries.start, queries.stop, device=rotated.device)
    return call.rotation.unscaled(call.rotation.rotate_each(rotated, -positions, call.reach)) * call.scaling


# --- attention at these ranks ---


def _attend_block(call: AttentionCall, row: Row, shifts: list[torch.Tensor]) -> torch.Tensor:
    """Return the attention output of a block of a row `[H, Q, D_v]`."""
    if call.keys.shape[1] > call.max_split:
        return attend_with_mask(call, row, shifts)
    # Scores of float32 and wider need not be rounded separately from their log-sum-exps.
    is_exact = call.queries.dtype in (torch.float32, torch.float64)
    is_last = row.queries == Span(call.keys.shape[1] - 1, call.keys.shape[1])
    if is_exact and is_last and all(each.own is None and _tile_size(each.segments) > _SHORT for each in row.ranked):
        return _attend_token(call, row, shifts)
    ranked = [_attend_to_set(call, row, each, shift) for each, shift in zip(row.ranked, shifts, strict=True)]
    return merge_attn_states([*attend_row_runs(call, row), *ranked]).out


def _attend_token(call: AttentionCall, row: Row, shifts: list[torch.Tensor]) -> torch.Tensor:
    """Attend from the last token to all keys, with one softmax `[H, 1, D_v]`.

    Keys are the left operands of the products: a CPU then loads them in half the time.
    """
    query = call.queries[:, -1:] * call.scaling
    heads, head_dim = call.keys.shape[0], query.shape[-1]
    scores = {run.start: call.keys[:, run.start : run.stop] @ query.reshape(heads, -1, head_dim).mT for run in row.runs}
    for each, shift in zip(row.ranked, shifts, strict=True):
        rotated = call.rotation.rotate_each(query, -shift.permute(2, 0, 1), call.reach).to(query.dtype)
        columns = rotated.reshape(len(each.segments), heads, -1, head_dim).mT
        for span, column in zip(each.segments, columns, strict=True):
            scores[span.start] = torch.bmm(call.keys[:, span.start : span.stop], column)
    weights = torch.softmax(torch.cat([scores[start] for start in sorted(scores)], dim=1).mT, dim=-1)
    return (weights @ call.values).reshape(query.shape[0], 1, -1)


def _attend_to_set(call: AttentionCall, row: Row, ranked: RankedSet, shifts: torch.Tensor) -> AttentionState:
    """Attend from the queries of a row to the segments of a set, at shifts `[H, Q or 1, N]`, except their own one."""
    queries, spans, first = call.queries_of(row.queries), ranked.segments, ranked.segments[0].start
    if _tile_size(spans) <= _SHORT:
        tiles = call.cached(f"tiles {first}", lambda: _make_tiles(call, spans))
        return _attend_to_tiles(call, queries, tiles if ranked.own is None else tiles.without(ranked.own), shifts)
    keys = call.cached(f"paired {first}", lambda: call.rotation.pair(call.keys[:, first : spans[-1].stop]))
    states, paired = [], call.rotation.pair(queries)
    for number, span in enumerate(spans):
        if number != ranked.own:
            rotated = call.rotation.rotate_paired(paired, -shifts[..., number], call.reach).to(queries.dtype)
            values = call.values[:, span.start : span.stop]
            own = keys[:, span.start - first : span.stop - first]
            states.append(partial_attention(rotated, own, values, scaling=call.scaling))
    return merge_attn_states(states)


def _tile_size(spans: Sequence[Span]) -> int:
    lengths = sorted(map(len, spans))
    longest = lengths[-1]
    return longest if longest <= _SHORT else max(16, lengths[len(lengths) // 2])


@dataclass(frozen=True)
class _Tiles:
    """The keys and values of one set of short segments. A long one among them takes several tiles."""

    keys: torch.Tensor  # `[H_kv, M, B, D]`, laid out for `rotate_paired`, padded with zeros
    values: torch.Tensor  # `[H_kv, M, B, D_v]`
    bias: torch.Tensor  # `[M, 1, B]`: minus infinity for padding, else 0
    owners: torch.Tensor  # segment of each tile `[M]`

    def without(self, segment: int) -> _Tiles:
        """Return the tiles with one segment masked."""
        is_masked = (self.owners == segment)[:, None, None]
        return replace(self, bias=self.bias.masked_fill(is_masked, float("-inf")))


def _make_tiles(call: AttentionCall, spans: Sequence[Span]) -> _Tiles:
    """Split the keys and values of a set into tiles, in memory order."""
    size = _tile_size(spans)
    slices = [
        (owner, slice(start, min(start + size, span.stop)))
        for owner, span in enumerate(spans)
        for start in range(span.start, span.stop, size)
    ]
    shape = (call.keys.shape[0], len(slices), size)
    keys = call.keys.new_zeros(*shape, call.keys.shape[-1])
    values = call.values.new_zeros(*shape, call.values.shape[-1])
    bias = call.keys.new_full((len(slices), 1, size), float("-inf"))
    for tile, (_, tokens) in enumerate(slices):
        length = tokens.stop - tokens.start
        keys[:, tile, :length] = call.rotation.pair(call.keys[:, tokens])
        values[:, tile, :length] = call.values[:, tokens]
        bias[tile, :, :length] = 0.0
    return _Tiles(keys, values, bias, torch.tensor([owner for owner, _ in slices], device=keys.device))


def _attend_to_tiles(call: AttentionCall, queries: torch.Tensor, tiles: _Tiles, shifts: torch.Tensor) -> AttentionState:
    """Attend from tokens `[H, Q, D]` to tiles, whose segments have shifts `[H, Q or 1, N]`, with matrix products.

    With many queries, the key heads are processed one after the other, so that the scores fit into the CPU cache.
    """
    paired, tile_shifts = call.rotation.pair(queries), shifts[..., tiles.owners].permute(2, 0, 1)
    dtype, (key_heads, count, _, head_dim) = tiles.keys.dtype, tiles.keys.shape
    groups = call.num_key_value_groups
    heads_per_call = key_heads if queries.shape[1] * groups <= _FEW_ROWS else 1
    bias = tiles.bias.to(dtype).repeat(heads_per_call, 1, 1)
    outs, lses = [], []
    for head in range(0, key_heads, heads_per_call):
        key_head = slice(head, head + heads_per_call)
        heads = slice(head * groups, (head + heads_per_call) * groups)
        rotated = call.rotation.rotate_paired(paired[heads], -tile_shifts[:, heads], call.reach).to(dtype)
        packed = rotated.reshape(count, heads_per_call, -1, head_dim).transpose(0, 1).flatten(0, 1)
        keys = tiles.keys[key_head].flatten(0, 1).transpose(1, 2)
        scores = torch.baddbmm(bias, packed, keys, alpha=call.scaling)
        scores = scores.unflatten(0, (-1, count)).transpose(1, 2).flatten(2)
        scores = scores.to(torch.promote_types(dtype, torch.float32))
        highest = scores.amax(dim=-1, keepdim=True)
        weights = scores.sub_(highest).exp_()
        normaliser = weights.sum(dim=-1, keepdim=True)
        values = tiles.values[key_head].flatten(1, 2)
        outs.append((weights.to(values.dtype) @ values) / normaliser.to(values.dtype))
        lses.append((highest + normaliser.log())[..., 0])
    shape = paired.shape[:2]
    return AttentionState(torch.cat(outs).reshape(*shape, -1), torch.cat(lses).reshape(shape))
