"""Rows that weigh some of their keys: PCW, Structured Prompting and APE."""

from __future__ import annotations

import torch

from invariant_rag.arrangement import Row, Weighted
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.kernels import apply_softcap, causal_mask, softmax_values

_BLOCK = 64  # queries at a time: each holds its scores against every key in float32


def attend_weighted_row(call: AttentionCall, row: Row, weighted: Weighted, out: torch.Tensor) -> None:
    """Fill `out` `[H, Q, D_v]` for a row that weighs keys: one softmax for each stretch, merged by log-sum-exps.

    The merge is written into the scores: a constant that is added to all scores of a stretch changes its weight and
    nothing inside it.
    """
    keys = torch.cat([call.rotation.rotate(call.keys[:, run.start : run.stop], run.shift) for run in row.runs], dim=1)
    values = torch.cat([call.values[:, run.start : run.stop] for run in row.runs], dim=1)
    indices = torch.cat([torch.arange(run.start, run.stop, device=keys.device) for run in row.runs])
    visible = causal_mask(len(row.queries), row.length, call.sliding_window, keys.device)
    start, stop = row.queries.start - call.query_start, row.queries.stop - call.query_start
    blocks = []
    for queries, mask in zip(call.queries[:, start:stop].split(_BLOCK, dim=1), visible.split(_BLOCK), strict=True):
        packed = queries.reshape(keys.shape[0], -1, keys.shape[-1])
        scores = (packed @ keys.transpose(1, 2)).reshape(*queries.shape[:2], -1).float() * call.scaling
        scores = apply_softcap(call, scores).masked_fill(~mask, float("-inf"))
        for span, weighting in weighted:
            inside = (indices >= span.start) & (indices < span.stop)
            if weighting.temperature == weighting.factor == 1.0:  # the log-sum-exp is moved as each score is
                scores = scores + inside * weighting.offset
                continue
            part = scores[..., inside] / weighting.temperature
            lse = part.logsumexp(dim=-1, keepdim=True)
            # Where a sliding window hides the whole stretch there is nothing to weigh.
            change = (weighting.factor * lse + weighting.offset - lse).nan_to_num(0.0)
            scores[..., inside] = part + change
        blocks.append(softmax_values(call, scores, values))
    out[:, start:stop] = torch.cat(blocks, dim=1)
