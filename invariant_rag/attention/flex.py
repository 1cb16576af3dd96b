"""For GPUs: a ring as one call of FlexAttention over the segments laid out twice, with a block mask.

Without compilation, as on a CPU, FlexAttention holds every score; there this backend serves to be compared.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, ClassVar

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.merge_states import Part, merged
from invariant_rag.attention.ring import Ring, turned_queries
from invariant_rag.attention.rowwise import RowWise

_masks: dict[tuple[Ring, int | None, torch.device], BlockMask] = {}
_KEPT = 64


class Flex(RowWise):
    """Compute rings with FlexAttention, compiled once; everything else as the other backends do."""

    name: ClassVar[str] = "flex"

    def attend_ring(self, ring: Ring, call: AttentionCall, out: torch.Tensor) -> bool:
        """Fill `out` `[H, Q, D_v]` for the rows of a ring; not while gradients with dropout are recorded."""
        if call.dropout:
            return False
        start, stop, behind = ring.origin, ring.rows[-1].queries.stop, ring.rows[0].queries.stop
        again = call.rotation.rotate(call.keys[:, behind : ring.stop], ring.shift)
        keys = torch.cat((again, call.keys[:, start:stop]), dim=1)
        values = torch.cat((call.values[:, behind : ring.stop], call.values[:, start:stop]), dim=1)
        parts = [_part(call, call.queries[:, start:stop], keys, values, _doubled_mask(ring, call.window, keys.device))]
        if start:
            turned = turned_queries(ring.rows, call)
            mask = _prefix_mask(ring, call.window, keys.device) if call.window is not None else None
            parts.append(_part(call, turned, call.keys[:, :start], call.values[:, :start], mask))
        if call.sinks is not None:
            total = call.sinks.float()[:, None].expand(-1, stop - start)
            parts.append(Part(torch.zeros_like(parts[0].out), total))
        out[:, start:stop] = merged(parts)
        return True


def _part(
    call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: BlockMask | None
) -> Part:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out, more = _kernel(queries.device.type == "cuda")(
            queries[None],
            keys[None],
            values[None],
            score_mod=None if call.softcap is None else _capped(call.softcap),
            block_mask=mask,
            scale=call.scaling,
            enable_gqa=call.groups > 1,
            return_aux=AuxRequest(lse=True),
        )
    return Part(out[0], more.lse[0])


@cache
def _kernel(compiled: bool) -> Any:
    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


@cache
def _capped(softcap: float) -> Any:
    def squash(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return squash


def _doubled_mask(ring: Ring, window: int | None, device: torch.device) -> BlockMask:
    """Which of `[segments behind the first, turned | all segments of the rows]` each query sees; kept per shape."""
    known = (Ring(tuple(ring.rows), ring.origin, ring.stop, ring.shift), window, device)
    if known not in _masks:
        if len(_masks) >= _KEPT:
            _masks.pop(next(iter(_masks)))
        start, behind = ring.origin, ring.rows[0].queries.stop
        again, count = ring.stop - behind, ring.rows[-1].queries.stop - start
        ends = torch.tensor([row.queries.stop for row in ring.rows for _ in range(len(row.queries))], device=device)
        limit = window if window is not None else 1 << 30

        def sees(_b: Any, _h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            turned = key < again
            token = torch.where(turned, key + behind, key - again + start)
            place = torch.where(turned, token + ring.shift, token)
            away = query + start - place
            return torch.where(turned, token >= ends[query], away >= 0) & (away < limit)

        _masks[known] = create_block_mask(sees, None, None, count, again + count, device=device)
    return _masks[known]


def _prefix_mask(ring: Ring, window: int, device: torch.device) -> BlockMask:
    """How much of the prefix each query sees through a sliding window."""
    shifts = torch.tensor([row.runs[0].shift for row in ring.rows for _ in range(len(row.queries))], device=device)

    def sees(_b: Any, _h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query + ring.origin - key - shifts[query] < window

    return create_block_mask(sees, None, None, len(shifts), ring.origin, device=device)
