"""PINE for a batch: one call for the importance of all segments to all readers, and one for attention to them.

Importance needs log-sum-exps only. Then the readers attend to each segment in its place, turned by the shift that their
head gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from invariant_rag.arrangement import Span
from invariant_rag.attention.merge_states import merge_stacked
from invariant_rag.attention.varlen.kernels import Attended, VarlenKernel, attend_windows
from invariant_rag.attention.varlen.passes import Pass, Turn, in_slots, make_passes, merge
from invariant_rag.attention.varlen.ranks import Ranks, make_ranks
from invariant_rag.attention.varlen.windows import Ranked, Window

if TYPE_CHECKING:
    from invariant_rag.attention.call import AttentionCall


@dataclass(frozen=True)
class Ranking:
    """Readers, and the segments that they rank. N is the largest number of segments, R the number of readers.

    Attributes:
        readers: Which queries read `[R]`.
        passes: Calls in which all readers see all segments of their set, one segment a slot; together N slots.
        unturn: Turns the readers to position 0; None where they stand there.
        ranks: What follows from the log-sum-exps.
        reach: No segment is shifted by more.
    """

    readers: torch.Tensor
    passes: tuple[Pass, ...]
    unturn: Turn | None
    ranks: Ranks
    reach: int

    def attend(
        self,
        kernel: VarlenKernel,
        call: AttentionCall,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        unturned_keys: torch.Tensor,
        state: Attended,
    ) -> Attended:
        """Return the state of all queries, with attention of the readers to their ranked segments merged into it."""
        queries, keys, values = tensors
        reading = queries[self.readers]
        shifts = self.ranks.shifts(self._lses(kernel, call, reading, unturned_keys, values))
        read = Attended(state.out[self.readers], state.lse[self.readers])
        first = 0
        everything = torch.arange(-self.reach, self.reach + 1, device=reading.device)
        for each in self.passes:
            turned_by = -shifts[each.slot_of, each.queries]
            packed = call.rotation.rotate_by_table(reading[each.queries], everything, turned_by + self.reach)
            out, lse = attend_windows(kernel, packed, keys, values, each.windows, call.scaling)
            stop = first + each.slots.shape[0]
            lses = in_slots(lse, each.slots, -torch.inf).masked_fill(self.ranks.is_own[first:stop], -torch.inf)
            read = merge(read, Attended(*merge_stacked(in_slots(out, each.slots), lses)))
            first = stop
        return Attended(
            state.out.index_copy(0, self.readers, read.out), state.lse.index_copy(0, self.readers, read.lse)
        )

    def _lses(
        self,
        kernel: VarlenKernel,
        call: AttentionCall,
        reading: torch.Tensor,
        unturned_keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Return the log-sum-exps over the keys of each segment, without positions `[N, R, H]`."""
        unturned = reading if self.unturn is None else self.unturn.turned(reading, call.rotation)
        unturned = call.rotation.unscaled(unturned)
        parts = []
        for each in self.passes:
            lse = attend_windows(kernel, unturned[each.queries], unturned_keys, values, each.windows, call.scaling).lse
            parts.append(in_slots(lse, each.slots, -torch.inf))
        return torch.cat(parts)


def make_ranking(readers: Sequence[Ranked], positions: Sequence[int], device: torch.device) -> Ranking:
    """Return the ranking of some readers.

    Args:
        readers: The readers, in the order of the queries.
        positions: Position of every query of the batch in its prompt.
        device: Where the tables are.
    """
    firsts = list(accumulate((len(each.queries) for each in readers), initial=0))
    slots: list[list[Window]] = [[] for _ in range(max(len(each.set.segments) for each in readers))]
    for each, start, stop in zip(readers, firsts, firsts[1:], strict=False):
        for slot, span in zip(slots, each.set.segments, strict=False):
            slot.append(Window(Span(start, stop), Span(span.start + each.offset, span.stop + each.offset)))
    queries = [index for each in readers for index in range(each.queries.start, each.queries.stop)]
    return Ranking(
        readers=torch.tensor(queries, device=device),
        passes=make_passes(slots, firsts[-1], device),
        unturn=Turn.of([-positions[index] for index in queries], device),
        ranks=make_ranks(readers, device),
        reach=2 * max(span.stop for each in readers for span in each.set.segments),
    )
