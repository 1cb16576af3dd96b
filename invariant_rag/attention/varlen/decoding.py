"""PINE while it decodes: one query for each row, in two calls per layer, whatever the prompts of the batch.

Every key head of a row is packed as a sequence of its own, and the query heads that share it are its queries. So a
cache is packed as it lies in memory, and nothing of it is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from invariant_rag.arrangement import UNWEIGHTED, Arrangement, Span
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.merge_states import merge_stacked
from invariant_rag.attention.varlen.kernels import Attended, PackedWindows, VarlenKernel, attend_windows
from invariant_rag.attention.varlen.passes import in_slots, merge_sinks
from invariant_rag.attention.varlen.ranks import Ranks, make_ranks
from invariant_rag.attention.varlen.windows import Ranked

_SCRATCH = "unturned_keys"


@dataclass(frozen=True)
class Decoding:
    """What the query of each row sees: V segments, which it ranks, and texts, the last of them up to itself.

    B is the number of rows, W that of windows, R that of sets of all rows, N the largest number of segments.

    Attributes:
        rows: Row of each window: first those of the segments, then those of the texts, the last of each row last `[W]`.
        starts: First key of each window in its row `[W]`.
        lengths: Keys of each window but the last texts, which grow `[W - B]`.
        longest: The largest of the lengths.
        padding: Tokens of padding of each row `[B]`.
        ranks: What follows from log-sum-exps; its readers are the sets.
        slots: Slot and reader of each segment `[2, V]`.
        segments: The segments by slot and reader `[N, R]`; V where a set has fewer.
        windows: The windows of each row `[P, B]`; W where it has fewer.
        stop: Tokens of a row up to the last segment of all: their keys are kept without positions.
        last_start: Where the first of the last texts starts in its row.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    longest: int
    padding: torch.Tensor
    ranks: Ranks
    slots: torch.Tensor
    segments: torch.Tensor
    windows: torch.Tensor
    stop: int
    last_start: int
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
        state = Attended(*merge_stacked(in_slots(out, self.windows), in_slots(lse, self.windows, -torch.inf)))
        return merge_sinks(state, call.sinks).out[:, None]

    def _unturned_keys(self, call: AttentionCall) -> torch.Tensor:
        """Return the keys up to the last segment `[B, H_kv, S, D]` without positions; every layer keeps them."""
        if _SCRATCH not in call.scratch:
            positions = torch.arange(self.stop, device=call.keys.device) - self.padding[:, None]
            unturned = call.rotation.rotate_by(call.keys[:, :, : self.stop], -positions[:, None])
            call.scratch[_SCRATCH] = call.rotation.unscaled(unturned).contiguous()
        keys: torch.Tensor = call.scratch[_SCRATCH]
        return keys

    def _call(
        self, kernel: VarlenKernel, call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> Attended:
        """Attend from queries `[n, H, D]` to the first n windows of `[B, H_kv, S, D]`."""
        windows = self._packed_windows(call, len(queries), keys.shape[2])
        packed, seen, read = (each.reshape(-1, 1, each.shape[-1]) for each in (queries, keys, values))
        out, lse = attend_windows(kernel, packed, seen, read, windows, call.scaling)
        return Attended(out.reshape(queries.shape), lse.reshape(queries.shape[:2]))

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
    """Return what one query behind each prompt of a left-padded batch sees.

    Args:
        arrangements: The prompts. All rank segments in the same direction.
        padding: Tokens of padding of each row.
        num_keys: Keys of each row, that of the query among them.
        device: Where the tables are to be.

    Returns:
        The windows; None where a query is no token of the last text or behind it, or nothing is ranked.
    """
    last_rows = [each.rows[-1] for each in arrangements]
    if any(num_keys - by <= row.queries.start for row, by in zip(last_rows, padding, strict=True)):
        return None
    readers = [
        Ranked(Span(number, number + 1), each, padded)
        for number, (row, padded) in enumerate(zip(last_rows, padding, strict=True))
        for each in row.ranked
    ]
    if not readers or any(run.shift or run.weighting != UNWEIGHTED for row in last_rows for run in row.runs):
        return None
    # Of each window its row, and its keys in that row.
    ranked = [(each.queries.start, _moved(span, each.offset)) for each in readers for span in each.set.segments]
    slots = [(slot, number) for number, each in enumerate(readers) for slot in range(len(each.set.segments))]
    texts = [
        (number, _moved(Span(run.start, run.stop), padded))
        for number, (row, padded) in enumerate(zip(last_rows, padding, strict=True))
        for run in row.runs[:-1]
    ]
    last = [(number, row.runs[-1].start + padding[number]) for number, row in enumerate(last_rows)]
    fixed = [*ranked, *texts]
    rows = [row for row, _ in [*fixed, *last]]
    lengths = [len(span) for _, span in fixed]
    return Decoding(
        rows=torch.tensor(rows, device=device),
        starts=torch.tensor([*(span.start for _, span in fixed), *(start for _, start in last)], device=device),
        lengths=torch.tensor(lengths, device=device),
        longest=max(lengths),
        padding=torch.tensor(padding, device=device),
        ranks=make_ranks(readers, device),
        slots=torch.tensor(slots, device=device).T,
        segments=_table([number for _, number in slots], len(readers), device),
        windows=_table(rows, len(last_rows), device),
        stop=max(span.stop for _, span in ranked),
        last_start=min(start for _, start in last),
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
