"""Attention to the segments of a set at their own shifts, for PINE on a CPU.

Instead of shifting the keys of a segment, the queries are turned by the opposite shift, once per segment. Short
segments are kept in tiles of one size, so that a few matrix products attend to all of them; to long ones, one fused
call each is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from invariant_rag.arrangement import Span
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.merge_states import AttentionState, merge_attn_states, partial_attention

_SHORT = 64  # maximum size of tiles at which matrix products are faster than one fused call per segment
_FEW_ROWS = 16  # queries, over the heads that share keys, up to which one product for all heads is fastest


def is_short(spans: Sequence[Span]) -> bool:
    """Return whether most segments of a set are short, so that tiles are faster."""
    return _tile_size(spans) <= _SHORT


def _tile_size(spans: Sequence[Span]) -> int:
    lengths = sorted(map(len, spans))
    longest = lengths[-1]
    return longest if longest <= _SHORT else max(16, lengths[len(lengths) // 2])


@dataclass(frozen=True)
class Tiles:
    """The keys and values of one set of short segments. A long one among them takes several tiles.

    Attributes:
        keys: `[H_kv, M, B, D]`, laid out for `turn`, padded with zeros.
        values: `[H_kv, M, B, D_v]`.
        bias: `[M, 1, B]`: minus infinity for padding, else 0.
        owners: Segment of each tile `[M]`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    owners: torch.Tensor

    def without(self, segment: int) -> Tiles:
        """Return the tiles with one segment masked."""
        is_masked = (self.owners == segment)[:, None, None]
        return replace(self, bias=self.bias.masked_fill(is_masked, float("-inf")))


def make_tiles(call: AttentionCall, spans: Sequence[Span]) -> Tiles:
    """Split the keys and values of a set into tiles, in memory order."""
    size = _tile_size(spans)
    pieces = [
        (owner, slice(start, min(start + size, span.stop)))
        for owner, span in enumerate(spans)
        for start in range(span.start, span.stop, size)
    ]
    shape = (call.keys.shape[0], len(pieces), size)
    keys = call.keys.new_zeros(*shape, call.keys.shape[-1])
    values = call.values.new_zeros(*shape, call.values.shape[-1])
    bias = call.keys.new_full((len(pieces), 1, size), float("-inf"))
    for tile, (_, piece) in enumerate(pieces):
        length = piece.stop - piece.start
        keys[:, tile, :length] = call.rotation.pair(call.keys[:, piece])
        values[:, tile, :length] = call.values[:, piece]
        bias[tile, :, :length] = 0.0
    return Tiles(keys, values, bias, torch.tensor([owner for owner, _ in pieces], device=keys.device))


def attend_to_tiles(call: AttentionCall, queries: torch.Tensor, tiles: Tiles, shifts: torch.Tensor) -> AttentionState:
    """Attend from tokens `[H, Q, D]` to a set of short segments, with matrix products.

    With many queries, the key heads are processed one after the other, so that the scores fit into the CPU cache.

    Args:
        call: The layer's constants.
        queries: The queries.
        tiles: The keys and values of the set.
        shifts: Shift of each segment for each head and query `[H, Q or 1, N]`.
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
        turned = call.rotation.turn(paired[heads], -tile_shifts[:, heads], call.reach).to(dtype)
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


def attend_to_segments(
    call: AttentionCall,
    queries: torch.Tensor,
    paired_keys: torch.Tensor,
    spans: Sequence[Span],
    shifts: torch.Tensor,
    own: int | None,
) -> AttentionState:
    """Attend from tokens `[H, Q, D]` to a set of long segments, with one fused call each.

    Args:
        call: The layer's tensors.
        queries: The queries.
        paired_keys: The keys of the set `[H_kv, T, D]`, laid out for `turn`.
        spans: The segments of the set.
        shifts: Shift of each segment for each head and query `[H, Q or 1, N]`.
        own: Index of the queries' segment, which is left out; None: the queries belong to none.
    """
    states, paired, first = [], call.rotation.pair(queries), spans[0].start
    for number, span in enumerate(spans):
        if number == own:
            continue
        turned = call.rotation.turn(paired, -shifts[..., number], call.reach).to(queries.dtype)
        keys = paired_keys[:, span.start - first : span.stop - first]
        states.append(partial_attention(call, turned, keys, call.values[:, span.start : span.stop]))
    return merge_attn_states(states)
