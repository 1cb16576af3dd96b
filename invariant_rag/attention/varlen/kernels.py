"""Kernels for packed queries with a window of the keys each. All compute the same function, up to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple, Protocol

import torch

from invariant_rag.arrangement import Span
from invariant_rag.attention.fused import attention_with_lse
from invariant_rag.attention.merge_states import AttentionState, merge_attn_states

MOST_WINDOWS = 65_535
"""Windows of one call: CUDA starts no more blocks along the axis on which FlashAttention 2 and its like have them."""


@dataclass(frozen=True, eq=False)
class PackedWindows:
    """Windows of packed queries, as kernels take them.

    Attributes:
        query_starts: int32 `[W + 1]`: the first query of each window, and the end of the last. The windows cover all
            queries, in order.
        key_starts: int32 `[W + 1]`: the first key of each window, and the end of the last. Windows may overlap.
        key_lengths: int32 `[W]`, no window empty.
        max_queries: Queries of the longest window.
        max_keys: Keys of the longest window.
        is_causal: Whether the last query of a window sees all of its keys, the one before all but the last, and so on.
    """

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    key_lengths: torch.Tensor
    max_queries: int
    max_keys: int
    is_causal: bool

    @classmethod
    def of(cls, lengths: Sequence[int], keys: Sequence[Span], is_causal: bool, device: torch.device) -> PackedWindows:
        """Return windows with their tables on a device.

        Args:
            lengths: Queries of each window.
            keys: Keys of each window.
            is_causal: Whether the windows are causal.
            device: Where the tables are to be.
        """

        def table(numbers: Sequence[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        return cls(
            table(list(accumulate(lengths, initial=0))),
            table([*(span.start for span in keys), keys[-1].stop]),
            table([len(span) for span in keys]),
            max(lengths),
            max(map(len, keys)),
            is_causal,
        )

    @cached_property
    def parts(self) -> list[tuple[Span, PackedWindows]]:
        """At most `MOST_WINDOWS` windows each, with their queries, counted from 0. The device is waited for."""
        count = len(self.key_lengths)
        firsts = [*range(0, count, MOST_WINDOWS), count]
        stops = self.query_starts[firsts].tolist()
        return [
            (
                Span(start, stop),
                replace(
                    self,
                    query_starts=self.query_starts[first : last + 1] - start,
                    key_starts=self.key_starts[first : last + 1],
                    key_lengths=self.key_lengths[first:last],
                ),
            )
            for (start, stop), (first, last) in zip(pairwise(stops), pairwise(firsts), strict=True)
        ]

    @cached_property
    def spans(self) -> list[tuple[Span, Span]]:
        """Queries and keys of each window, for kernels that are called window by window. The device is waited for."""
        queries = self.query_starts.tolist()
        keys = zip(self.key_starts.tolist(), self.key_lengths.tolist(), strict=False)
        return [
            (Span(first, stop), Span(start, start + length))
            for first, stop, (start, length) in zip(queries, queries[1:], keys, strict=False)
        ]


class Attended(NamedTuple):
    """What packed queries get.

    Attributes:
        out: `[T, H, D]`, in the dtype of the queries.
        lse: Log-sum-exps of the scaled scores `[T, H]`, at least in float32.
    """

    out: torch.Tensor
    lse: torch.Tensor


class VarlenKernel(Protocol):
    """A way to compute attention of packed queries to windows of packed keys."""

    name: ClassVar[str]

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, windows: PackedWindows, scaling: float
    ) -> Attended:
        """Attend.

        Args:
            queries: `[T, H, D]`.
            keys: `[S, H_kv, D]`; the query heads share them in groups.
            values: `[S, H_kv, D]`.
            windows: What each query sees.
            scaling: Factor on the scores.
        """
        ...


def attend_windows(
    kernel: VarlenKernel,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    windows: PackedWindows,
    scaling: float,
) -> Attended:
    """Call a kernel as often as it takes; see `VarlenKernel` for the arguments."""
    if len(windows.key_lengths) <= MOST_WINDOWS:
        return kernel(queries, keys, values, windows, scaling)
    parts = [kernel(queries[span.start : span.stop], keys, values, part, scaling) for span, part in windows.parts]
    return Attended(*(torch.cat(each) for each in zip(*parts, strict=True)))


class Dense:
    """Matrix products over all keys, and a mask, in float32 or wider: the specification of the others.

    The number of its operations does not depend on the windows; its memory grows with queries times keys.
    """

    name: ClassVar[str] = "dense"

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, windows: PackedWindows, scaling: float
    ) -> Attended:
        """Attend; see `VarlenKernel`."""
        wide = torch.promote_types(queries.dtype, torch.float32)
        groups, count = queries.shape[1] // keys.shape[1], queries.shape[0]
        packed = queries.to(wide).unflatten(1, (keys.shape[1], groups))
        scores = torch.einsum("thgd,shd->thgs", packed, keys.to(wide)) * scaling
        repeats = windows.query_starts.diff()
        window = torch.repeat_interleave(repeats, output_size=count)
        place = torch.arange(keys.shape[0], device=keys.device)
        first = windows.key_starts[window].long()
        behind = first + windows.key_lengths[window]
        seen = (place >= first[:, None]) & (place < behind[:, None])
        if windows.is_causal:
            still = windows.query_starts[window + 1] - 1 - torch.arange(count, device=keys.device)
            seen &= place < (behind - still)[:, None]
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        lse = scores.logsumexp(dim=-1)
        weights = (scores - lse[..., None]).exp()
        out = torch.einsum("thgs,shd->thgd", weights, values.to(wide))
        return Attended(out.flatten(1, 2).to(queries.dtype), lse.flatten(1, 2))


class Grouped:
    """PyTorch's fused attention, window by window: where no kernel takes them all at once."""

    name: ClassVar[str] = "grouped"

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, windows: PackedWindows, scaling: float
    ) -> Attended:
        """Attend; see `VarlenKernel`."""
        by_head = [each.transpose(0, 1)[None] for each in (queries, keys, values)]
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for rows, span in windows.spans:
            block = by_head[0][:, :, rows.start : rows.stop]
            own = span.stop - len(rows) if windows.is_causal else span.start
            states = [self._attend(block, by_head, Span(own, span.stop), windows.is_causal, scaling)]
            if own > span.start:
                states.append(self._attend(block, by_head, Span(span.start, own), False, scaling))
            parts.append(merge_attn_states([AttentionState(out[0], lse[0]) for out, lse in states]))
        return Attended(*(torch.cat(each, dim=1).transpose(0, 1) for each in zip(*parts, strict=True)))

    def _attend(
        self, queries: torch.Tensor, packed: list[torch.Tensor], span: Span, is_causal: bool, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (each[:, :, span.start : span.stop] for each in packed[1:])
        return attention_with_lse(queries, keys, values, scaling=scaling, is_causal=is_causal)
