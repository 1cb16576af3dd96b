"""Plans: the windows of a batch as tables on its device, and one layer's attention by them.

A plan is made once for a batch and used by all layers. In a layer, nothing depends on the number of segments or
prompts: the causal windows are one call, the others are one call for every few slots, and what they give is merged by
log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from invariant_rag.attention.call import BatchCall
from invariant_rag.attention.varlen.kernels import PackedWindows, VarlenKernel
from invariant_rag.attention.varlen.passes import Pass, Turn, Weights, attend_packed, make_passes, merge, merge_sinks
from invariant_rag.attention.varlen.ranking import Ranking, make_ranking
from invariant_rag.attention.varlen.readers import lay_ranked_windows
from invariant_rag.attention.varlen.windows import Windows
from invariant_rag.methods.pine import RankedArrangement


@dataclass(frozen=True)
class Plan:
    """How one layer attends for a batch.

    Attributes:
        tape: Which of the batch's keys are on the tape `[K]`; None: all of them, in order.
        turn: How the keys of the tape are turned; None: not at all.
        causal: What all queries see of the tape.
        weights: How that is weighed; None: as it is.
        others: Calls to the batch's keys.
        rankings: Who ranks which segments, for the first, second... set that tokens rank.
        unturn: Turns all keys of the batch to position 0, for rankings.
    """

    tape: torch.Tensor | None
    turn: Turn | None
    causal: PackedWindows
    weights: Weights | None
    others: tuple[Pass, ...]
    rankings: tuple[Ranking, ...] = ()
    unturn: Turn | None = None

    def attend(self, kernel: VarlenKernel, call: BatchCall) -> torch.Tensor:
        """Return one layer's attention `[B, Q, H, D]`."""
        queries, keys, values = (each.transpose(1, 2).flatten(0, 1) for each in (call.queries, call.keys, call.values))
        taped, taped_values = keys, values
        if self.tape is not None:
            taped, taped_values = keys[self.tape], values[self.tape]
        if self.turn is not None:
            taped = self.turn.turned(taped, call.rotation)
        state = attend_packed(kernel, queries, taped, taped_values, self.causal, call.scaling, self.weights)
        del taped, taped_values
        for each in self.others:
            state = merge(state, each.attend(kernel, call, queries, keys, values))
        if self.rankings:
            unturned = keys if self.unturn is None else self.unturn.turned(keys, call.rotation)
            for ranking in self.rankings:
                state = ranking.attend(kernel, call, (queries, keys, values), unturned, state)
        out = merge_sinks(state, call.sinks).out
        return out.reshape(call.queries.shape[0], -1, *out.shape[1:])


def make_plan(windows: Windows, num_queries: int, device: torch.device) -> Plan:
    """Return the plan of windows over `num_queries` packed queries."""
    tape = [index for run in windows.tape for index in range(run.start, run.stop)]
    shifts = [run.shift for run in windows.tape for _ in range(run.start, run.stop)]
    lengths, seen = [len(each.queries) for each in windows.causal], [each.keys for each in windows.causal]
    return Plan(
        tape=None if tape == list(range(len(tape))) else torch.tensor(tape, device=device),
        turn=Turn.of(shifts, device),
        causal=PackedWindows.of(lengths, seen, True, device),
        weights=Weights.of(windows.causal, device),
        others=make_passes(windows.others, num_queries, device),
    )


def make_ranked_plan(
    arrangements: Sequence[RankedArrangement],
    padding: Sequence[int],
    num_queries: int,
    num_keys: int,
    device: torch.device,
) -> Plan:
    """Return the plan of a left-padded batch of prompts whose tokens rank segments."""
    windows, levels = lay_ranked_windows(arrangements, padding, num_queries, num_keys)
    plan = make_plan(windows, len(arrangements) * num_queries, device)

    def positions(count: int) -> list[int]:
        return [max(0, num_keys - count + index - padded) for padded in padding for index in range(count)]

    asked = positions(num_queries)
    rankings = tuple(make_ranking(readers, arrangements[0].reverse, asked, device) for readers in levels)
    return replace(plan, rankings=rankings, unturn=Turn.of([-each for each in positions(num_keys)], device))
