"""Tiled attention for PINE: keys in tiles of equal size, so that one call attends to all segments at their own shifts.

Instead of shifting the keys of a segment, the queries are rotated by the opposite shift, once per tile. The tiles of a
prompt are built once per layer and used for all its queries, including those of generated tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from invariant_rag.arrangement import Span
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.fused import attention_with_lse
from invariant_rag.attention.merge_states import (
    AttentionState,
    merge_attn_states,
    merge_stacked,
    partial_attention,
)

_QUERY_BLOCK = 128  # queries per call: rotated queries are stored once per tile
_SHORT_TILE = 64  # maximum tile size at which one call for all tiles is faster than one call per segment
_FEW_ROWS = 16  # queries, over the heads that share keys, up to which matrix products of all heads are fastest


@dataclass(frozen=True)
class Tiles:
    """The keys and values of one set, split into tiles.

    Attributes:
        keys: `[H_kv, M, B, D]`, laid out for `turn`, padded with zeros.
        values: `[H_kv, M, B, D_v]`.
        bias: `[M, 1, B]`: minus infinity for padding, else 0.
        owners: Segment of each tile `[M]`.
        segments: Where the tokens of each segment are, if all tiles stand one behind the other.
    """

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    owners: torch.Tensor
    segments: tuple[Span, ...]

    def without(self, segment: int) -> Tiles:
        """Return the tiles with one segment masked."""
        bias, span = self.bias.clone(), self.segments[segment]
        bias.view(-1)[span.start : span.stop] = float("-inf")
        return replace(self, bias=bias)


def make_tiles(call: AttentionCall, spans: Sequence[Span]) -> Tiles:
    """Split the keys and values of a set into tiles, in memory order."""
    lengths = sorted(len(span) for span in spans if len(span))
    median, longest = lengths[len(lengths) // 2], lengths[-1]
    size = longest if longest <= _SHORT_TILE else min(256, max(16, median))
    counts = [-(-len(span) // size) for span in spans]
    firsts = list(accumulate(counts, initial=0))
    segments = tuple(Span(first * size, first * size + len(span)) for first, span in zip(firsts, spans, strict=False))
    shape = (call.keys.shape[0], firsts[-1] * size)
    keys = call.keys.new_zeros(*shape, call.keys.shape[-1])
    values = call.values.new_zeros(*shape, call.values.shape[-1])
    bias = call.keys.new_full((firsts[-1] * size,), float("-inf"))
    for at, span in zip(segments, spans, strict=True):
        keys[:, at.start : at.stop] = call.rotation.pair(call.keys[:, span.start : span.stop])
        values[:, at.start : at.stop] = call.values[:, span.start : span.stop]
        bias[at.start : at.stop] = 0.0
    owners = torch.tensor([owner for owner, count in enumerate(counts) for _ in range(count)], device=keys.device)
    return Tiles(
        keys.unflatten(1, (-1, size)), values.unflatten(1, (-1, size)), bias.view(-1, 1, size), owners, segments
    )


def attend_to_tiles(
    call: AttentionCall, queries: torch.Tensor, tiles: Tiles, shifts: torch.Tensor, reach: int
) -> AttentionState:
    """Attend from tokens `[H, Q, D]` to a set in one call.

    Args:
        call: The layer's constants.
        queries: The queries.
        tiles: The keys and values of the set.
        shifts: Shift of each segment for each head and query `[H, Q or 1, N]`.
        reach: Bound on the shifts.
    """
    (heads, num_queries, head_dim), (key_heads, count, size, _) = queries.shape, tiles.keys.shape
    paired, tile_shifts = call.rotation.pair(queries), shifts[..., tiles.owners].permute(2, 0, 1)
    if num_queries * call.num_key_value_groups <= _FEW_ROWS:
        return _attend_by_matmul(call, paired, tiles, tile_shifts, reach, key_heads)
    if size <= _SHORT_TILE:
        return _attend_by_matmul(call, paired, tiles, tile_shifts, reach, 1)
    packed = call.rotation.turn(paired, -tile_shifts, reach).to(queries.dtype).reshape(count, key_heads, -1, head_dim)
    bias = tiles.bias[:, None].expand(-1, 1, packed.shape[2], -1)
    keys, values = tiles.keys.transpose(0, 1), tiles.values.transpose(0, 1)
    out, lse = attention_with_lse(packed, keys, values, scaling=call.scaling, mask=bias)
    return merge_stacked(out.reshape(count, heads, num_queries, -1), lse.reshape(count, heads, num_queries))


def _attend_by_matmul(
    call: AttentionCall,
    paired: torch.Tensor,
    tiles: Tiles,
    shifts: torch.Tensor,
    reach: int,
    heads_per_call: int,
) -> AttentionState:
    """Attend with matrix products, which are faster than fused kernels for small tiles and for few queries.

    With many queries, the key heads are processed one after the other, so that the scores fit into the CPU cache.
    `shifts` are per tile: `[M, H, Q or 1]`.
    """
    outs, lses = [], []
    dtype, (key_heads, count, _, head_dim) = tiles.keys.dtype, tiles.keys.shape
    groups, bias = call.num_key_value_groups, tiles.bias.to(dtype).repeat(heads_per_call, 1, 1)
    for head in range(0, key_heads, heads_per_call):
        key_head = slice(head, head + heads_per_call)
        heads = slice(head * groups, (head + heads_per_call) * groups)
        turned = call.rotation.turn(paired[heads], -shifts[:, heads], reach).to(dtype)
        packed = turned.reshape(count, heads_per_call, -1, head_dim).transpose(0, 1).flatten(0, 1)
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


def attend_to_others(
    call: AttentionCall, queries: torch.Tensor, tiles: Tiles, shifts: torch.Tensor, reach: int, own: int
) -> AttentionState:
    """Attend from the tokens of one segment `[H, Q, D]` to the other segments of its set.

    Args:
        call: The layer's tensors.
        queries: The queries.
        tiles: The keys and values of the set in tiles.
        shifts: Shift of each segment for each head `[H, 1, N]`; all queries share one ranking.
        reach: Bound on the shifts.
        own: Index of the queries' segment.
    """
    if tiles.keys.shape[2] <= _SHORT_TILE:
        return attend_to_tiles(call, queries, tiles.without(own), shifts, reach)
    states, paired = [], call.rotation.pair(queries)
    keys, values = tiles.keys.flatten(1, 2), tiles.values.flatten(1, 2)
    for other, span in enumerate(tiles.segments):
        if other == own or not len(span):
            continue
        turned = call.rotation.turn(paired, -shifts[..., other], reach).to(queries.dtype)
        states.append(
            partial_attention(call, turned, keys[:, span.start : span.stop], values[:, span.start : span.stop])
        )
    return merge_attn_states(states)


def attend_block(
    call: AttentionCall,
    block: Span,
    texts: Sequence[tuple[Span, int]],
    sets: Sequence[Callable[[torch.Tensor, slice], AttentionState]],
) -> torch.Tensor:
    """Attend from a block of consecutive tokens to texts, to sets, and causally to the block itself.

    Args:
        call: The layer's tensors.
        block: The tokens.
        texts: Spans of keys before the block, with their shifts.
        sets: For each set, a function of some of the queries and their slice of the block that attends to the set.

    Returns:
        `[H, Q, D_v]`.
    """
    queries = call.queries[:, block.start - call.query_start : block.stop - call.query_start]
    own = partial_attention(
        call, queries, call.keys[:, block.start : block.stop], call.values[:, block.start : block.stop], is_causal=True
    )
    out = []
    for start in range(0, len(block), _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, len(block))
        part = queries[:, start:stop]
        states = [own.queries(slice(start, stop))]
        for span, shift in texts:
            if len(span):
                rotated = call.rotation.rotate(part, -shift)
                keys, values = call.keys[:, span.start : span.stop], call.values[:, span.start : span.stop]
                states.append(partial_attention(call, rotated, keys, values))
        states += [attend(part, slice(start, stop)) for attend in sets]
        out.append(merge_attn_states(states).out)
    return torch.cat(out, dim=1)
