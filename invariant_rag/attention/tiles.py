"""PINE in parts: keys in tiles of equal size, so that one call attends to all segments, each at its own shift.

A segment at another position is a constant rotation away, and it is the query that is rotated, once per tile. The tiles
of a prompt are made once and serve all of its queries, those of generated tokens included.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from invariant_rag.arrangement import Span
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.fused import attention_with_lse
from invariant_rag.attention.merge_states import AttentionState, merge_attn_states, partial_attention

_QUERIES = 128  # at a time: each is held once for every tile
_SHORT_TILE = 64  # tokens of a tile up to which one call for all tiles is faster than one call for each segment


@dataclass(frozen=True)
class Tiles:
    """The keys and values of one set, split into tiles.

    Attributes:
        keys: `[M, H_kv, B, D]`, padded with zeros.
        values: `[M, H_kv, B, D]`.
        bias: `[M, 1, 1, B]`: minus infinity where a tile is padded.
        owners: Which segment each tile belongs to.
    """

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    owners: tuple[int, ...]

    def without(self, segment: int) -> Tiles:
        """Return the same tiles with those of one segment masked."""
        first, stop = bisect_left(self.owners, segment), bisect_right(self.owners, segment)
        bias = self.bias.clone()
        bias[first:stop] = float("-inf")
        return replace(self, bias=bias)


def make_tiles(call: AttentionCall, spans: Sequence[Span]) -> Tiles:
    """Split the keys of a set into tiles, in memory order."""
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
        tiles: The segments.
        shifts: `[H, Q or 1, N]`: shift at which each head and query sees each segment.
        reach: Bound on the shifts.
    """
    count, (heads, asked, size) = len(tiles.owners), queries.shape
    by = shifts[..., list(tiles.owners)].permute(2, 0, 1)
    if tiles.keys.shape[2] <= _SHORT_TILE:
        return _attend_by_matmul(call, queries, tiles, by, reach)
    rotated = call.rotation.rotate_each(queries, -by, reach).to(queries.dtype)
    packed = rotated.reshape(count, call.keys.shape[0], -1, size)
    bias = tiles.bias.expand(-1, 1, packed.shape[2], -1)
    out, lse = attention_with_lse(packed, tiles.keys, tiles.values, scaling=call.scaling, mask=bias)
    states = zip(out.reshape(count, heads, asked, -1), lse.reshape(count, heads, asked), strict=True)
    return merge_attn_states([AttentionState(*each) for each in states])


def _attend_by_matmul(
    call: AttentionCall, queries: torch.Tensor, tiles: Tiles, shifts: torch.Tensor, reach: int
) -> AttentionState:
    """Attend by matrix products, which are faster than fused kernels for small tiles.

    The heads that share keys are computed one group after the other, so that everything stays in a processor's cache.
    `shifts`: `[M, H, Q or 1]`.
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
    """Attend from tokens of one segment `[H, Q, D]`, which ranks the others as a whole, to those others.

    Args:
        call: The layer's tensors.
        queries: The queries.
        spans: The segments of the set.
        tiles: The same in tiles.
        shifts: `[H, 1, N]`: shift at which each head sees each segment.
        reach: Bound on the shifts.
        own: The segment that the queries belong to.
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
    """Attend from neighbouring tokens `[H, Q, D_v]` to texts, to sets, and causally to themselves.

    Args:
        call: The layer's tensors.
        block: The tokens.
        texts: Spans of keys before the tokens, each with its shift.
        sets: For each set, a function that attends to it from some of the queries, given with their place in the block.
    """
    queries = call.queries[:, block.start - call.query_start : block.stop - call.query_start]
    own = partial_attention(
        call, queries, call.keys[:, block.start : block.stop], call.values[:, block.start : block.stop], is_causal=True
    )
    out = []
    for start in range(0, len(block), _QUERIES):
        stop = min(start + _QUERIES, len(block))
        some = queries[:, start:stop]
        states = [own.queries(slice(start, stop))]
        for span, shift in texts:
            if len(span):
                rotated = call.rotation.rotate(some, -shift)
                keys, values = call.keys[:, span.start : span.stop], call.values[:, span.start : span.stop]
                states.append(partial_attention(call, rotated, keys, values))
        states += [attend(some, slice(start, stop)) for attend in sets]
        out.append(merge_attn_states(states).out)
    return torch.cat(out, dim=1)
