"""PINE in parts: keys in tiles of equal size, so that all segments are read in one call, each at its own shift.

A segment that a reader sees elsewhere is a constant rotation away, and it is the query that is turned, once per tile.
The tiles of a prompt are cut once and serve every reader, the tokens that are generated included.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from invariant_rag.arrangement import Span
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.merge_states import Part, joined, merged, part

_QUERIES = 128  # at a time: each is held once for every tile
_SHORT = 64  # tokens of a tile up to which one call for all tiles is faster than one call for each segment


@dataclass(frozen=True)
class Tiles:
    """The segments of one set, cut into tiles.

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
        """The tiles of the other segments; those of this one stay, unseen."""
        first, stop = bisect_left(self.owners, segment), bisect_right(self.owners, segment)
        bias = self.bias.clone()
        bias[first:stop] = float("-inf")
        return replace(self, bias=bias)


def cut(call: AttentionCall, spans: Sequence[Span]) -> Tiles:
    """Cut the segments of a set into tiles, which keep their order."""
    lengths = sorted(len(span) for span in spans if len(span))
    median, longest = lengths[len(lengths) // 2], lengths[-1]
    size = longest if longest <= _SHORT else min(256, max(16, median))
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


def attend_to_tiles(call: AttentionCall, queries: torch.Tensor, tiles: Tiles, shifts: torch.Tensor, reach: int) -> Part:
    """Attend from tokens `[H, Q, D]` to a set in one call.

    Args:
        call: The layer's constants.
        queries: The queries.
        tiles: The segments.
        shifts: `[H, Q or 1, N]`: how far later than they lie each head and query sees the segments.
        reach: Bound on the shifts.
    """
    count, (heads, asked, size) = len(tiles.owners), queries.shape
    by = shifts[..., list(tiles.owners)].permute(2, 0, 1)
    if tiles.keys.shape[2] <= _SHORT:
        return _attend_to_short(call, queries, tiles, by, reach)
    turned = call.rotation.rotate_each(queries, -by, reach).to(queries.dtype)
    packed = turned.reshape(count, call.keys.shape[0], -1, size)
    bias = tiles.bias.expand(-1, 1, packed.shape[2], -1)
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        packed, tiles.keys, tiles.values, attn_mask=bias, scale=call.scaling
    )
    parts = zip(out.reshape(count, heads, asked, -1), total.reshape(count, heads, asked), strict=True)
    return joined([Part(*each) for each in parts])


def _attend_to_short(
    call: AttentionCall, queries: torch.Tensor, tiles: Tiles, shifts: torch.Tensor, reach: int
) -> Part:
    """Attend by matrix products, which small tiles keep busier than fused kernels.

    The heads that share keys are read one group after the other, so that everything stays in a processor's cache.
    `shifts`: `[M, H, Q or 1]`.
    """
    outs, totals = [], []
    groups, bias = call.groups, tiles.bias[:, 0].to(queries.dtype)
    for head in range(call.keys.shape[0]):
        heads = slice(head * groups, (head + 1) * groups)
        turned = call.rotation.rotate_each(queries[heads], -shifts[:, heads], reach).to(queries.dtype)
        packed = turned.reshape(len(tiles.owners), -1, queries.shape[-1])
        scores = torch.baddbmm(bias, packed, tiles.keys[:, head].transpose(1, 2), alpha=call.scaling)
        scores = scores.transpose(0, 1).reshape(packed.shape[1], -1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        highest = scores.amax(dim=-1, keepdim=True)
        weights = scores.sub_(highest).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        values = tiles.values[:, head].reshape(-1, tiles.values.shape[-1])
        outs.append((weights.to(values.dtype) @ values) / total.to(values.dtype))
        totals.append((highest + total.log())[:, 0])
    shape = queries.shape[:2]
    return Part(torch.stack(outs).reshape(*shape, -1), torch.stack(totals).reshape(shape))


def attend_to_others(
    call: AttentionCall,
    queries: torch.Tensor,
    spans: Sequence[Span],
    tiles: Tiles,
    shifts: torch.Tensor,
    reach: int,
    own: int,
) -> Part:
    """Attend from tokens of one segment `[H, Q, D]`, which ranks the others as a whole, to those others.

    Args:
        call: The layer's tensors.
        queries: The queries.
        spans: The segments of the set.
        tiles: The same in tiles.
        shifts: `[H, 1, N]`: how far later than they lie each head sees the segments.
        reach: Bound on the shifts.
        own: The segment that reads.
    """
    if tiles.keys.shape[2] <= _SHORT:
        return attend_to_tiles(call, queries, tiles.without(own), shifts, reach)
    parts = []
    for other, span in enumerate(spans):
        if other == own or not len(span):
            continue
        turned = call.rotation.rotate_each(queries, -shifts[..., other], reach).to(queries.dtype)
        keys, values = call.keys[:, span.start : span.stop], call.values[:, span.start : span.stop]
        parts.append(part(call, turned, keys, values))
    return joined(parts)


def attend_ranked(
    call: AttentionCall,
    block: Span,
    texts: Sequence[tuple[Span, int]],
    sets: Sequence[Callable[[torch.Tensor, slice], Part]],
) -> torch.Tensor:
    """Attend from neighbouring tokens `[H, Q, D_v]` to texts, to sets, and causally to themselves.

    Args:
        call: The layer's tensors.
        block: The tokens.
        texts: Spans of keys before the tokens, each with its shift.
        sets: What attends to a set, from some of the queries and where they are in the block.
    """
    queries = call.queries[:, block.start - call.first : block.stop - call.first]
    own = part(
        call, queries, call.keys[:, block.start : block.stop], call.values[:, block.start : block.stop], causal=True
    )
    out = []
    for start in range(0, len(block), _QUERIES):
        stop = min(start + _QUERIES, len(block))
        some = queries[:, start:stop]
        parts = [Part(own.out[:, start:stop], own.total[:, start:stop])]
        for span, shift in texts:
            if len(span):
                turned = call.rotation.rotate(some, -shift)
                parts.append(
                    part(call, turned, call.keys[:, span.start : span.stop], call.values[:, span.start : span.stop])
                )
        parts += [attend(some, slice(start, stop)) for attend in sets]
        out.append(merged(parts))
    return torch.cat(out, dim=1)
