"""Tiled attention for PINE: keys in tiles of equal size, so that one call attends to all segments at their own shifts.

Instead of shifting the keys of a segment, the queries are rotated by the opposite shift, once per tile. The tiles of a
prompt are built once per layer and used for all its queries, including those of generated tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Tiles:
    """The keys and values of one set, split into tiles.

    Attributes:
        keys: `[M, H_kv, B, D]`, padded with zeros.
        values: `[M, H_kv, B, D]`.
        bias: `[M, 1, 1, B]`: minus infinity for padding, else 0.
        owners: Index of each tile's segment.
    """

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    owners: tuple[int, ...]

    def without(self, segment: int) -> Tiles:
        """Return the tiles with one segment masked."""
        first, stop = bisect_left(self.owners, segment), bisect_right(self.owners, segment)
        bias = self.bias.clone()
        bias[first:stop] = float("-inf")
        return replace(self, bias=bias)


def make_tiles(call: AttentionCall, spans: Sequence[Span]) -> Tiles:
    """Split the keys and values of a set into tiles, in memory order."""
    lengths = sorted(len(span) for span in spans if len(span))
    median, longest = lengths[len(lengths) // 2], lengths[-1]
    size = longest if longest <= _SHORT_TILE else min(256, max(16, median))
    pieces = [
        (owner, start, min(start + size, span.stop))
        for owner, span in enumerate(spans)
        for start in range(span.start, span.stop, size)
    ]
    shape = (len(pieces), call.keys.shape[0], size)
    keys = call.keys.new_zeros(*shape, call.keys.shape[-1])
    values = call.values.new_zeros(*shape, call.values.shape[-1])
    bias = call.keys.new_full((len(pieces), 1, 1, size), float("-inf"))
    for tile, (_, start, stop) in enumerate(pieces):
        keys[tile, :, : stop - start] = call.keys[:, start:stop]
        values[tile, :, : stop - start] = call.values[:, start:stop]
        bias[tile, ..., : stop - start] = 0.0
    return Tiles(keys, values, bias, tuple(owner for owner, _, _ in pieces))


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
    count, (heads, num_queries, head_dim) = len(tiles.owners), queries.shape
    tile_shifts = shifts[..., list(tiles.owners)].permute(2, 0, 1)
    if tiles.keys.shape[2] <= _SHORT_TILE:
        return _attend_by_matmul(call, queries, tiles, tile_shifts, reach)
    rotated = call.rotation.rotate_each(queries, -tile_shifts, reach).to(queries.dtype)
    packed = rotated.reshape(count, call.keys.shape[0], -1, head_dim)
    bias = tiles.bias.expand(-1, 1, packed.shape[2], -1)
    out, lse = attention_with_lse(packed, tiles.keys, tiles.values, scaling=call.scaling, mask=bias)
    return merge_stacked(out.reshape(count, heads, num_queries, -1), lse.reshape(count, heads, num_queries))


def _attend_by_matmul(
    call: AttentionCall, queries: torch.Tensor, tiles: Tiles, shifts: torch.Tensor, reach: int
) -> AttentionState:
    """Attend with matrix products, which are faster than fused kernels for small tiles.

    Groups of heads that share keys are processed one after the other, so that the scores fit into the CPU cache.
    `shifts` are per tile: `[M, H, Q or 1]`.
    """
    outs, lses = [], []
    groups, bias = call.num_key_value_groups, tiles.bias[:, 0].to(queries.dtype)
    for head in range(call.keys.shape[0]):
        heads = slice(head * groups, (head + 1) * groups)
        rotated = call.rotation.rotate_each(queries[heads], -shifts[:, heads], reach).to(queries.dtype)
        packed = rotated.reshape(len(tiles.owners), -1, queries.shape[-1])
        scores = torch.baddbmm(bias, packed, tiles.keys[:, head].transpose(1, 2), alpha=call.scaling)
        scores = scores.transpose(0, 1).reshape(packed.shape[1], -1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        highest = scores.amax(dim=-1, keepdim=True)
        weights = scores.sub_(highest).exp_()
        normaliser = weights.sum(dim=-1, keepdim=True)
        values = tiles.values[:, head].reshape(-1, tiles.values.shape[-1])
        outs.append((weights.to(values.dtype) @ values) / normaliser.to(values.dtype))
        lses.append((highest + normaliser.log())[:, 0])
    shape = queries.shape[:2]
    return AttentionState(torch.stack(outs).reshape(*shape, -1), torch.stack(lses).reshape(shape))


def attend_to_others(
    call: AttentionCall,
    queries: torch.Tensor,
    spans: Sequence[Span],
    tiles: Tiles,
    shifts: torch.Tensor,
    reach: int,
    own: int,
) -> AttentionState:
    """Attend from the tokens of one segment `[H, Q, D]` to the other segments of its set.

    Args:
        call: The layer's tensors.
        queries: The queries.
        spans: The segments of the set.
        tiles: The keys and values of the set in tiles.
        shifts: Shift of each segment for each head `[H, 1, N]`; all queries share one ranking.
        reach: Bound on the shifts.
        own: Index of the queries' segment.
    """
    if tiles.keys.shape[2] <= _SHORT_TILE:
        return attend_to_tiles(call, queries, tiles.without(own), shifts, reach)
    states = []
    for other, span in enumerate(spans):
        if other == own or not len(span):
            continue
        rotated = call.rotation.rotate_each(queries, -shifts[..., other], reach).to(queries.dtype)
        keys, values = call.keys[:, span.start : span.stop], call.values[:, span.start : span.stop]
        states.append(partial_attention(call, rotated, keys, values))
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
