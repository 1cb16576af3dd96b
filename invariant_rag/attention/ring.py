"""RoToR on a CPU, in parts of which only the keys that a few neighbouring segments share need a mask.

The segments of a ring share nearly all keys: each sees the segments before it at their natural positions, those after
it `T` positions earlier, and the prefix at a shift of its own. So the segments are laid out twice, `[segments after the
first, rotated by -T | segments]`, and the keys that a segment sees of the others are one window of that layout. For the
prefix, queries are rotated instead of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from invariant_rag.arrangement import Span
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.merge_states import merge_attn_states, partial_attention

if TYPE_CHECKING:
    from invariant_rag.methods.rotor import Ring

_BATCH = 512
"""Queries, over the heads that share keys, from which on fused attention on a CPU is at its best."""


def attend_ring(ring: Ring, call: AttentionCall, out: torch.Tensor) -> None:
    """Fill `out` `[H, Q, D_v]` where the queries of a ring are.

    Neighbouring segments are computed together. All keys that they see, apart from their own, are one window of the
    doubled layout, without a mask: the segments after them, and then those before them.
    """
    start, last_stop, first_end = ring.origin, ring.ends[-2], ring.ends[0]
    rotated = call.rotation.rotate(call.keys[:, first_end : ring.stop], ring.shift)
    keys = torch.cat((rotated, call.keys[:, start:last_stop]), dim=1)
    values = torch.cat((call.values[:, first_end : ring.stop], call.values[:, start:last_stop]), dim=1)
    offset = ring.stop - first_end - start  # from a token's index in memory to its index in the doubled layout
    for segments in _batches(ring, call.num_key_value_groups):
        a, b = segments[0].start, segments[-1].stop
        queries = call.queries[:, a:b]
        own = slice(offset + a, offset + b)
        states = [partial_attention(call, queries, keys[:, own], values[:, own], is_causal=True)]
        others = slice(b - first_end, offset + a)
        if others.start < others.stop:
            states.append(partial_attention(call, queries, keys[:, others], values[:, others]))
        if start:
            rotated = rotate_for_prefix(ring, segments, call)
            states.append(partial_attention(call, rotated, call.keys[:, :start], call.values[:, :start]))
        last = segments[-1].start
        out[:, last:b] = merge_attn_states([each.queries(slice(last - a, None)) for each in states]).out
        if len(segments) > 1:
            inner = slice(segments[0].stop - first_end, b - first_end)
            mask = _later_keys_mask(segments)
            extra = partial_attention(call, queries[:, : last - a], keys[:, inner], values[:, inner], mask=mask)
            out[:, a:last] = merge_attn_states([*(each.queries(slice(last - a)) for each in states), extra]).out


def _batches(ring: Ring, groups: int) -> Iterator[list[Span]]:
    """Split the segments into neighbours with enough queries to be computed together."""
    batch: list[Span] = []
    for segment in ring.segments:
        batch.append(segment)
        if (segment.stop - batch[0].start) * groups >= _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def rotate_for_prefix(ring: Ring, segments: list[Span] | tuple[Span, ...], call: AttentionCall) -> torch.Tensor:
    """Return the queries of some segments `[H, Q, D]`, rotated so that they see the prefix at their shift of it."""
    queries = call.queries[:, segments[0].start : segments[-1].stop]
    shifts = _prefix_shifts(ring, tuple(segments), queries.device)
    return call.rotation.rotate_each(queries, shifts, call.keys.shape[1]).to(queries.dtype)


@lru_cache(maxsize=64)
def _prefix_shifts(ring: Ring, segments: tuple[Span, ...], device: torch.device) -> torch.Tensor:
    """Return by how much each query of some segments is rotated `[Q]`; all layers share it."""
    shifts = [-ring.prefix_shift(each) for each in segments for _ in range(len(each))]
    return torch.tensor(shifts, device=device)


def _later_keys_mask(segments: list[Span]) -> torch.Tensor:
    """Return a boolean mask: which keys after the first of some segments the queries of all but the last see."""
    first, last = segments[0].stop, segments[-1].stop
    ends = torch.tensor([each.stop for each in segments[:-1] for _ in range(len(each))])
    return torch.arange(first, last) >= ends[:, None]
