"""For GPUs: a ring as one call of FlexAttention over the segments laid out twice, with a block mask.

Without compilation, as on a CPU, FlexAttention holds every score; there this backend serves to be compared.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from invariant_rag.attention.blockwise import Blockwise
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.merge_states import AttentionState, merge_attn_states
from invariant_rag.attention.ring import rotate_for_prefix

if TYPE_CHECKING:
    from invariant_rag.methods.rotor import Ring

_masks: dict[tuple[Ring, int | None, torch.device], BlockMask] = {}
_MAX_MASKS = 64
_BLOCK = 128
"""Queries, and keys, of a block: FlexAttention's own choice."""


class Flex(Blockwise):
    """Compute rings with FlexAttention, compiled once on a GPU; everything else as `sdpa` does."""

    name: ClassVar[str] = "flex"

    def ring(self, block: Ring, call: AttentionCall, out: torch.Tensor) -> None:
        """Fill `out` `[H, Q, D_v]` where the queries of the ring are; row by row while training with dropout."""
        if call.dropout:
            self.row_by_row(block, call, out)
            return
        start, last_stop, first_end = block.origin, block.ends[-2], block.ends[0]
        rotated = call.rotation.rotate(call.keys[:, first_end : block.stop], block.shift)
        keys = torch.cat((rotated, call.keys[:, start:last_stop]), dim=1)
        values = torch.cat((call.values[:, first_end : block.stop], call.values[:, start:last_stop]), dim=1)
        mask = _doubled_mask(block, call.sliding_window, keys.device)
        states = [_attend(call, call.queries[:, start:last_stop], keys, values, mask)]
        if start:
            window = call.sliding_window
            prefix_mask = None if window is None else _prefix_mask(block, window, keys.device)
            rotated = rotate_for_prefix(block, block.segments, call)
            states.append(_attend(call, rotated, call.keys[:, :start], call.values[:, :start], prefix_mask))
        if call.sinks is not None:
            lse = call.sinks.float()[:, None].expand(-1, last_stop - start)
            states.append(AttentionState(torch.zeros_like(states[0].out), lse))
        out[:, start:last_stop] = merge_attn_states(states).out


def _attend(
    call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: BlockMask | None
) -> AttentionState:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out, aux = _kernel(queries.device.type == "cuda")(
            queries[None],
            keys[None],
            values[None],
            score_mod=None if call.softcap is None else _softcap(call.softcap),
            block_mask=mask,
            scale=call.scaling,
            enable_gqa=call.num_key_value_groups > 1,
            return_aux=AuxRequest(lse=True),
        )
    return AttentionState(out[0], aux.lse[0])


@cache
def _kernel(compiled: bool) -> Any:
    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


@cache
def _softcap(softcap: float) -> Any:
    def squash(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return squash


def _doubled_mask(ring: Ring, sliding_window: int | None, device: torch.device) -> BlockMask:
    """Return which of `[segments after the first, rotated | segments]` each query sees; kept for each ring.

    What a query sees of these are neighbours, and both ends move on with the queries. So which blocks are seen follows
    from the first and the last query of each block, without a mask of every query and key.
    """
    key = (ring, sliding_window, device)
    if key not in _masks:
        if len(_masks) >= _MAX_MASKS:
            _masks.pop(next(iter(_masks)))
        rotated, count = ring.stop - ring.ends[0], ring.ends[-2] - ring.origin
        ends = torch.tensor([each.stop for each in ring.segments for _ in range(len(each))], device=device)
        last = torch.arange(count, device=device) + rotated
        first = ends - ring.ends[0]
        if sliding_window is not None:
            first = torch.maximum(first, last - sliding_window + 1)

        def sees(_b: Any, _h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (key >= first[query]) & (key <= last[query])

        _masks[key] = _window_mask(first, last, rotated + count, sees)
    return _masks[key]


def _window_mask(first: torch.Tensor, last: torch.Tensor, num_keys: int, sees: Any) -> BlockMask:
    """Return the block mask of queries that see the keys from `first` to `last` `[Q]`, which never go back."""
    blocks = -(-first.shape[0] // _BLOCK)
    starts = torch.arange(blocks, device=first.device) * _BLOCK
    stops = (starts + _BLOCK - 1).clamp(max=first.shape[0] - 1)
    key = torch.arange(-(-num_keys // _BLOCK), device=first.device) * _BLOCK
    some = (key + _BLOCK > first[starts, None]) & (key <= last[stops, None])
    is_whole = starts + _BLOCK <= first.shape[0]
    every = (key >= first[stops, None]) & (key + _BLOCK - 1 <= last[starts, None]) & is_whole[:, None]

    def listed(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how many blocks of keys each block of queries sees, and which, those first."""
        which = (~seen).to(torch.int8).argsort(dim=-1, stable=True)
        return seen.sum(dim=-1).int()[None, None], which.int()[None, None]

    return BlockMask.from_kv_blocks(
        *listed(some & ~every), *listed(every), BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(first.shape[0], num_keys)
    )


def _prefix_mask(ring: Ring, sliding_window: int, device: torch.device) -> BlockMask:
    """Return how much of the prefix each query sees through a sliding window."""
    shifts = [ring.prefix_shift(each) for each in ring.segments for _ in range(len(each))]
    shift_of = torch.tensor(shifts, device=device)

    def sees(_b: Any, _h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query + ring.origin - key - shift_of[query] < sliding_window

    return create_block_mask(sees, None, None, len(shifts), ring.origin, device=device)
