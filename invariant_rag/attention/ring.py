"""RoToR in parts, of which only what a few neighbouring segments see of each other needs a mask.

Rows of a ring share nearly everything: each segment sees those before it where they lie, those behind it `T` positions
earlier, and the prefix, which turns with the reader. So the keys behind a segment are turned once for all of them, and
the prefix is read by turning the queries instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from invariant_rag.arrangement import Row, Run
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.merge_states import Part, merged, part

_TOGETHER = 512
"""Queries, over the heads that share keys, from which on fused attention on a CPU is at its best."""


class Ring(NamedTuple):
    """Neighbouring rows of RoToR.

    Attributes:
        rows: The rows.
        origin: Where the set starts: the length of the prefix.
        stop: Where the set ends.
        shift: At which shift a row sees the segments behind its own.
    """

    rows: Sequence[Row]
    origin: int
    stop: int
    shift: int


def as_ring(rows: Sequence[Row]) -> Ring | None:
    """Recognise rows as a ring; None where they are none."""
    origin = rows[0].queries.start
    far = [row.runs[-2] for row in rows if len(row.runs) > 1]
    if len(far) < len(rows):
        return None
    stop, shift = far[0].stop, far[0].shift
    for row, before in zip(rows, (origin, *(each.queries.stop for each in rows)), strict=False):
        wanted = (Run(row.queries.stop, stop, shift), Run(origin, row.queries.stop, 0))
        prefix = row.runs[:-2]
        if row.queries.start != before or row.runs[-2:] != wanted:
            return None
        if [(run.start, run.stop) for run in prefix] != ([(0, origin)] if origin else []):
            return None
    return Ring(rows, origin, stop, shift)


def attend_ring(ring: Ring, call: AttentionCall, out: torch.Tensor) -> None:
    """Fill `out` `[H, Q, D]` for the rows of a ring.

    Neighbouring rows are read together. On a tape of `[segments behind the first, turned | segments as they lie]`, all
    that they see but themselves is one stretch, without a mask: the segments behind them, and then those before them.
    """
    start, stop, behind = ring.origin, ring.rows[-1].queries.stop, ring.rows[0].queries.stop
    turned = call.rotation.rotate(call.keys[:, behind : ring.stop], ring.shift)
    keys = torch.cat((turned, call.keys[:, start:stop]), dim=1)
    values = torch.cat((call.values[:, behind : ring.stop], call.values[:, start:stop]), dim=1)
    lies = ring.stop - behind - start  # where on the tape a token lies, from its index
    for rows in _together(ring.rows, call.groups):
        a, b = rows[0].queries.start, rows[-1].queries.stop
        queries = call.queries[:, a:b]
        parts = [part(call, queries, keys[:, lies + a : lies + b], values[:, lies + a : lies + b], causal=True)]
        around = slice(b - behind, lies + a)
        if around.start < around.stop:
            parts.append(part(call, queries, keys[:, around], values[:, around]))
        if start:
            parts.append(part(call, turned_queries(rows, call), call.keys[:, :start], call.values[:, :start]))
        last = rows[-1].queries.start
        out[:, last:b] = merged([_some(each, slice(last - a, None)) for each in parts])
        if len(rows) > 1:
            inner = slice(rows[0].queries.stop - behind, b - behind)
            extra = part(call, queries[:, : last - a], keys[:, inner], values[:, inner], mask=_behind(rows))
            out[:, a:last] = merged([*(_some(each, slice(last - a)) for each in parts), extra])


def _some(whole: Part, queries: slice) -> Part:
    return Part(whole.out[:, queries], whole.total[:, queries])


def _together(rows: Sequence[Row], groups: int) -> Iterator[list[Row]]:
    """Split rows into neighbours with enough queries to be read together."""
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if (row.queries.stop - batch[0].queries.start) * groups >= _TOGETHER:
            yield batch
            batch = []
    if batch:
        yield batch


def turned_queries(rows: Sequence[Row], call: AttentionCall) -> torch.Tensor:
    """The queries of some rows, turned so that the prefix where it lies is as far from them as they see it."""
    queries = call.queries[:, rows[0].queries.start : rows[-1].queries.stop]
    shifts = [-row.runs[0].shift for row in rows for _ in range(len(row.queries))]
    turned = call.rotation.rotate_each(queries, torch.tensor(shifts, device=queries.device), call.keys.shape[1])
    return turned.to(queries.dtype)


def _behind(rows: Sequence[Row]) -> torch.Tensor:
    """Boolean: which keys behind the first of some rows the queries of all but the last see."""
    first, last = rows[0].queries.stop, rows[-1].queries.stop
    ends = torch.tensor([row.queries.stop for row in rows[:-1] for _ in range(len(row.queries))])
    return torch.arange(first, last) >= ends[:, None]
