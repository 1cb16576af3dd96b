"""PINE for a batch: one call for the importance of all segments to all readers, and one for attention to them.

The importance of segment j to a token t is the mean weight of its keys, without rotary positions (arXiv 2407.01100,
section 3.3). With the log-sum-exp `L[t, j]` over the keys of j, it is `exp(L[t, j] - logsumexp_k L[t, k]) / len(j)`.
Then the readers attend to each segment in its place, turned by the shift that their head gives it.

While it decodes, every key head of a row is packed as a sequence of its own, and the query heads that share it are its
queries. So a cache is packed as it lies in memory, and nothing of it is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress
from typing import TYPE_CHECKING

import torch

from invariant_rag.arrangement import UNWEIGHTED, Arrangement, Span
from invariant_rag.attention.pine import stack_by_importance
from invariant_rag.attention.softmax import AttentionState, merge_attn_states, merge_stacked
from invariant_rag.attention.varlen.kernels import PackedLayer, PackedWindows, VarlenKernel
from invariant_rag.attention.varlen.passes import Pass, Ranked, Window, in_slots, indices, make_passes, merge_sinks

if TYPE_CHECKING:
    from invariant_rag.attention.call import AttentionCall


@dataclass(frozen=True)
class Ranks:
    """What readers need to know of the segments that they rank: N is the most segments of a set, R that of readers."""

    lengths: torch.Tensor  # tokens of each segment `[N, R, 1]`; 0 where a set has fewer
    places: torch.Tensor  # index of each segment's first token in its prompt `[N, R, 1]`
    is_own: torch.Tensor  # where a reader is a token of the segment itself `[N, R, 1]`
    starts: torch.Tensor  # where a reader sees the first token of its set, relative to its own index `[R, 1]`
    members: torch.Tensor  # readers that are tokens of segments of the set `[M]`; they rank as whole segments
    counts: torch.Tensor  # tokens of these segments `[G]`
    groups: torch.Tensor  # the segment of each member `[M]`
    signs: torch.Tensor  # -1 where the most important segment is placed farthest, else 1 `[R, 1]`

    def shifts(self, lses: torch.Tensor) -> torch.Tensor:
        """Return by how much each reader shifts each segment `[N, R, H]`, from log-sum-exps without positions.

        These are over the keys of each segment `[N, R, H]`, and minus infinity where a set has fewer segments.
        """
        others = lses.masked_fill(self.is_own, -torch.inf)
        importance = (others - others.logsumexp(dim=0)).exp().nan_to_num(0.0) / self.lengths.clamp(min=1)
        if len(self.members):
            tokens = importance[:, self.members].transpose(0, 1)
            segments = torch.segment_reduce(tokens.contiguous(), "sum", lengths=self.counts, axis=0, unsafe=True)
            importance[:, self.members] = segments[self.groups].transpose(0, 1)
        rank = (self.signs * importance).masked_fill(self.is_own, torch.inf)
        return stack_by_importance(rank, self.lengths, 0) + self.starts - self.places


def make_ranks(readers: Sequence[Ranked], device: torch.device) -> Ranks:
    """Return what readers, in the order of the queries, need to know of the segments that they rank."""
    slots = max(len(each.set.segments) for each in readers)
    counts = [len(each.queries) for each in readers]

    def per_reader(numbers: Sequence[Sequence[float]]) -> torch.Tensor:
        """Return numbers of each stretch of readers `[R, n]`."""
        return torch.tensor(numbers).repeat_interleave(torch.tensor(counts), dim=0).to(device)

    def per_slot(numbers: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return numbers of the segments of each stretch of readers `[N, R, 1]`."""
        return per_reader([[*some, *[False] * (slots - len(some))] for some in numbers]).T[..., None]

    pooled = [each.set.own is not None for each in readers]
    grouped = [group for group, count in enumerate(compress(counts, pooled)) for _ in range(count)]
    return Ranks(
        lengths=per_slot([list(map(len, each.set.segments)) for each in readers]),
        places=per_slot([[span.start for span in each.set.segments] for each in readers]),
        is_own=per_slot([[slot == each.set.own for slot in range(slots)] for each in readers]),
        starts=per_reader([[each.set.first_position] for each in readers]),
        members=per_reader([[each] for each in pooled])[:, 0].nonzero()[:, 0],
        counts=torch.tensor(list(compress(counts, pooled)), device=device),
        groups=torch.tensor(grouped, device=device),
        signs=per_reader([[-1.0 if each.set.reverse else 1.0] for each in readers]),
    )


@dataclass(frozen=True)
class Ranking:
    """Readers, and the segments that they rank."""

    readers: torch.Tensor  # which queries read `[R]`
    passes: tuple[Pass, ...]  # calls in which all readers see all segments of their set, each in one of N slots
    to_zero: torch.Tensor  # shifts of the readers to position 0 `[R, 1]`
    ranks: Ranks

    def attend(self, layer: PackedLayer, unturned_keys: torch.Tensor, state: AttentionState) -> AttentionState:
        """Return the state of all queries, with attention of the readers to their ranked segments merged into it."""
        rotation, reading = layer.call.rotation, layer.queries[self.readers]
        unturned = rotation.unscaled(rotation.rotate_by(reading, self.to_zero))
        lses = [
            in_slots(layer.attend(each.windows, unturned[each.queries], unturned_keys).lse, each.slots, -torch.inf)
            for each in self.passes
        ]
        shifts = self.ranks.shifts(torch.cat(lses))
        read = AttentionState(state.out[self.readers], state.lse[self.readers])
        first = 0
        for each in self.passes:
            turned_by = -shifts[each.slot_of, each.queries]
            packed = rotation.rotate_each(reading[each.queries], turned_by, layer.call.reach).to(reading.dtype)
            out, lse = layer.attend(each.windows, packed)
            stop = first + each.slots.shape[0]
            seen = in_slots(lse, each.slots, -torch.inf).masked_fill(self.ranks.is_own[first:stop], -torch.inf)
            read = merge_attn_states((read, merge_stacked(in_slots(out, each.slots), seen)))
            first = stop
        return AttentionState(
            state.out.index_copy(0, self.readers, read.out), state.lse.index_copy(0, self.readers, read.lse)
        )


def make_ranking(readers: Sequence[Ranked], positions: Sequence[int], device: torch.device) -> Ranking:
    """Return the ranking of some readers, in the order of the queries, which have positions in their prompts."""
    firsts = list(accumulate((len(each.queries) for each in readers), initial=0))
    slots: list[list[Window]] = [[] for _ in range(max(len(each.set.segments) for each in readers))]
    for each, start, stop in zip(readers, firsts, firsts[1:], strict=False):
        for slot, span in zip(slots, each.set.segments, strict=False):
            slot.append(Window(Span(start, stop), _moved(span, each.offset)))
    queries = [index for each in readers for index in indices(each.queries)]
    return Ranking(
        readers=torch.tensor(queries, device=device),
        passes=make_passes(slots, firsts[-1], device),
        to_zero=-torch.tensor([positions[index] for index in queries], device=device)[:, None],
        ranks=make_ranks(readers, device),
    )


_SCRATCH = "unturned_keys"


@dataclass(frozen=True)
class Decoding:
    """What the query of each row sees: V segments, which it ranks, and texts, the last of them up to itself.

    B is the number of rows, W that of windows, R that of sets of all rows, N the largest number of segments.
    """

    rows: (
        torch.Tensor
    )  # row of each window: those of the segments, of the texts, and of the last text of each row `[W]`
    starts: torch.Tensor  # first key of each window in its row `[W]`
    lengths: torch.Tensor  # keys of each window but the last texts, which grow `[W - B]`
    longest: int  # the largest of the lengths
    padding: torch.Tensor  # tokens of padding of each row `[B]`
    ranks: Ranks  # its readers are the sets
    slots: torch.Tensor  # slot and reader of each segment `[2, V]`
    segments: torch.Tensor  # the segments by slot and reader `[N, R]`; V where a set has fewer
    windows: torch.Tensor  # the windows of each row `[P, B]`; W where it has fewer
    stop: int  # tokens of a row up to the last segment of all: their keys are kept without positions
    last_start: int  # where the first of the last texts starts in its row
    _packed: dict[tuple[int, ...], PackedWindows] = field(default_factory=dict, repr=False)

    def attend(self, kernel: VarlenKernel, call: AttentionCall) -> torch.Tensor:
        """Return one layer's attention `[B, 1, H, D]`."""
        queries, num_keys, ranked = call.queries[:, :, 0], call.keys.shape[2], self.slots.shape[1]
        unturned = call.rotation.unscaled(call.rotation.rotate_by(queries, (self.padding + 1 - num_keys)[:, None]))
        keys = self._unturned_keys(call)
        lse = self._call(kernel, call, unturned[self.rows[:ranked]], keys, keys).lse
        shifts = self.ranks.shifts(in_slots(lse, self.segments, -torch.inf))[self.slots[0], self.slots[1]]
        turned_by = torch.nn.functional.pad(-shifts, (0, 0, 0, len(self.rows) - ranked))
        turned = call.rotation.rotate_by(queries[self.rows], turned_by)
        out, lse = self._call(kernel, call, turned, call.keys, call.values)
        state = merge_stacked(in_slots(out, self.windows), in_slots(lse, self.windows, -torch.inf))
        return merge_sinks(state, call.sinks).out[:, None]

    def _unturned_keys(self, call: AttentionCall) -> torch.Tensor:
        """Return the keys up to the last segment `[B, H_kv, S, D]` without positions; every layer keeps them."""

        def make() -> torch.Tensor:
            positions = torch.arange(self.stop, device=call.keys.device) - self.padding[:, None]
            unturned = call.rotation.rotate_by(call.keys[:, :, : self.stop], -positions[:, None])
            return call.rotation.unscaled(unturned).contiguous()

        keys: torch.Tensor = call.kept(_SCRATCH, make)
        return keys

    def _call(
        self, kernel: VarlenKernel, call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> AttentionState:
        """Attend from queries `[n, H, D]` to the first n windows of `[B, H_kv, S, D]`."""
        windows = self._packed_windows(call, len(queries), keys.shape[2])
        packed = (each.reshape(-1, 1, each.shape[-1]) for each in (queries, keys, values))
        layer = PackedLayer(kernel, call, *packed)
        out, lse = layer.attend(windows, layer.queries)
        return AttentionState(out.reshape(queries.shape), lse.reshape(queries.shape[:2]))

    def _packed_windows(self, call: AttentionCall, count: int, num_keys: int) -> PackedWindows:
        """Return the first windows, with `num_keys` packed keys a row; the layers share those of one token."""
        heads, groups = call.keys.shape[1], call.queries.shape[1] // call.keys.shape[1]
        key = (count, num_keys, heads, groups)
        if key not in self._packed:
            for other in [other for other in self._packed if other[0] == count and other[2:] == key[2:]]:
                del self._packed[other]  # of the token before
            device = self.rows.device
            lengths = torch.cat((self.lengths, num_keys - self.starts[len(self.lengths) :]))[:count]
            sequences = self.rows[:count, None] * heads + torch.arange(heads, device=device)
            first = (sequences * num_keys + self.starts[:count, None]).flatten()
            lengths = lengths.repeat_interleave(heads, output_size=count * heads)
            self._packed[key] = PackedWindows(
                query_starts=torch.arange(0, (count * heads + 1) * groups, groups, device=device, dtype=torch.int32),
                key_starts=torch.cat((first, first[-1:] + lengths[-1:])).int(),
                key_lengths=lengths.int(),
                max_queries=groups,
                max_keys=max(self.longest, num_keys - self.last_start),
                is_causal=False,
            )
        return self._packed[key]


def make_decoding(
    arrangements: Sequence[Arrangement], padding: Sequence[int], num_keys: int, device: torch.device
) -> Decoding | None:
    """Return what one query behind each prompt of a left-padded batch sees; the query is among the `num_keys`.

    None where a query is no token of the last text or behind it, or nothing is ranked.
    """
    last_rows = [each.rows[-1] for each in arrangements]
    if any(num_keys - by <= row.queries.start for row, by in zip(last_rows, padding, strict=True)):
        return None
    numbered = list(enumerate(zip(last_rows, padding, strict=True)))
    readers = [Ranked(Span(number, number + 1), each, by) for number, (row, by) in numbered for each in row.ranked]
    if not readers or any(run.shift or run.weighting != UNWEIGHTED for row in last_rows for run in row.runs):
        return None
    # Of each window its row, and its keys in that row.
    ranked = [(each.queries.start, _moved(span, each.offset)) for each in readers for span in each.set.segments]
    slots = [(slot, number) for number, each in enumerate(readers) for slot in range(len(each.set.segments))]
    texts = [(number, _moved(Span(run.start, run.stop), by)) for number, (row, by) in numbered for run in row.runs[:-1]]
    last = [row.runs[-1].start + by for _, (row, by) in numbered]
    fixed = [*ranked, *texts]
    rows = [*(row for row, _ in fixed), *range(len(last))]
    lengths = [len(span) for _, span in fixed]
    return Decoding(
        rows=torch.tensor(rows, device=device),
        starts=torch.tensor([*(span.start for _, span in fixed), *last], device=device),
        lengths=torch.tensor(lengths, device=device),
        longest=max(lengths),
        padding=torch.tensor(padding, device=device),
        ranks=make_ranks(readers, device),
        slots=torch.tensor(slots, device=device).T,
        segments=_table([number for _, number in slots], len(readers), device),
        windows=_table(rows, len(last_rows), device),
        stop=max(span.stop for _, span in ranked),
        last_start=min(last),
    )


def _moved(span: Span, by: int) -> Span:
    return Span(span.start + by, span.stop + by)


def _table(owners: Sequence[int], count: int, device: torch.device) -> torch.Tensor:
    """Return which indices belong to each of `count` owners `[P, count]`; behind its last, the number of all."""
    members: list[list[int]] = [[] for _ in range(count)]
    for index, owner in enumerate(owners):
        members[owner].append(index)
    longest = max(map(len, members))
    return torch.tensor([[*some, *[len(owners)] * (longest - len(some))] for some in members], device=device).T
