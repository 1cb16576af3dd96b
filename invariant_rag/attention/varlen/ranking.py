"""PINE for a batch: one kernel call ranks every segment for every query, and one attends to them at these ranks.

The importance of segment j to a token t is the mean weight of its keys, without rotary positions (arXiv 2407.01100,
section 3.3). With the log-sum-exp `L[t, j]` over the keys of j, it is `exp(L[t, j] - logsumexp_k L[t, k]) / len(j)`.
Then each query attends to each segment, rotated by the opposite of the shift that its head assigns to the segment.

During decoding, every key head of a row is packed as one sequence, whose queries are the query heads that share it: the
KV cache is used as it is, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, compress
from typing import TYPE_CHECKING

import torch

from invariant_rag.arrangement import UNWEIGHTED, Arrangement, Span
from invariant_rag.attention.pine import stack_by_importance
from invariant_rag.attention.softmax import AttentionState, merge_attn_states
from invariant_rag.attention.varlen.kernels import PackedLayer, PackedWindows, VarlenKernel
from invariant_rag.attention.varlen.packing import (
    Ranked,
    Window,
    gather_slots,
    in_blocks,
    make_passes,
    merge_sinks,
    merge_slots,
)

if TYPE_CHECKING:
    from invariant_rag.attention.base import AttentionCall
    from invariant_rag.attention.varlen.packing import Pass


@dataclass(frozen=True)
class Ranks:
    """Tables for ranking segments. N is the largest number of segments of a set, R the number of queries that rank."""

    lengths: torch.Tensor  # tokens of each segment `[N, R, 1]`; 0 where a set has fewer
    prompt_starts: torch.Tensor  # index of each segment's first token in its prompt `[N, R, 1]`
    is_own: torch.Tensor  # where a query is a token of the segment itself `[N, R, 1]`
    starts: torch.Tensor  # `RankedSet.first_position` of each query's set `[R, 1]`
    members: torch.Tensor  # queries inside a segment of their set `[M]`: all of a segment share one ranking
    counts: torch.Tensor  # tokens of these segments `[G]`
    groups: torch.Tensor  # the segment of each member `[M]`
    signs: torch.Tensor  # -1 where the most important segment is placed farthest, else 1 `[R, 1]`

    def shifts(self, lses: torch.Tensor) -> torch.Tensor:
        """Return by how much each query shifts each segment `[N, R, H]`, from log-sum-exps without positions.

        These are over the keys of each segment `[N, R, H]`, and minus infinity where a set has fewer segments.
        """
        others = lses.masked_fill(self.is_own, -torch.inf)
        importance = (others - others.logsumexp(dim=0)).exp().nan_to_num(0.0) / self.lengths.clamp(min=1)
        if len(self.members):
            tokens = importance[:, self.members].transpose(0, 1)
            segments = torch.segment_reduce(tokens.contiguous(), "sum", lengths=self.counts, axis=0, unsafe=True)
            importance[:, self.members] = segments[self.groups].transpose(0, 1)
        rank = (self.signs * importance).masked_fill(self.is_own, torch.inf)
        return stack_by_importance(rank, self.lengths, 0) + self.starts - self.prompt_starts


def make_ranks(ranked_sets: Sequence[Ranked], device: torch.device) -> Ranks:
    """Build the tables for sets and the queries that rank them, in the order of the queries."""
    slots = max(len(each.set.segments) for each in ranked_sets)
    counts = [len(each.queries) for each in ranked_sets]

    def per_query(numbers: Sequence[Sequence[float]]) -> torch.Tensor:
        """Repeat numbers of each ranked set for its queries `[R, n]`."""
        return torch.tensor(numbers).repeat_interleave(torch.tensor(counts), dim=0).to(device)

    def per_slot(numbers: Sequence[Sequence[int]]) -> torch.Tensor:
        """Repeat numbers of the segments of each ranked set for its queries `[N, R, 1]`."""
        return per_query([[*some, *[False] * (slots - len(some))] for some in numbers]).T[..., None]

    pooled = [each.set.own is not None for each in ranked_sets]
    grouped = [group for group, count in enumerate(compress(counts, pooled)) for _ in range(count)]
    return Ranks(
        lengths=per_slot([list(map(len, each.set.segments)) for each in ranked_sets]),
        prompt_starts=per_slot([[span.start for span in each.set.segments] for each in ranked_sets]),
        is_own=per_slot([[slot == each.set.own for slot in range(slots)] for each in ranked_sets]),
        starts=per_query([[each.set.first_position] for each in ranked_sets]),
        members=per_query([[each] for each in pooled])[:, 0].nonzero()[:, 0],
        counts=torch.tensor(list(compress(counts, pooled)), device=device),
        groups=torch.tensor(grouped, device=device),
        signs=per_query([[-1.0 if each.set.reverse else 1.0] for each in ranked_sets]),
    )


@dataclass(frozen=True)
class Ranking:
    """Queries of a batch, and the segments that each of them ranks."""

    queries: torch.Tensor  # indices of the queries that rank `[R]`
    passes: tuple[Pass, ...]  # calls in which they attend to all segments of their set, each in one of N slots
    to_zero: torch.Tensor  # their shifts to position 0 `[R, 1]`
    ranks: Ranks

    def attend(self, layer: PackedLayer, unrotated_keys: torch.Tensor, state: AttentionState) -> AttentionState:
        """Return the state of all queries, with attention to their ranked segments merged into it."""
        rotation, queries = layer.call.rotation, layer.queries[self.queries]
        unrotated = rotation.unscaled(rotation.rotate_by(queries, self.to_zero))
        lses = [
            gather_slots(
                layer.attend(each.windows, unrotated[each.queries], unrotated_keys).lse, each.slots, -torch.inf
            )
            for each in self.passes
        ]
        shifts = self.ranks.shifts(torch.cat(lses))
        rotate = partial(rotation.rotate_each, reach=layer.call.reach)
        merged = AttentionState(state.out[self.queries], state.lse[self.queries])
        first = 0
        for each in self.passes:
            rotated_by = -shifts[each.slot_of, each.queries]
            out, lse = layer.attend(each.windows, in_blocks(rotate, queries[each.queries], rotated_by))
            stop = first + each.slots.shape[0]
            lse = gather_slots(lse, each.slots, -torch.inf).masked_fill(self.ranks.is_own[first:stop], -torch.inf)
            merged = merge_attn_states((merged, merge_slots(out, lse, each.slots)))
            first = stop
        return AttentionState(
            state.out.index_copy(0, self.queries, merged.out), state.lse.index_copy(0, self.queries, merged.lse)
        )


def make_ranking(ranked_sets: Sequence[Ranked], positions: Sequence[int], device: torch.device) -> Ranking:
    """Build the ranking of sets by queries, which have these positions in their prompts."""
    firsts = list(accumulate((len(each.queries) for each in ranked_sets), initial=0))
    slots: list[list[Window]] = [[] for _ in range(max(len(each.set.segments) for each in ranked_sets))]
    for each, start, stop in zip(ranked_sets, firsts, firsts[1:], strict=False):
        for slot, span in zip(slots, each.set.segments, strict=False):
            slot.append(Window(Span(start, stop), _moved(span, each.offset)))
    queries = [index for each in ranked_sets for index in range(each.queries.start, each.queries.stop)]
    return Ranking(
        queries=torch.tensor(queries, device=device),
        passes=make_passes(slots, firsts[-1], device),
        to_zero=-torch.tensor([positions[index] for index in queries], device=device)[:, None],
        ranks=make_ranks(ranked_sets, device),
    )


@dataclass(frozen=True)
class RankedDecoding:
    """One decoding step of a batch: the query of each row ranks V segments, and attends to them and to all texts.

    B is the number of rows, W that of windows, R that of sets of all rows, N the largest number of segments.
    """

    rows: torch.Tensor  # row of each window, of segments, texts, then the last text of each row `[W]`
    starts: torch.Tensor  # first key of each window in its row `[W]`
    lengths: torch.Tensor  # keys of each window but the last texts, which grow `[W - B]`
    longest: int  # the largest of the lengths
    padding: torch.Tensor  # tokens of padding of each row `[B]`
    ranks: Ranks  # of the sets: one query each
    slots: torch.Tensor  # slot and set of each segment `[2, V]`
    segments: torch.Tensor  # the segments by slot and set `[N, R]`; V where a set has fewer
    windows: torch.Tensor  # the windows of each row `[P, B]`; W where it has fewer
    stop: int  # tokens of a row up to the last segment: their keys are stored without positions
    last_start: int  # where the first of the last texts starts in its row
    _packed: dict[tuple[int, ...], PackedWindows] = field(default_factory=dict, repr=False)

    def attend(self, kernel: VarlenKernel, call: AttentionCall) -> torch.Tensor:
        """Return one layer's attention `[B, 1, H, D]`."""
        queries, num_keys, ranked = call.queries[:, :, 0], call.keys.shape[2], self.slots.shape[1]
        unrotated = call.rotation.unscaled(call.rotation.rotate_by(queries, (self.padding + 1 - num_keys)[:, None]))
        keys = self._unrotated_keys(call)
        lse = self._call(kernel, call, unrotated[self.rows[:ranked]], keys, keys).lse
        shifts = self.ranks.shifts(gather_slots(lse, self.segments, -torch.inf))[self.slots[0], self.slots[1]]
        rotated_by = torch.nn.functional.pad(-shifts, (0, 0, 0, len(self.rows) - ranked))
        rotated = call.rotation.rotate_by(queries[self.rows], rotated_by)
        out, lse = self._call(kernel, call, rotated, call.keys, call.values)
        state = merge_slots(out, gather_slots(lse, self.windows, -torch.inf), self.windows)
        return merge_sinks(state, call.sinks).out[:, None]

    def _unrotated_keys(self, call: AttentionCall) -> torch.Tensor:
        """Return the keys up to the last segment `[B, H_kv, S, D]` without positions, computed once per layer."""

        def make() -> torch.Tensor:
            positions = torch.arange(self.stop, device=call.keys.device) - self.padding[:, None]
            unrotated = call.rotation.rotate_by(call.keys[:, :, : self.stop], -positions[:, None])
            return call.rotation.unscaled(unrotated).contiguous()

        keys: torch.Tensor = call.cached("unrotated_keys", make)
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


def make_ranked_decoding(
    arrangements: Sequence[Arrangement], padding: Sequence[int], num_keys: int, device: torch.device
) -> RankedDecoding | None:
    """Build the decoding step of a left-padded batch whose rows have `num_keys` tokens, the query included.

    None if a query is inside a prompt before its last text, or if nothing is ranked.
    """
    last_rows = [each.rows[-1] for each in arrangements]
    if any(num_keys - by <= row.queries.start for row, by in zip(last_rows, padding, strict=True)):
        return None
    numbered = list(enumerate(zip(last_rows, padding, strict=True)))
    ranked_sets = [Ranked(Span(number, number + 1), each, by) for number, (row, by) in numbered for each in row.ranked]
    if not ranked_sets or any(run.shift or run.weighting != UNWEIGHTED for row in last_rows for run in row.runs):
        return None
    # Of each window its row, and its keys in that row.
    ranked = [(each.queries.start, _moved(span, each.offset)) for each in ranked_sets for span in each.set.segments]
    slots = [(slot, number) for number, each in enumerate(ranked_sets) for slot in range(len(each.set.segments))]
    texts = [(number, _moved(Span(run.start, run.stop), by)) for number, (row, by) in numbered for run in row.runs[:-1]]
    last = [row.runs[-1].start + by for _, (row, by) in numbered]
    fixed = [*ranked, *texts]
    rows = [*(row for row, _ in fixed), *range(len(last))]
    lengths = [len(span) for _, span in fixed]
    return RankedDecoding(
        rows=torch.tensor(rows, device=device),
        starts=torch.tensor([*(span.start for _, span in fixed), *last], device=device),
        lengths=torch.tensor(lengths, device=device),
        longest=max(lengths),
        padding=torch.tensor(padding, device=device),
        ranks=make_ranks(ranked_sets, device),
        slots=torch.tensor(slots, device=device).T,
        segments=_table([number for _, number in slots], len(ranked_sets), device),
        windows=_table(rows, len(last_rows), device),
        stop=max(span.stop for _, span in ranked),
        last_start=min(last),
    )


def _moved(span: Span, by: int) -> Span:
    return Span(span.start + by, span.stop + by)


def _table(owners: Sequence[int], count: int, device: torch.device) -> torch.Tensor:
    """Return the indices of each of `count` owners `[P, count]`, padded with the number of all indices."""
    members: list[list[int]] = [[] for _ in range(count)]
    for index, owner in enumerate(owners):
        members[owner].append(index)
    longest = max(map(len, members))
    return torch.tensor([[*some, *[len(owners)] * (longest - len(some))] for some in members], device=device).T
