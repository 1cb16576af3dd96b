"""The default backend: few large calls of PyTorch's fused attention, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any, ClassVar

import torch

from invariant_rag.arrangement import Arrangement, Block, Row, RowArrangement, Run
from invariant_rag.attention.call import AttentionCall, BatchCall
from invariant_rag.attention.kernels import attend
from invariant_rag.attention.merge_states import can_split
from invariant_rag.attention.pine import attend_ranked
from invariant_rag.attention.ring import attend_ring
from invariant_rag.attention.weighted import attend_weighted_row
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.methods.pine import RankedArrangement
from invariant_rag.methods.rotor import Ring


class SDPA:
    """Compute attention with fused kernels, or with matrix products where a layer needs what these lack."""

    name: ClassVar[str] = "sdpa"
    reads_together: ClassVar[bool] = False

    def batch(
        self, arrangements: Sequence[Arrangement], padding: Sequence[int], call: BatchCall, plans: dict[Any, Any]
    ) -> torch.Tensor | None:
        """Compute each row of a batch by itself, unless a subclass can do better."""
        return None

    def attend(self, arrangement: Arrangement, call: AttentionCall) -> torch.Tensor:
        """Return one layer's attention output `[H, Q, D_v]` for one prompt.

        Raises:
            UnsupportedCombination: No function is registered in `attend_fast` for this kind of arrangement.
        """
        return attend_fast(arrangement, call)


@singledispatch
def attend_fast(arrangement: Arrangement, call: AttentionCall) -> torch.Tensor:  # noqa: ARG001
    """Return `[H, Q, D_v]` by the function for a kind of arrangement; `attend_fast.register` adds one."""
    raise UnsupportedCombination(
        f"expected rows or a ranking for the backend 'sdpa', got {type(arrangement).__name__}",
        hint="Choose backend='reference', which computes any arrangement, or register a function in `attend_fast`.",
    )


attend_fast.register(RankedArrangement, attend_ranked)


@attend_fast.register
def _attend_rows(arrangement: RowArrangement, call: AttentionCall) -> torch.Tensor:
    """Return `[H, Q, D_v]` for an arrangement that is the same for every head."""
    out = call.new_output()
    for block in arrangement.blocks_from(call.query_start, call.keys.shape[1]):
        rows = block.rows
        if weighted := arrangement.weighted_from(rows[0].queries.start):  # the rows of a block belong to one set
            for row in rows:
                attend_weighted_row(call, row, weighted, out)
        else:
            _attend_block(block, call, out)
    return out


def _attend_block(block: Block, call: AttentionCall, out: torch.Tensor) -> None:
    """Fill `out` `[H, Q, D_v]` where the queries of a block are: in parts where they can be split, else row by row."""
    if isinstance(block, Ring) and can_split(call, block.stop):
        attend_ring(block, call, out)
        return
    rotated = _RotatedKeys(call, block.rows)
    for row in block.rows:
        start, stop = row.queries.start - call.query_start, row.queries.stop - call.query_start
        out[:, start:stop] = attend(call, call.queries[:, start:stop], *rotated.seen_by(row))


class _RotatedKeys:
    """The keys and values that rows see. Keys that several rows see at the same shift are rotated once."""

    def __init__(self, call: AttentionCall, rows: Sequence[Row]) -> None:
        self._call = call
        runs: dict[int, list[Run]] = {}
        for run in (each for row in rows for each in row.runs):
            runs.setdefault(run.shift, []).append(run)
        self._known: dict[int, tuple[int, torch.Tensor]] = {}
        for shift, at in runs.items():
            if len(at) > 1:
                first, stop = min(run.start for run in at), max(run.stop for run in at)
                self._known[shift] = first, call.rotation.rotate(call.keys[:, first:stop], shift)

    def seen_by(self, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values `[H_kv, S, D]` of a row, far to near."""
        if len(row.runs) == 1:
            run = row.runs[0]
            return self._keys(run), self._call.values[:, run.start : run.stop]
        keys = torch.cat([self._keys(run) for run in row.runs], dim=1)
        return keys, torch.cat([self._call.values[:, run.start : run.stop] for run in row.runs], dim=1)

    def _keys(self, run: Run) -> torch.Tensor:
        if run.shift in self._known:
            first, rotated = self._known[run.shift]
            return rotated[:, run.start - first : run.stop - first]
        return self._call.rotation.rotate(self._call.keys[:, run.start : run.stop], run.shift)
