"""Reference attention, the specification of all backends: one query at a time, in float64, with rotated keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from invariant_rag.attention.call import AttentionCall

if TYPE_CHECKING:
    from invariant_rag.arrangement import RowArrangement, Weighted, WeightedArrangement
    from invariant_rag.methods.pine import RankedArrangement


class Reference:
    """The reference backend. It computes attention for one head and one query at a time, in float64."""

    name: ClassVar[str] = "reference"
    reads_together: ClassVar[bool] = False

    def batch(self, *_: object) -> None:
        """Compute each row of a batch by itself."""

    def rows(self, arrangement: RowArrangement, call: AttentionCall) -> torch.Tensor:
        """Return outputs `[H, Q, D_v]` for rows that are the same for all heads."""
        out = torch.zeros(*call.queries.shape[:2], call.values.shape[-1], dtype=torch.float64)
        for row in arrangement.rows_from(call.query_start, call.keys.shape[1]):
            keys = [(index, run.shift) for run in row.runs for index in range(run.start, run.stop)]
            for query in range(row.queries.start, row.queries.stop):
                hidden = row.queries.stop - 1 - query
                visible = [(i, i + shift) for i, shift in keys[: row.length - hidden]]
                for head in range(out.shape[0]):
                    out[head, query - call.query_start] = _attend_one_query(call, head, query, query, visible)
        return out.to(call.queries)

    def weighted(self, arrangement: WeightedArrangement, call: AttentionCall) -> torch.Tensor:
        """Return outputs `[H, Q, D_v]` for rows that weigh some of their keys."""
        out = torch.zeros(*call.queries.shape[:2], call.values.shape[-1], dtype=torch.float64)
        for row in arrangement.rows_from(call.query_start, call.keys.shape[1]):
            keys = [(index, index + run.shift) for run in row.runs for index in range(run.start, run.stop)]
            weighted = arrangement.weighted_from(row.queries.start)
            for query in range(row.queries.start, row.queries.stop):
                visible = keys[: row.length - (row.queries.stop - 1 - query)]
                for head in range(out.shape[0]):
                    out[head, query - call.query_start] = _attend_one_query(call, head, query, query, visible, weighted)
        return out.to(call.queries)

    def ranked(self, arrangement: RankedArrangement, call: AttentionCall) -> torch.Tensor:
        """Return outputs `[H, Q, D_v]` for rows ranked by importance (PINE, section 3.3)."""
        out = torch.zeros(*call.queries.shape[:2], call.values.shape[-1], dtype=torch.float64)
        ranking = _Ranking(arrangement, call)
        for head in range(out.shape[0]):
            for query in range(call.query_start, call.keys.shape[1]):
                keys = ranking.row(head, query)
                out[head, query - call.query_start] = _attend_one_query(call, head, query, keys[-1][1], keys)
        return out.to(call.queries)


def _attend_one_query(
    call: AttentionCall,
    head: int,
    query: int,
    position: int,
    keys: Sequence[tuple[int, int]],
    weighted: Weighted = (),
) -> torch.Tensor:
    """Return the attention output of one query `[D_v]`, in float64.

    Args:
        call: The layer's tensors.
        head: Query head.
        query: Memory index of the token.
        position: Rotary position of the token in its row.
        keys: Memory index and rotary position of every key in the token's row, far to near, the token itself last.
            A sliding window covers the last keys of the row.
        weighted: Disjoint stretches of keys that have a separate softmax, with their weighting.
    """
    keys = keys if call.sliding_window is None else keys[-call.sliding_window :]
    kv = head // call.num_key_value_groups
    rotated_query = call.rotation.rotate(call.queries[head, query - call.query_start].double(), position - query)
    rotated_keys = torch.stack([call.keys[kv, index] for index, _ in keys]).double()
    shifts = torch.tensor([key_position - index for index, key_position in keys])
    for shift in shifts.unique().tolist():
        rotated_keys[shifts == shift] = call.rotation.rotate(rotated_keys[shifts == shift], shift)
    scores = (rotated_keys @ rotated_query) * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    values = call.values[kv, [index for index, _ in keys]].double()
    if call.sinks is not None:
        scores = torch.cat((scores, call.sinks[head : head + 1].double()))
        values = torch.cat((values, torch.zeros_like(values[:1])))
    parts = [[i for i, (index, _) in enumerate(keys) if span.start <= index < span.stop] for span, _ in weighted]
    rest = [i for i in range(len(scores)) if not any(i in part for part in parts)]
    lses, outputs = [scores[rest].logsumexp(0)], [torch.softmax(scores[rest], dim=0) @ values[rest]]
    for part, (_, weighting) in zip(parts, weighted, strict=True):
        if part:
            inside = scores[part] / weighting.temperature
            lses.append(weighting.factor * inside.logsumexp(0) + weighting.offset)
            outputs.append(torch.softmax(inside, dim=0) @ values[part])
    return torch.softmax(torch.stack(lses), dim=0) @ torch.stack(outputs)


class _Ranking:
    """PINE's rows of one layer: segments ranked by importance for each query."""

    def __init__(self, arrangement: RankedArrangement, call: AttentionCall) -> None:
        self._arrangement = arrangement
        self._call = call
        self._keys = _unrotated(call, call.keys, 0)
        self._queries = _unrotated(call, call.queries, call.query_start)
        self._cached: dict[tuple[int, int, int, int | None], list[float]] = {}

    def row(self, head: int, query: int) -> list[tuple[int, int]]:
        """Return the keys of one query, far to near: memory index, and position in the row."""
        order: list[int] = []
        end = 0
        own_set, own = self._own(query)
        for number, spans in enumerate(self._arrangement.layout.set_spans):
            if not spans or query < spans[0].start or own_set not in (None, number):
                continue  # a set sees the sets before it as a text
            order += range(end, spans[0].start)
            inside = own if own_set == number else None
            for i in self._arrangement.far_to_near(self._importance(head, query, number, inside)):
                if i != inside:
                    order += range(spans[i].start, spans[i].stop)
            end = spans[-1].stop if inside is None else spans[inside].start
        order += range(end, query + 1)
        return list(zip(order, range(len(order)), strict=True))

    def _own(self, query: int) -> tuple[int | None, int | None]:
        """Return the set that holds a token, and its segment there; None and None for a token of a text."""
        for number, spans in enumerate(self._arrangement.layout.set_spans):
            for i, span in enumerate(spans):
                if span.start <= query < span.stop:
                    return number, i
        return None, None

    def _importance(self, head: int, query: int, number: int, own: int | None) -> list[float]:
        """Return the importance of each segment of a set to a token, or to its whole segment if it is in the set."""
        spans = self._arrangement.layout.set_spans[number]
        queries = [query] if own is None else list(range(spans[own].start, spans[own].stop))
        key = (head, queries[0], number, own)
        if key not in self._cached:
            total = [0.0] * len(spans)
            others = [i for i in range(len(spans)) if i != own and len(spans[i])]
            tokens = [index for i in others for index in range(spans[i].start, spans[i].stop)]
            for token in queries if tokens else ():
                scores = (
                    self._keys[head // self._call.num_key_value_groups, tokens]
                    @ self._queries[head, token - self._call.query_start]
                )
                weights = dict(zip(tokens, torch.softmax(scores * self._call.scaling, dim=0).tolist(), strict=True))
                for i in others:
                    total[i] += sum(weights[index] for index in range(spans[i].start, spans[i].stop)) / len(spans[i])
            self._cached[key] = total
        return self._cached[key]


def _unrotated(call: AttentionCall, tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Undo the rotation of `[H, T, D]` with positions `first`, `first + 1`..., in float64."""
    tokens = [call.rotation.rotate(tensor[:, i].double(), -(first + i)) for i in range(tensor.shape[1])]
    return torch.stack(tokens, dim=1)
