"""Rows of a batch as windows of neighbouring keys, and the calls of a kernel that attend to them.

Variable-length kernels take packed queries and keys, and for each stretch of queries one window of the keys. A row of
an arrangement is a few such windows: one that ends with its own tokens, which is causal, and one for every other run of
keys, for which the queries are rotated instead of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TypeVar

import torch

from invariant_rag.arrangement import UNWEIGHTED, Arrangement, RankedSet, Span, Weighting
from invariant_rag.attention.softmax import AttentionState, merge_attn_states, merge_stacked
from invariant_rag.attention.varlen.kernels import PackedLayer, PackedWindows

_MOST_COPIES, _MOST_QUERIES = 4, 1 << 16
"""A call packs as many copies of all queries, or as many queries if that is more, so that memory stays linear."""
_BLOCK = 1 << 13  # packed queries that are rotated or merged at once

_Item = TypeVar("_Item")


# --- windows: plain integers, no tensors ---


@dataclass(frozen=True)
class Window:
    """Neighbouring queries, and neighbouring keys that they attend to: their shift, and how they weigh."""

    queries: Span
    keys: Span
    shift: int = 0
    weighting: Weighting = UNWEIGHTED


@dataclass(frozen=True)
class Ranked:
    """Neighbouring queries of a batch that rank the segments of one set."""

    queries: Span
    set: RankedSet  # as tokens of its prompt
    offset: int  # index of the first token of the prompt among the keys of the batch


@dataclass(frozen=True)
class Windows:
    """All that the queries of a batch attend to. A *slot* is an ordered list of windows that share no query."""

    causal: list[Window]  # windows that end with their own queries, and cover all queries, in order
    others: list[list[Window]]
    ranked: list[list[Ranked]]  # the first, second... set that a query ranks


def lay_windows(
    arrangements: Sequence[Arrangement], padding: Sequence[int], num_queries: int, num_keys: int
) -> Windows:
    """Return the windows of a left-padded batch, whose queries `[B, num_queries]` are the last of its tokens.

    Padding, so many tokens of each row, attends to itself, so that every query has a key.
    """
    causal: list[Window] = []
    others: list[list[Window]] = []
    ranked: list[list[Ranked]] = []
    unasked = num_keys - num_queries  # tokens of each row, padding among them, that have no query
    for number, (arrangement, padded) in enumerate(zip(arrangements, padding, strict=True)):
        key, query = number * num_keys + padded, number * num_queries + padded - unasked
        if padded > unasked:
            causal.append(Window(Span(number * num_queries, query), Span(key - padded + unasked, key)))
        for row in arrangement.rows_from(max(0, unasked - padded), num_keys - padded):
            queries = Span(row.queries.start + query, row.queries.stop + query)
            *before, own = [
                Window(queries, Span(run.start + key, run.stop + key), run.shift, run.weighting) for run in row.runs
            ]
            causal.append(own)
            _add_to_slots(others, before)
            _add_to_slots(ranked, [Ranked(queries, each, key) for each in row.ranked])
    return Windows(causal, others, ranked)


def _add_to_slots(slots: list[list[_Item]], items: Sequence[_Item]) -> None:
    """Add the first item to the first slot, the second to the second..."""
    slots += [[] for _ in items[len(slots) :]]
    for slot, item in zip(slots, items, strict=False):
        slot.append(item)


# --- calls ---


@dataclass(frozen=True)
class Weights:
    """How the results of packed queries are weighed: temperatures `[T, 1, 1]`, factors and offsets `[T, 1]`."""

    temperatures: torch.Tensor
    factors: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, windows: Sequence[Window], device: torch.device) -> Weights | None:
        """Return the weights of the queries of some windows; None where nothing is weighed."""
        if all(window.weighting == UNWEIGHTED for window in windows):
            return None
        weightings = [(each.weighting.temperature, each.weighting.factor, each.weighting.offset) for each in windows]
        temperatures, factors, offsets = (per_query(windows, each, device) for each in zip(*weightings, strict=True))
        return cls(temperatures[..., None], factors, offsets)


def per_query(windows: Sequence[Window], values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Repeat a value of each window for its queries `[T, 1]`."""
    repeated = (repeat(value, len(window.queries)) for window, value in zip(windows, values, strict=True))
    return torch.tensor(list(chain.from_iterable(repeated)), device=device)[:, None]


def attend_packed(
    layer: PackedLayer, windows: PackedWindows, queries: torch.Tensor, weights: Weights | None
) -> AttentionState:
    """Attend from packed queries to their windows, with the temperatures, factors and offsets of weighted runs."""
    if weights is None:
        return layer.attend(windows, queries)
    out, lse = layer.attend(windows, (queries / weights.temperatures).to(queries.dtype))
    return AttentionState(out, lse * weights.factors + weights.offsets)


@dataclass(frozen=True)
class Pass:
    """One call for windows in slots. T is the number of packed queries, M that of slots, and Q that of all queries."""

    windows: PackedWindows  # what each packed query attends to
    queries: torch.Tensor  # which queries are packed `[T]`
    slot_of: torch.Tensor  # the slot of each packed query, among all slots `[T]`
    shifts: torch.Tensor | None  # how they are rotated `[T, 1]`
    weights: Weights | None  # how their results are weighed
    slots: torch.Tensor  # row of each query in the packed output; T if it has none `[M, Q]`

    def attend(self, layer: PackedLayer) -> AttentionState:
        """Return the attention of each query to all of its windows."""
        packed = layer.queries[self.queries]
        if self.shifts is not None:
            packed = in_blocks(layer.call.rotation.rotate_by, packed, self.shifts)
        out, lse = attend_packed(layer, self.windows, packed, self.weights)
        return merge_slots(out, gather_slots(lse, self.slots, -torch.inf), self.slots)


def in_blocks(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Apply a function to blocks of packed queries, since it computes in a wider dtype than theirs."""
    blocks = zip(*(each.split(_BLOCK) for each in tensors), strict=True)
    results = [function(*block).to(tensors[0].dtype) for block in blocks]
    return results[0] if len(results) == 1 else torch.cat(results)


def merge_slots(packed: torch.Tensor, lses: torch.Tensor, slots: torch.Tensor) -> AttentionState:
    """Merge the packed outputs of each query, with the log-sum-exps of its slots `[M, Q, H]`, in blocks of queries."""
    padded, size = torch.cat((packed, torch.zeros_like(packed[:1]))), max(1, _BLOCK // len(slots))
    blocks = zip(slots.split(size, dim=1), lses.split(size, dim=1), strict=True)
    merged = [merge_stacked(padded[block], lse) for block, lse in blocks]
    return merged[0] if len(merged) == 1 else AttentionState(*map(torch.cat, zip(*merged, strict=True)))


def gather_slots(packed: torch.Tensor, slots: torch.Tensor, missing: float) -> torch.Tensor:
    """Unpack results `[T, H]` to `[M, Q, H]`, one per slot and query; `missing` where a query has none."""
    return torch.cat((packed, torch.full_like(packed[:1], missing)))[slots]


def merge_sinks(state: AttentionState, sinks: torch.Tensor | None) -> AttentionState:
    """Let extra logits `[H]` that have no value take part in the softmax; None: there are none."""
    if sinks is None:
        return state
    none = AttentionState(torch.zeros_like(state.out), sinks.to(state.lse).expand_as(state.lse))
    return merge_attn_states((state, none))


def make_passes(slots: Sequence[Sequence[Window]], num_queries: int, device: torch.device) -> tuple[Pass, ...]:
    """Group slots into kernel calls, each with at most a few copies of all queries."""
    counts = [sum(len(window.queries) for window in slot) for slot in slots]
    most = max(_MOST_COPIES * num_queries, _MOST_QUERIES)
    starts = [0] if slots else []
    for number in range(1, len(slots)):
        if sum(counts[starts[-1] : number + 1]) > most:
            starts.append(number)
    chunks = zip(starts, [*starts[1:], len(slots)], strict=False)
    return tuple(_make_pass(slots[start:stop], start, num_queries, device) for start, stop in chunks)


def _make_pass(slots: Sequence[Sequence[Window]], start: int, num_queries: int, device: torch.device) -> Pass:
    windows = [window for slot in slots for window in slot]
    lengths = [len(window.queries) for window in windows]
    packed, slot_of, table = list[int](), list[int](), [[sum(lengths)] * num_queries for _ in slots]
    for number, (row, slot) in enumerate(zip(table, slots, strict=True), start):
        for window in slot:
            first, stop = window.queries.start, window.queries.stop
            row[first:stop] = range(len(packed), len(packed) + stop - first)
            packed += range(first, stop)
            slot_of += [number] * (stop - first)
    is_shifted = any(window.shift for window in windows)
    return Pass(
        PackedWindows.of(lengths, [window.keys for window in windows], False, device),
        torch.tensor(packed, device=device),
        torch.tensor(slot_of, device=device),
        per_query(windows, [-window.shift for window in windows], device) if is_shifted else None,
        Weights.of(windows, device),
        torch.tensor(table, device=device),
    )
