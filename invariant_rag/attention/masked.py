"""One softmax with a mask over all keys of a row: layers that cannot be computed in parts, with weights or ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from invariant_rag.arrangement import UNWEIGHTED, Row, Run, Weighting
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.kernels import apply_softcap, softmax_values

_BLOCK = 64  # queries at a time: each holds its scores against every key in float32


def attend_with_mask(call: AttentionCall, row: Row, shifts: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Return the attention outputs `[H, Q, D_v]` of a row.

    Args:
        call: The layer's tensors.
        row: The row.
        shifts: For each of its ranked sets the shifts of the segments, `[H, Q or 1, N]`.
    """
    ranked = [
        (Run(span.start, span.stop, 0), shift[..., index])
        for each, shift in zip(row.ranked, shifts, strict=True)
        for index, span in enumerate(each.segments)
        if index != each.own
    ]
    blocks = []
    for start in range(row.queries.start, row.queries.stop, _BLOCK):
        stop = min(start + _BLOCK, row.queries.stop)
        inside = slice(start - row.queries.start, stop - row.queries.start)
        parts = [(run, shift if shift.shape[1] == 1 else shift[:, inside]) for run, shift in ranked]
        blocks.append(_attend_block(call, row.part(start, stop), parts))
    return torch.cat(blocks, dim=1)


def _attend_block(call: AttentionCall, row: Row, ranked: list[tuple[Run, torch.Tensor]]) -> torch.Tensor:
    queries = call.queries_of(row.queries)
    index = torch.arange(row.queries.start, row.queries.stop, device=queries.device)
    place = row.queries.stop - sum(map(len, row.runs))  # where the row begins, if it ends with its last query
    scores, values = [], []
    for run in row.runs:
        # Sliding windows count keys along the row. With ranked sets the row is stacked: its places are its positions.
        along = run.shift if ranked else place - run.start
        place += len(run)
        distance = (index - along)[:, None] - torch.arange(run.start, run.stop, device=index.device)
        scores.append(_scores(call, call.rotation.rotate(queries, -run.shift), run, distance, run.weighting))
        values.append(call.values[:, run.start : run.stop])
    for run, shift in ranked:
        shifts = shift.expand(queries.shape[:2])
        rotated = call.rotation.rotate_each(queries, -shifts, call.reach).to(queries.dtype)
        distance = (index - shifts)[..., None] - torch.arange(run.start, run.stop, device=index.device)
        scores.append(_scores(call, rotated, run, distance, UNWEIGHTED))
        values.append(call.values[:, run.start : run.stop])
    return softmax_values(call, torch.cat(scores, dim=-1), torch.cat(values, dim=1))


def _scores(
    call: AttentionCall, queries: torch.Tensor, run: Run, distance: torch.Tensor, weighting: Weighting
) -> torch.Tensor:
    """Return the scores of a run `[H, Q, K]`, minus infinity where masked, such that one softmax merges all runs.

    A constant that is added to all scores of a run changes its weight and nothing inside it.
    """
    keys = call.keys[:, run.start : run.stop]
    packed = queries.reshape(keys.shape[0], -1, keys.shape[-1])
    scores = apply_softcap(call, (packed @ keys.mT).reshape(*queries.shape[:2], -1).float() * call.scaling)
    hidden = (distance < 0) if call.sliding_window is None else (distance < 0) | (distance >= call.sliding_window)
    scores = scores.masked_fill(hidden, float("-inf")) / weighting.temperature
    if weighting.factor == 1.0:
        return scores + weighting.offset
    lse = scores.logsumexp(dim=-1, keepdim=True)
    # Where a sliding window hides the whole run there is nothing to weigh.
    return scores + (weighting.factor * lse + weighting.offset - lse).nan_to_num(0.0)
