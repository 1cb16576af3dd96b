"""What the fast backends share: blocks computed one after the other, and rows within a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from invariant_rag.arrangement import Causal, Row, Rows, Run
from invariant_rag.attention.call import AttentionCall, BatchCall
from invariant_rag.attention.kernels import attend
from invariant_rag.attention.pine import attend_ranked
from invariant_rag.attention.weighted import attend_weighted_row

if TYPE_CHECKING:
    from invariant_rag.arrangement import Arrangement, RowArrangement, WeightedArrangement
    from invariant_rag.methods.pine import RankedArrangement
    from invariant_rag.methods.rotor import Ring


class Blockwise(ABC):
    """A backend that computes an arrangement block by block; a subclass says how it computes a ring."""

    reads_together: ClassVar[bool] = False

    @abstractmethod
    def ring(self, block: Ring, call: AttentionCall, out: torch.Tensor) -> None:
        """Fill `out` `[H, Q, D_v]` where the queries of the ring are."""

    def batch(
        self, arrangements: Sequence[Arrangement], padding: Sequence[int], call: BatchCall, plans: dict[Any, Any]
    ) -> torch.Tensor | None:
        """Compute each row of a batch by itself, unless a subclass can do better."""
        return None

    def rows(self, arrangement: RowArrangement, call: AttentionCall) -> torch.Tensor:
        """Return `[H, Q, D_v]` for an arrangement that is the same for every head."""
        out = call.new_output()
        for block in arrangement.blocks_from(call.query_start, call.keys.shape[1]):
            block.attend(self, call, out)
        return out

    def weighted(self, arrangement: WeightedArrangement, call: AttentionCall) -> torch.Tensor:
        """Return `[H, Q, D_v]` for rows that weigh some of their keys: PCW, Structured Prompting, APE."""
        out = call.new_output()
        for block in arrangement.blocks_from(call.query_start, call.keys.shape[1]):
            rows = block.rows
            weighted = arrangement.weighted_from(rows[0].queries.start)  # the rows of a block belong to one set
            if weighted:
                for row in rows:
                    attend_weighted_row(call, row, weighted, out)
            else:
                block.attend(self, call, out)
        return out

    def ranked(self, arrangement: RankedArrangement, call: AttentionCall) -> torch.Tensor:
        """Return `[H, Q, D_v]` for PINE."""
        return attend_ranked(arrangement, call)

    def causal(self, block: Causal, call: AttentionCall, out: torch.Tensor) -> None:
        """Fill `out` `[H, Q, D_v]` where the queries of the block are."""
        start, stop = block.queries.start - call.query_start, block.queries.stop - call.query_start
        keys, values = call.keys[:, : block.queries.stop], call.values[:, : block.queries.stop]
        out[:, start:stop] = attend(call, call.queries[:, start:stop], keys, values)

    def row_by_row(self, block: Rows | Ring, call: AttentionCall, out: torch.Tensor) -> None:
        """Fill `out` `[H, Q, D_v]` where the queries of the rows are."""
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
