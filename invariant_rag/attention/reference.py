"""Reference attention, the specification of all backends: one query at a time, in float64, with rotated keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from invariant_rag.attention.call import AttentionCall

if TYPE_CHECKING:
    from invariant_rag.arrangement import Arrangement, Weighted


class Reference:
    """The reference backend. It computes attention for one head and one query at a time, in float64."""

    name: ClassVar[str] = "reference"
    reads_together: ClassVar[bool] = False

    def batch(self, *_: object) -> None:
        """Compute each row of a batch by itself."""

    def attend(self, arrangement: Arrangement, call: AttentionCall) -> torch.Tensor:
        """Return outputs `[H, Q, D_v]`: for each query, what the arrangement says that it attends to."""
        out = torch.zeros(*call.queries.shape[:2], call.values.shape[-1], dtype=torch.float64)
        for head in range(out.shape[0]):
            for query, keys in enumerate(arrangement.keys_of_queries(call, head), start=call.query_start):
                weighted = arrangement.weighted_from(query)
                out[head, query - call.query_start] = _attend_one_query(call, head, query, keys, weighted)
        return out.to(call.queries)


def _attend_one_query(
    call: AttentionCall,
    head: int,
    query: int,
    keys: Sequence[tuple[int, int]],
    weighted: Weighted,
) -> torch.Tensor:
    """Return the attention output of one query `[D_v]`, in float64.

    Args:
        call: The layer's tensors.
        head: Query head.
        query: Memory index of the token.
        keys: Memory index and rotary position of every key in the token's row, far to near, the token itself last.
            A sliding window covers the last keys of the row.
        weighted: Disjoint stretches of keys that have a separate softmax, with their weighting.
    """
    keys = keys if call.sliding_window is None else keys[-call.sliding_window :]
    kv = head // call.num_key_value_groups
    own_shift = keys[-1][1] - query
    rotated_query = call.rotation.rotate(call.queries[head, query - call.query_start].double(), own_shift)
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
