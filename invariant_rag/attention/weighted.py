"""Rows that weigh whole sets: Structured Prompting and APE read what lies before them in parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from invariant_rag.arrangement import Row, Span, WeightedArrangement, Weighting
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.kernels import capped, mix, visible

_BLOCK = 64  # queries at a time: each holds scores against every key in float32


def weigh_sets(arrangement: WeightedArrangement, call: AttentionCall, out: torch.Tensor) -> list[Row]:
    """Fill `out` `[H, Q, D_v]` for the rows that weigh sets, and return the others."""
    others = []
    for row in arrangement.rows_from(call.first, call.keys.shape[1]):
        if sets := arrangement.behind(row.queries.start):
            start, stop = row.queries.start - call.first, row.queries.stop - call.first
            out[:, start:stop] = _attend_in_parts(call, row, sets)
        else:
            others.append(row)
    return others


def _attend_in_parts(call: AttentionCall, row: Row, sets: Sequence[tuple[Span, Weighting]]) -> torch.Tensor:
    """Attend from one row `[H, Q, D_v]` that weighs sets: a softmax for each of them, merged by log-sum-exps.

    The merge is written into the scores: a constant added to all scores of a set changes how much the set weighs, and
    nothing inside it.
    """
    keys = torch.cat([call.rotation.rotate(call.keys[:, run.start : run.stop], run.shift) for run in row.runs], dim=1)
    values = torch.cat([call.values[:, run.start : run.stop] for run in row.runs], dim=1)
    places = torch.cat([torch.arange(run.start, run.stop, device=keys.device) for run in row.runs])
    seen = visible(len(row.queries), row.length, call.window, keys.device)
    queries = call.queries[:, row.queries.start - call.first : row.queries.stop - call.first]
    blocks = []
    for block, mask in zip(queries.split(_BLOCK, dim=1), seen.split(_BLOCK), strict=True):
        packed = block.reshape(keys.shape[0], -1, keys.shape[-1])
        scores = (packed @ keys.transpose(1, 2)).reshape(*block.shape[:2], -1).float() * call.scaling
        scores = capped(call, scores).masked_fill(~mask, float("-inf"))
        for span, weighting in sets:
            inside = (places >= span.start) & (places < span.stop)
            part = scores[..., inside] / weighting.temperature
            total = part.logsumexp(dim=-1, keepdim=True)
            # Where a sliding window hides the whole set there is nothing to weigh.
            change = (weighting.factor * total + weighting.offset - total).nan_to_num(0.0)
            scores[..., inside] = part + change
        blocks.append(mix(call, scores, values))
    return torch.cat(blocks, dim=1)
