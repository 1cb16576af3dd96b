"""The default backend: few large calls of PyTorch's fused attention.

Neighbouring rows have nearly all keys in common: in RoToR's ring each segment attends to those before it at their
natural positions, to those after it `T` positions earlier, and to the prefix at a shift of its own. So neighbours are
computed together: what all of them attend to without a mask, queries rotated instead of keys, and the rest with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from invariant_rag.arrangement import Arrangement, Row, Run, Span
from invariant_rag.attention.base import AttentionCall
from invariant_rag.attention.pine import attend_ranked
from invariant_rag.attention.softmax import attend_row, merge_attn_states, partial_attention, rotated_keys

_BATCH = 512
"""Queries, over the heads that share keys, from which on fused attention on a CPU is at its best."""


class SDPA:
    """Compute attention with fused kernels, or with matrix products where a layer needs what these lack."""

    name: ClassVar[str] = "sdpa"
    batched_prefill: ClassVar[bool] = False

    def attend(self, arrangement: Arrangement, call: AttentionCall) -> torch.Tensor:
        """Return one layer's attention output `[H, Q, D_v]` for one prompt."""
        heads, count, _ = call.queries.shape
        # The layout that layers expect: `[Q, H, D_v]` in memory.
        out = call.values.new_empty(count, heads, call.values.shape[-1]).transpose(0, 1)
        for rows in _batches(call, arrangement.rows_from(call.query_start, call.keys.shape[1])):
            start, stop = rows[0].queries.start - call.query_start, rows[-1].queries.stop - call.query_start
            if len(rows) > 1:
                out[:, start:stop] = _attend_neighbours(call, call.queries[:, start:stop], rows)
            else:
                out[:, start:stop] = attend_ranked(call, *rows) if rows[0].ranked else attend_row(call, *rows)
        return out


def _batches(call: AttentionCall, rows: Sequence[Row]) -> list[tuple[Row, ...]]:
    """Split rows into neighbours that are computed together: enough queries, and the same number of runs for all."""
    batches: list[tuple[Row, ...]] = []
    batch: list[Row] = []
    enough = _BATCH / call.num_key_value_groups
    for row in rows:
        is_alone = row.ranked or row.is_weighted or row.length > call.max_split
        if batch:
            queries = row.queries.stop - batch[0].queries.start
            if is_alone or queries >= 2 * enough or len(row.runs) != len(batch[0].runs):
                batches.append(tuple(batch))
                batch = []
        batch.append(row)
        if is_alone or row.queries.stop - batch[0].queries.start >= enough:
            batches.append(tuple(batch))
            batch = []
    return [*batches, tuple(batch)] if batch else batches


def _attend_neighbours(call: AttentionCall, queries: torch.Tensor, rows: tuple[Row, ...]) -> torch.Tensor:
    """Return the attention outputs `[H, Q, D_v]` of several neighbouring rows, whose queries these are."""
    shape = _neighbours(rows, queries.device)
    keys, values = rotated_keys(call, shape.runs)
    states = [partial_attention(queries, keys, values, scaling=call.scaling, mask=shape.mask)]
    for span, shift in shape.common:
        if isinstance(shift, int):
            rotated = call.rotation.rotate_by(queries, -shift) if shift else queries
        else:
            rotated = call.rotation.rotate_each(queries, -shift, call.reach).to(queries.dtype)
        keys, values = call.keys[:, span.start : span.stop], call.values[:, span.start : span.stop]
        states.append(partial_attention(rotated, keys, values, scaling=call.scaling))
    return merge_attn_states(states).out


@dataclass(frozen=True)
class _Neighbours:
    """What several rows attend to."""

    common: list[tuple[Span, int | torch.Tensor]]  # keys of all queries, and the shift, which may differ by query `[Q]`
    runs: list[Run]  # keys of some of the queries
    mask: torch.Tensor  # which of these each query attends to `[Q, K]`


@lru_cache(maxsize=256)
def _neighbours(rows: tuple[Row, ...], device: torch.device) -> _Neighbours:
    first, last = rows[0].queries.start, rows[-1].queries.stop
    lengths = torch.tensor([len(row.queries) for row in rows])
    common: list[tuple[Span, int | torch.Tensor]] = []
    rest: list[tuple[Row, Run]] = []
    for column in zip(*(row.runs for row in rows), strict=True):
        has_queries = column[0].stop == rows[0].queries.stop  # the last column: queries are no common keys
        start, stop = max(run.start for run in column), min(run.stop for run in column)
        stop = min(stop, first) if has_queries else stop
        if start < stop:
            shifts = [run.shift for run in column]
            each = torch.tensor(shifts).repeat_interleave(lengths).to(device)
            common.append((Span(start, stop), each if len({*shifts}) > 1 else shifts[0]))
        else:
            start = stop = first
        for row, run in zip(rows, column, strict=True):
            remainders = (run.start, min(start, run.stop)), (max(stop, run.start), run.stop)
            rest += [(row, Run(*each, run.shift)) for each in remainders if each[0] < each[1]]
    runs: list[Run] = []
    mask = torch.zeros(last - first, 0, dtype=torch.bool)
    for shift in dict.fromkeys(run.shift for _, run in rest):
        alike = [(row.queries, run) for row, run in rest if run.shift == shift]
        run = Run(min(run.start for _, run in alike), max(run.stop for _, run in alike), shift)
        visible = torch.zeros(last - first, len(run), dtype=torch.bool)
        for queries, part in alike:
            visible[queries.start - first : queries.stop - first, part.start - run.start : part.stop - run.start] = True
        for row in rows if shift == 0 else ():
            at, own = row.queries.start, len(row.queries)
            visible[at - first : at - first + own, at - run.start : at - run.start + own].tril_()
        runs.append(run)
        mask = torch.cat((mask, visible), dim=1)
    return _Neighbours(common, runs, mask.to(device))
