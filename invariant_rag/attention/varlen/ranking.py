"""PINE for a batch: one call for the importance of all segments to all readers, and one for attention to them.

The importance of segment j to a token t is the mean weight of its keys, without rotary positions (arXiv 2407.01100,
section 3.3). With the log-sum-exp `L[t, j]` over the keys of j, it is `exp(L[t, j] - logsumexp_k L[t, k]) / len(j)`.
Then the readers attend to each segment in its place, turned by the shift that their head gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from typing import TYPE_CHECKING

import torch

from invariant_rag.arrangement import Span
from invariant_rag.attention.merge_states import AttentionState, merge_attn_states, merge_stacked
from invariant_rag.attention.varlen.kernels import VarlenKernel, attend_windows
from invariant_rag.attention.varlen.passes import Pass, in_slots, make_passes, shifts_of
from invariant_rag.attention.varlen.windows import Ranked, Window

if TYPE_CHECKING:
    from invariant_rag.attention.call import AttentionCall


@dataclass(frozen=True)
class Ranks:
    """What readers need to know of the segments that they rank. N is the largest number of segments, R that of readers.

    Attributes:
        lengths: Tokens of each segment `[N, R, 1]`; 0 where a set has fewer.
        places: Index of each segment's first token in its prompt `[N, R, 1]`.
        is_own: Where a reader is a token of the segment itself `[N, R, 1]`.
        starts: Where a reader sees the first token of its set, relative to its own index `[R, 1]`.
        members: Readers that are tokens of segments of the set `[M]`; they rank as whole segments.
        counts: Tokens of these segments `[G]`.
        groups: The segment of each member `[M]`.
        signs: -1 where the most important segment is placed farthest, else 1 `[R, 1]`.
    """

    lengths: torch.Tensor
    places: torch.Tensor
    is_own: torch.Tensor
    starts: torch.Tensor
    members: torch.Tensor
    counts: torch.Tensor
    groups: torch.Tensor
    signs: torch.Tensor

    def shifts(self, lses: torch.Tensor) -> torch.Tensor:
        """Return by how much each reader sees each segment later than it lies `[N, R, H]`.

        Args:
            lses: Log-sum-exps over the keys of each segment, without positions `[N, R, H]`; minus infinity where a set
                has fewer segments.
        """
        importance = self._importance(lses)
        rank = (self.signs * importance).masked_fill(self.is_own, torch.inf)
        far_to_near = torch.sort(rank, dim=0, stable=True).indices  # ties in physical order
        lengths = self.lengths.expand_as(rank).gather(0, far_to_near)
        starts = torch.empty_like(lengths).scatter_(0, far_to_near, lengths.cumsum(dim=0) - lengths)
        return starts + self.starts - self.places

    def _importance(self, lses: torch.Tensor) -> torch.Tensor:
        """Return the importance of each segment to each reader `[N, R, H]`; that of its own segment is 0."""
        others = lses.masked_fill(self.is_own, -torch.inf)
        importance = (others - others.logsumexp(dim=0)).exp().nan_to_num(0.0) / self.lengths.clamp(min=1)
        if len(self.members):
            tokens = importance[:, self.members].transpose(0, 1)
            segments = torch.segment_reduce(tokens.contiguous(), "sum", lengths=self.counts, axis=0, unsafe=True)
            importance[:, self.members] = segments[self.groups].transpose(0, 1)
        return importance


def make_ranks(readers: Sequence[Ranked], device: torch.device) -> Ranks:
    """Return what readers need to know of the segments that they rank.

    Args:
        readers: The readers, in the order of the queries.
        device: Where the tables are to be.
    """
    slots = max(len(each.set.segments) for each in readers)
    counts = [len(each.queries) for each in readers]

    def per_reader(numbers: Sequence[Sequence[float]]) -> torch.Tensor:
        """Return numbers of each stretch of readers `[R, n]`."""
        return torch.tensor(numbers).repeat_interleave(torch.tensor(counts), dim=0).to(device)

    def per_slot(numbers: Sequence[Sequence[int]], missing: int) -> torch.Tensor:
        """Return numbers of the segments of each stretch of readers `[N, R, 1]`."""
        padded = [[*some, *[missing] * (slots - len(some))] for some in numbers]
        return per_reader(padded).T[..., None]

    pooled = [each.set.own is not None for each in readers]
    return Ranks(
        lengths=per_slot([list(map(len, each.set.segments)) for each in readers], 0),
        places=per_slot([[span.start for span in each.set.segments] for each in readers], 0),
        is_own=per_slot([[slot == each.set.own for slot in range(slots)] for each in readers], False),
        starts=per_reader([[each.set.first_position] for each in readers]),
        members=per_reader([[each] for each in pooled])[:, 0].nonzero()[:, 0],
        counts=torch.tensor(list(compress(counts, pooled)), device=device),
        groups=torch.tensor(
            [group for group, count in enumerate(compress(counts, pooled)) for _ in range(count)], device=device
        ),
        signs=per_reader([[-1.0 if each.set.reverse else 1.0] for each in readers]),
    )


@dataclass(frozen=True)
class Ranking:
    """Readers, and the segments that they rank. N is the largest number of segments, R the number of readers.

    Attributes:
        readers: Which queries read `[R]`.
        passes: Calls in which all readers see all segments of their set, one segment a slot; together N slots.
        to_zero: Shifts of the readers to position 0 `[R, 1]`; None: they are there.
        ranks: What follows from the log-sum-exps.
    """

    readers: torch.Tensor
    passes: tuple[Pass, ...]
    to_zero: torch.Tensor | None
    ranks: Ranks

    def attend(
        self,
        kernel: VarlenKernel,
        call: AttentionCall,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        unturned_keys: torch.Tensor,
        state: AttentionState,
    ) -> AttentionState:
        """Return the state of all queries, with attention of the readers to their ranked segments merged into it."""
        queries, keys, values = tensors
        reading = queries[self.readers]
        shifts = self.ranks.shifts(self._lses(kernel, call, reading, unturned_keys, values))
        read = AttentionState(state.out[self.readers], state.lse[self.readers])
        first = 0
        for each in self.passes:
            turned_by = -shifts[each.slot_of, each.queries]
            packed = call.rotation.rotate_each(reading[each.queries], turned_by, call.reach).to(reading.dtype)
            out, lse = attend_windows(kernel, packed, keys, values, each.windows, call.scaling)
            stop = first + each.slots.shape[0]
            lses = in_slots(lse, each.slots, -torch.inf).masked_fill(self.ranks.is_own[first:stop], -torch.inf)
            read = merge_attn_states((read, merge_stacked(in_slots(out, each.slots), lses)))
            first = stop
        return AttentionState(
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
        unturned = reading if self.to_zero is None else call.rotation.rotate_by(reading, self.to_zero)
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
        to_zero=shifts_of([-positions[index] for index in queries], device),
        ranks=make_ranks(readers, device),
    )
