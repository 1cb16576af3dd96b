"""Rows one after the other, and rings as a backend reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import torch

from invariant_rag.arrangement import Row, Run
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.kernels import attend
from invariant_rag.attention.pine import attend_by_importance
from invariant_rag.attention.ring import Ring, as_ring
from invariant_rag.attention.weighted import weigh_sets

if TYPE_CHECKING:
    from invariant_rag.arrangement import RowArrangement, WeightedArrangement
    from invariant_rag.methods.pine import ImportanceArrangement


class RowWise(ABC):
    """A backend that reads rows one after the other, and rings as its subclass does."""

    @abstractmethod
    def attend_ring(self, ring: Ring, call: AttentionCall, out: torch.Tensor) -> bool:
        """Fill `out` `[H, Q, D_v]` for the rows of a ring; False where it cannot: they are then read one by one."""

    def rows(self, arrangement: RowArrangement, call: AttentionCall) -> torch.Tensor:
        """Return `[H, Q, D_v]` for an arrangement that is the same for every head."""
        out = call.empty()
        self._fill(out, arrangement.rows_from(call.first, call.keys.shape[1]), call)
        return out

    def weighted(self, arrangement: WeightedArrangement, call: AttentionCall) -> torch.Tensor:
        """Return `[H, Q, D_v]` for rows that weigh the sets before them: Structured Prompting, APE."""
        out = call.empty()
        self._fill(out, weigh_sets(arrangement, call, out), call)
        return out

    def importance(self, arrangement: ImportanceArrangement, call: AttentionCall) -> torch.Tensor:
        """Return `[H, Q, D_v]` for PINE."""
        return attend_by_importance(arrangement, call)

    def _fill(self, out: torch.Tensor, rows: Sequence[Row], call: AttentionCall) -> None:
        """Fill `out` `[H, Q, D_v]` where the queries of the rows are."""
        for group in _groups(rows):
            ring = as_ring(group)
            if ring is not None and self.attend_ring(ring, call, out):
                continue
            turned = _Turned(call, group)
            for row in group:
                start, stop = row.queries.start - call.first, row.queries.stop - call.first
                out[:, start:stop] = attend(call, call.queries[:, start:stop], *turned.seen_by(row))


def _groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Split rows into plain causal ones, each alone, and stretches of the others."""
    for plain, group in groupby(rows, key=attrgetter("is_causal_prefix")):
        if plain:
            yield from ([row] for row in group)
        else:
            yield list(group)


class _Turned:
    """The keys and values that rows see. What several rows see at the same shift is turned once."""

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
        """Keys and values `[H_kv, S, D]` of a row, far to near."""
        if len(row.runs) == 1:
            run = row.runs[0]
            return self._keys(run), self._call.values[:, run.start : run.stop]
        keys = torch.cat([self._keys(run) for run in row.runs], dim=1)
        return keys, torch.cat([self._call.values[:, run.start : run.stop] for run in row.runs], dim=1)

    def _keys(self, run: Run) -> torch.Tensor:
        if run.shift in self._known:
            first, turned = self._known[run.shift]
            return turned[:, run.start - first : run.stop - first]
        return self._call.rotation.rotate(self._call.keys[:, run.start : run.stop], run.shift)
