"""Reference attention, the specification of all backends: one query at a time, in float64, with rotated keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from invariant_rag.attention.base import AttentionCall

if TYPE_CHECKING:
    from invariant_rag.arrangement import Arrangement, RankedSet, Run, Span


class Key(NamedTuple):
    """A key that a query attends to: its index in memory, its position in the row, and its run (None: it is ranked)."""

    token: int
    position: int
    run: Run | None


class Reference:
    """The reference backend. It computes attention for one head and one query at a time, in float64."""

    name: ClassVar[str] = "reference"
    batched_prefill: ClassVar[bool] = False

    def attend(self, arrangement: Arrangement, call: AttentionCall) -> torch.Tensor:
        """Return outputs `[H, Q, D_v]`: for each query, the attention of its arrangement."""
        out = torch.zeros(*call.queries.shape[:2], call.values.shape[-1], dtype=torch.float64)
        for head in range(out.shape[0]):
            for query, keys in enumerate(keys_of_queries(arrangement, call, head), start=call.query_start):
                out[head, query - call.query_start] = _attend_one_query(call, head, query, keys)
        return out.to(call.queries)


def keys_of_queries(arrangement: Arrangement, call: AttentionCall, head: int) -> Iterator[list[Key]]:
    """Yield the keys that each query of a head attends to, far to near, itself last."""
    for row in arrangement.rows_from(call.query_start, call.keys.shape[1]):
        together = [_far_to_near(call, head, each, row.queries) for each in row.ranked if each.own is not None]
        for query in range(row.queries.start, row.queries.stop):
            keys = [
                Key(index, index + run.shift, run)
                for run in row.runs
                for index in range(run.start, min(run.stop, query + 1) if run is row.runs[-1] else run.stop)
            ]
            alone = (_far_to_near(call, head, each, range(query, query + 1)) for each in row.ranked if not together)
            for each, spans in zip(row.ranked, together or alone, strict=True):
                indices = [index for span in spans for index in range(span.start, span.stop)]
                positions = enumerate(indices, start=each.first_position)
                keys += [Key(index, position, None) for position, index in positions]
            yield sorted(keys, key=lambda key: key.position) if row.ranked else keys


def _far_to_near(call: AttentionCall, head: int, ranked: RankedSet, queries: Span | range) -> list[Span]:
    """Return the segments of a set by their importance to some queries of a head, in float64."""
    spans = ranked.others
    tokens = [index for span in spans for index in range(span.start, span.stop)]
    keys = _projected(call, call.keys[head // call.num_key_value_groups, tokens], tokens)
    query_indices = range(queries.start, queries.stop)
    projected = _projected(call, call.queries[head, [each - call.query_start for each in query_indices]], query_indices)
    weights = (projected @ keys.T * call.scaling).softmax(dim=-1).sum(dim=0)
    importance = [float(part.mean()) for part in weights.split([*map(len, spans)])]
    sign = -1.0 if ranked.reverse else 1.0
    return [spans[index] for index in sorted(range(len(spans)), key=lambda index: sign * importance[index])]


def _projected(call: AttentionCall, x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Return one head's queries or keys `[T, D]` as the layer projects them: without their positions, in float64."""
    back = torch.tensor([-position for position in positions], dtype=torch.float64, device=x.device)
    return call.rotation.unscaled(call.rotation.rotate_by(x.double(), back))


def _attend_one_query(call: AttentionCall, head: int, query: int, keys: list[Key]) -> torch.Tensor:
    """Return the attention output of one query `[D_v]`, in float64; a sliding window covers the last of the keys."""
    keys = keys if call.sliding_window is None else keys[-call.sliding_window :]
    kv, indices = head // call.num_key_value_groups, [key.token for key in keys]
    unmoved = call.queries[head, query - call.query_start].double()
    rotated_query = call.rotation.rotate_by(unmoved, keys[-1].position - query)
    rotated_keys = call.keys[kv, indices].double()
    shifts = torch.tensor([key.position - key.token for key in keys])
    for shift in shifts.unique().tolist():
        rotated_keys[shifts == shift] = call.rotation.rotate_by(rotated_keys[shifts == shift], shift)
    scores = (rotated_keys @ rotated_query) * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    values = call.values[kv, indices].double()
    lses, outputs = [], []
    for run in {key.run: None for key in keys}:  # each run has a softmax of its own, merged by log-sum-exps
        inside = torch.tensor([key.run == run for key in keys])
        temperature, factor, offset = (
            (1.0, 1.0, 0.0) if run is None else (run.weighting.temperature, run.weighting.factor, run.weighting.offset)
        )
        part = scores[inside] / temperature
        lses.append(factor * part.logsumexp(0) + offset)
        outputs.append(torch.softmax(part, dim=0) @ values[inside])
    if call.sinks is not None:
        lses.append(call.sinks[head].double())
        outputs.append(torch.zeros_like(outputs[0]))
    return torch.softmax(torch.stack(lses), dim=0) @ torch.stack(outputs)
