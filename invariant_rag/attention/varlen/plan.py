"""Plans: the windows of a batch as tables on its device, and one layer's attention by them.

A plan is made once for a batch and used by all layers. In a layer, nothing depends on the number of segments or
prompts: the causal windows are one call, the others are one call for every few slots, and what they give is merged by
log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from invariant_rag.arrangement import Arrangement
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.merge_states import merge_attn_states
from invariant_rag.attention.varlen.kernels import PackedWindows, VarlenKernel
from invariant_rag.attention.varlen.passes import Pass, Weights, attend_packed, make_passes, merge_sinks, shifts_of
from invariant_rag.attention.varlen.ranking import Ranking, make_ranking
from invariant_rag.attention.varlen.windows import lay_windows


@dataclass(frozen=True)
class Plan:
    """How one layer attends for a batch.

    Attributes:
        causal: What all queries attend to causally.
        weights: How that is weighed; None: as it is.
        others: Calls to the batch's keys.
        rankings: Who ranks which segments, for the first, second... set that tokens rank.
        to_zero: Shifts of all keys of the batch to position 0 `[T, 1]`, for rankings; None: they are there.
    """

    causal: PackedWindows
    weights: Weights | None
    others: tuple[Pass, ...]
    rankings: tuple[Ranking, ...]
    to_zero: torch.Tensor | None

    def attend(self, kernel: VarlenKernel, call: AttentionCall) -> torch.Tensor:
        """Return one layer's attention `[B, Q, H, D]`."""
        queries, keys, values = (each.transpose(1, 2).flatten(0, 1) for each in (call.queries, call.keys, call.values))
        state = attend_packed(kernel, queries, keys, values, self.causal, call.scaling, self.weights)
        for each in self.others:
            state = merge_attn_states((state, each.attend(kernel, call, queries, keys, values)))
        if self.rankings:
            unturned = keys if self.to_zero is None else call.rotation.rotate_by(keys, self.to_zero)
            unturned = call.rotation.unscaled(unturned)
            for ranking in self.rankings:
                state = ranking.attend(kernel, call, (queries, keys, values), unturned, state)
        out = merge_sinks(state, call.sinks).out
        return out.reshape(call.queries.shape[0], -1, *out.shape[1:])


def make_plan(
    arrangements: Sequence[Arrangement], padding: Sequence[int], num_queries: int, num_keys: int, device: torch.device
) -> Plan:
    """Return the plan of a left-padded batch."""
    windows = lay_windows(arrangements, padding, num_queries, num_keys)

    def positions(count: int) -> list[int]:
        return [max(0, num_keys - count + index - padded) for padded in padding for index in range(count)]

    lengths, seen = [len(each.queries) for each in windows.causal], [each.keys for each in windows.causal]
    asked = positions(num_queries)
    return Plan(
        causal=PackedWindows.of(lengths, seen, True, device),
        weights=Weights.of(windows.causal, device),
        others=make_passes(windows.others, len(arrangements) * num_queries, device),
        rankings=tuple(make_ranking(each, asked, device) for each in windows.ranked),
        to_zero=shifts_of([-each for each in positions(num_keys)], device) if windows.ranked else None,
    )
