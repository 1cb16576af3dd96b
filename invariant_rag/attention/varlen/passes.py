"""One call of a kernel: packed queries, how they are turned and weighed, and where their results go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from invariant_rag.arrangement import Span, Weighting
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.merge_states import AttentionState, merge_attn_states, merge_stacked
from invariant_rag.attention.varlen.kernels import PackedWindows, VarlenKernel, attend_windows
from invariant_rag.attention.varlen.windows import Window

_MOST_COPIES, _MOST_QUERIES = 4, 1 << 16
"""A call packs as many copies of all queries, or as many queries if that is more, so that memory stays linear."""


def shifts_of(shifts: Sequence[int], device: torch.device) -> torch.Tensor | None:
    """Return the shifts of packed tokens, in positions `[T, 1]`; None where all of them are 0."""
    return torch.tensor(shifts, device=device)[:, None] if any(shifts) else None


@dataclass(frozen=True)
class Weights:
    """How the results of packed queries are weighed.

    Attributes:
        temperatures: `[T, 1, 1]`.
        factors: `[T, 1]`.
        offsets: `[T, 1]`.
    """

    temperatures: torch.Tensor
    factors: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, windows: Sequence[Window], device: torch.device) -> Weights | None:
        """Return the weights of the queries of some windows; None where nothing is weighed."""
        weightings = [window.weighting for window in windows for _ in range(len(window.queries))]
        if set(weightings) <= {Weighting()}:
            return None

        def column(name: str) -> torch.Tensor:
            return torch.tensor([getattr(each, name) for each in weightings], device=device)[:, None]

        return cls(column("temperature")[..., None], column("factor"), column("offset"))


def attend_packed(
    kernel: VarlenKernel,
    packed: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    windows: PackedWindows,
    scaling: float,
    weights: Weights | None,
) -> AttentionState:
    """Call a kernel, and weigh what it gives."""
    if weights is None:
        return attend_windows(kernel, packed, keys, values, windows, scaling)
    sharpened = (packed / weights.temperatures).to(packed.dtype)
    out, lse = attend_windows(kernel, sharpened, keys, values, windows, scaling)
    return AttentionState(out, lse * weights.factors + weights.offsets)


@dataclass(frozen=True)
class Pass:
    """One call for windows in slots. T is the number of packed queries, M that of slots, and Q that of all queries.

    Attributes:
        windows: What each packed query sees.
        queries: Which queries are packed `[T]`.
        slot_of: The slot of each packed query, among all slots `[T]`.
        shifts: How they are rotated `[T, 1]`; None: not at all.
        weights: How their results are weighed; None: as they are.
        slots: Where the result of each query stands among those packed, or behind them if it has none `[M, Q]`.
    """

    windows: PackedWindows
    queries: torch.Tensor
    slot_of: torch.Tensor
    shifts: torch.Tensor | None
    weights: Weights | None
    slots: torch.Tensor

    def attend(
        self, kernel: VarlenKernel, call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> AttentionState:
        """Return what each query gets from all of its windows."""
        packed = queries[self.queries]
        if self.shifts is not None:
            packed = call.rotation.rotate_by(packed, self.shifts)
        out, lse = attend_packed(kernel, packed, keys, values, self.windows, call.scaling, self.weights)
        return merge_stacked(in_slots(out, self.slots), in_slots(lse, self.slots, -torch.inf))


def in_slots(packed: torch.Tensor, slots: torch.Tensor, missing: float = 0.0) -> torch.Tensor:
    """Return packed results by slot `[M, Q, H, ...]`, with a number where a query has none.

    Args:
        packed: The results `[T, H, ...]`.
        slots: Which of them stands where `[M, Q]`; T where there is none.
        missing: What stands there instead.
    """
    return torch.cat((packed, torch.full_like(packed[:1], missing)))[slots]


def merge_sinks(state: AttentionState, sinks: torch.Tensor | None) -> AttentionState:
    """Let extra logits `[H]` that have no value take part in the softmax; None: there are none."""
    if sinks is None:
        return state
    none = AttentionState(torch.zeros_like(state.out), sinks.to(state.lse).expand_as(state.lse))
    return merge_attn_states((state, none))


def make_passes(slots: Sequence[Sequence[Window]], num_queries: int, device: torch.device) -> tuple[Pass, ...]:
    """Return the calls for windows in slots, as many slots a call as hold a few copies of all queries."""
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
    queries = [[index for window in slot for index in _indices(window.queries)] for slot in slots]
    counts = torch.tensor(list(map(len, queries)))
    packed = torch.tensor(list(chain.from_iterable(queries)))
    places = torch.full((len(slots), num_queries), len(packed))
    slot_of = torch.arange(len(slots)).repeat_interleave(counts)
    places[slot_of, packed] = torch.arange(len(packed))
    return Pass(
        PackedWindows.of([len(window.queries) for window in windows], [w.keys for w in windows], False, device),
        packed.to(device),
        (slot_of + start).to(device),
        shifts_of([-window.shift for window in windows for _ in _indices(window.queries)], device),
        Weights.of(windows, device),
        places.to(device),
    )


def _indices(span: Span) -> range:
    return range(span.start, span.stop)
