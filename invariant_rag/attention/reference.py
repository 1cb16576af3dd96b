"""The specification: every query on its own, in float64, with keys moved to the positions that its row gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from invariant_rag.attention.call import AttentionCall

if TYPE_CHECKING:
    from invariant_rag.arrangement import RowArrangement, Span, WeightedArrangement, Weighting
    from invariant_rag.methods.pine import RankedArrangement


class Reference:
    """Compute attention one head and one query at a time, in float64."""

    name: ClassVar[str] = "reference"

    def rows(self, arrangement: RowArrangement, call: AttentionCall) -> torch.Tensor:
        """Return `[H, Q, D_v]` for an arrangement that is the same for every head."""
        out = torch.zeros(*call.queries.shape[:2], call.values.shape[-1], dtype=torch.float64)
        for row in arrangement.rows_from(call.query_start, call.keys.shape[1]):
            keys = [(index, run.shift) for run in row.runs for index in range(run.start, run.stop)]
            for query in range(row.queries.start, row.queries.stop):
                seen = keys[: row.length - (row.queries.stop - 1 - query)]
                for head in range(out.shape[0]):
                    moved = [(index, index + shift) for index, shift in seen]
                    out[head, query - call.query_start] = _one_query(call, head, query, query, moved)
        return out.to(call.queries)

    def weighted(self, arrangement: WeightedArrangement, call: AttentionCall) -> torch.Tensor:
        """Return `[H, Q, D_v]` for rows that weigh the sets before them (APE, section 4)."""
        out = torch.zeros(*call.queries.shape[:2], call.values.shape[-1], dtype=torch.float64)
        for row in arrangement.rows_from(call.query_start, call.keys.shape[1]):
            keys = [(index, index + run.shift) for run in row.runs for index in range(run.start, run.stop)]
            sets = arrangement.weighted_sets(row.queries.start)
            for query in range(row.queries.start, row.queries.stop):
                seen = keys[: row.length - (row.queries.stop - 1 - query)]
                for head in range(out.shape[0]):
                    out[head, query - call.query_start] = _one_query(call, head, query, query, seen, sets)
        return out.to(call.queries)

    def ranked(self, arrangement: RankedArrangement, call: AttentionCall) -> torch.Tensor:
        """Return `[H, Q, D_v]` for PINE: rows ranked by importance (PINE, section 3.3)."""
        out = torch.zeros(*call.queries.shape[:2], call.values.shape[-1], dtype=torch.float64)
        ranking = _Ranking(arrangement, call)
        for head in range(out.shape[0]):
            for query in range(call.query_start, call.keys.shape[1]):
                keys = ranking.row(head, query)
                out[head, query - call.query_start] = _one_query(call, head, query, keys[-1][1], keys)
        return out.to(call.queries)


def _one_query(
    call: AttentionCall,
    head: int,
    query: int,
    position: int,
    keys: Sequence[tuple[int, int]],
    sets: Sequence[tuple[Span, Weighting]] = (),
) -> torch.Tensor:
    """Attend from one token.

    Args:
        call: The layer's tensors.
        head: Query head.
        query: Memory index of the token.
        position: Rotary position of the token, counted as those of the keys are.
        keys: Memory index and rotary position of every key in the token's row, far to near, the token itself last.
            A sliding window counts along the row.
        sets: Sets whose keys have a softmax of their own.

    Returns:
        `[D_v]` in float64.
    """
    keys = keys if call.sliding_window is None else keys[-call.sliding_window :]
    kv = head // call.num_key_value_groups
    own = call.rotation.rotate(call.queries[head, query - call.query_start].double(), position - query)
    moved = torch.stack([call.keys[kv, index] for index, _ in keys]).double()
    shifts = torch.tensor([place - index for index, place in keys])
    for shift in shifts.unique().tolist():
        moved[shifts == shift] = call.rotation.rotate(moved[shifts == shift], shift)
    scores = (moved @ own) * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    values = call.values[kv, [index for index, _ in keys]].double()
    if call.sinks is not None:
        scores = torch.cat((scores, call.sinks[head : head + 1].double()))
        values = torch.cat((values, torch.zeros_like(values[:1])))
    parts = [[i for i, (index, _) in enumerate(keys) if span.start <= index < span.stop] for span, _ in sets]
    rest = [i for i in range(len(scores)) if not any(i in part for part in parts)]
    lses, outputs = [scores[rest].logsumexp(0)], [torch.softmax(scores[rest], dim=0) @ values[rest]]
    for part, (_, weighting) in zip(parts, sets, strict=True):
        if part:
            inside = scores[part] / weighting.temperature
            lses.append(weighting.factor * inside.logsumexp(0) + weighting.offset)
            outputs.append(torch.softmax(inside, dim=0) @ values[part])
    return torch.softmax(torch.stack(lses), dim=0) @ torch.stack(outputs)


class _Ranking:
    """PINE's rows: what each token of one layer sees, ranked by importance."""

    def __init__(self, arrangement: RankedArrangement, call: AttentionCall) -> None:
        self._arrangement = arrangement
        self._call = call
        self._keys = _unrotated(call, call.keys, 0)
        self._queries = _unrotated(call, call.queries, call.query_start)
        self._known: dict[tuple[int, int, int, int | None], list[float]] = {}

    def row(self, head: int, query: int) -> list[tuple[int, int]]:
        """Keys of one query, far to near: memory index, and position along the row."""
        order: list[int] = []
        reached = 0
        for number, spans in enumerate(self._arrangement.layout.set_spans):
            if not spans or query < spans[0].start:
                continue
            order += range(reached, spans[0].start)
            own = next((i for i, span in enumerate(spans) if span.start <= query < span.stop), None)
            for i in self._arrangement.far_to_near(self._importance(head, query, number, own)):
                if i != own:
                    order += range(spans[i].start, spans[i].stop)
            reached = spans[-1].stop if own is None else spans[own].start
            if own is not None:
                break
        order += range(reached, query + 1)
        return list(zip(order, range(len(order)), strict=True))

    def _importance(self, head: int, query: int, number: int, own: int | None) -> list[float]:
        """Importance of every segment of a set to a token: to its whole segment, where it is in one of the set."""
        spans = self._arrangement.layout.set_spans[number]
        asking = [query] if own is None else list(range(spans[own].start, spans[own].stop))
        known = (head, asking[0], number, own)
        if known not in self._known:
            total = [0.0] * len(spans)
            others = [i for i in range(len(spans)) if i != own and len(spans[i])]
            tokens = [index for i in others for index in range(spans[i].start, spans[i].stop)]
            for token in asking if tokens else ():
                scores = (
                    self._keys[head // self._call.num_key_value_groups, tokens]
                    @ self._queries[head, token - self._call.query_start]
                )
                weights = dict(zip(tokens, torch.softmax(scores * self._call.scaling, dim=0).tolist(), strict=True))
                for i in others:
                    total[i] += sum(weights[index] for index in range(spans[i].start, spans[i].stop)) / len(spans[i])
            self._known[known] = total
        return self._known[known]


def _unrotated(call: AttentionCall, tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Undo the rotation of `[H, T, D]`, whose tokens lie at `first`, `first + 1`..., in float64."""
    tokens = [call.rotation.rotate(tensor[:, i].double(), -(first + i)) for i in range(tensor.shape[1])]
    return torch.stack(tokens, dim=1)
