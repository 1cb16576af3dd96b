"""Kernels for packed queries with a window of the keys each. All compute the same function, up to rounding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import ClassVar, Protocol

import torch

from invariant_rag.arrangement import Span
from invariant_rag.attention.base import AttentionCall
from invariant_rag.attention.softmax import AttentionState, merge_attn_states, partial_attention

_logger = logging.getLogger(__name__)

MOST_WINDOWS = 65_535  # of one call: CUDA starts no more blocks along the axis on which FlashAttention 2 has them


@dataclass(frozen=True, eq=False)
class PackedWindows:
    """Windows as kernels take them: every packed query is in exactly one, in order, and every window has keys."""

    query_starts: torch.Tensor  # int32 `[W + 1]`: the first query of each window, and the end of the last
    key_starts: torch.Tensor  # int32 `[W + 1]`: the first key of each window, and the end of the last; they may overlap
    key_lengths: torch.Tensor  # int32 `[W]`
    max_queries: int  # of the longest window
    max_keys: int
    is_causal: bool  # bottom-right aligned: the last query of a window attends to all of its keys

    @classmethod
    def of(cls, lengths: Sequence[int], keys: Sequence[Span], is_causal: bool, device: torch.device) -> PackedWindows:
        """Return windows with so many queries each, and their keys, as tables on a device."""

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
        """At most `MOST_WINDOWS` windows each, with their queries, counted from 0. Synchronises with the device."""
        count = len(self.key_lengths)
        firsts = [*range(0, count, MOST_WINDOWS), count]
        stops = self.query_starts[firsts].tolist()

        def part(first: int, last: int) -> PackedWindows:
            starts, keys = self.query_starts[first : last + 1], self.key_starts[first : last + 1]
            return replace(
                self, query_starts=starts - starts[0], key_starts=keys, key_lengths=self.key_lengths[first:last]
            )

        return [(Span(*span), part(*ends)) for span, ends in zip(pairwise(stops), pairwise(firsts), strict=True)]

    @cached_property
    def spans(self) -> list[tuple[Span, Span]]:
        """Queries and keys of each window, for kernels called once per window. Synchronises with the device."""
        queries = self.query_starts.tolist()
        starts = self.key_starts[:-1]
        keys = map(Span, starts.tolist(), (starts + self.key_lengths).tolist())
        return list(zip(map(Span, queries, queries[1:]), keys, strict=True))


class VarlenKernel(Protocol):
    """A way to compute attention of packed queries to windows of packed keys."""

    name: ClassVar[str]

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, windows: PackedWindows, scaling: float
    ) -> AttentionState:
        """Return outputs `[T, H, D]` in the dtype of the queries, and log-sum-exps of the scaled scores `[T, H]`.

        Queries are `[T, H, D]`, keys and values `[S, H_kv, D]`; the query heads share them in groups.
        """
        ...


@dataclass(frozen=True)
class PackedLayer:
    """One layer of a batch with its tensors packed: queries `[T, H, D]`, keys and values `[S, H_kv, D]`."""

    kernel: VarlenKernel
    call: AttentionCall
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def attend(self, windows: PackedWindows, queries: torch.Tensor, keys: torch.Tensor | None = None) -> AttentionState:
        """Attend from packed queries, and maybe with other keys, in as many calls of the kernel as it takes."""
        keys = self.keys if keys is None else keys
        if len(windows.key_lengths) <= MOST_WINDOWS:
            return self.kernel(queries, keys, self.values, windows, self.call.scaling)
        parts = [
            self.kernel(queries[span.start : span.stop], keys, self.values, part, self.call.scaling)
            for span, part in windows.parts
        ]
        return AttentionState(*(torch.cat(each) for each in zip(*parts, strict=True)))


class Grouped:
    """PyTorch's fused attention on a CPU, window by window."""

    name: ClassVar[str] = "grouped"

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, windows: PackedWindows, scaling: float
    ) -> AttentionState:
        """Attend; see `VarlenKernel`."""
        queries, keys, values = (each.transpose(0, 1) for each in (queries, keys, values))
        parts: list[AttentionState] = []
        for rows, span in windows.spans:
            own = span.stop - len(rows) if windows.is_causal else span.start
            states = [
                partial_attention(
                    queries[:, rows.start : rows.stop],
                    keys[:, start:stop],
                    values[:, start:stop],
                    scaling=scaling,
                    is_causal=windows.is_causal and stop > own,
                )
                for start, stop in ((own, span.stop), (span.start, own))
                if start < stop
            ]
            parts.append(merge_attn_states(states))
        return AttentionState(*(torch.cat(each, dim=1).transpose(0, 1) for each in zip(*parts, strict=True)))


class TorchVarlen:
    """FlashAttention within PyTorch, on CUDA: one call for all windows.

    The operator of `torch.nn.attention.varlen`, which itself takes lengths of keys from PyTorch 2.12 on only.
    """

    name: ClassVar[str] = "torch-varlen"

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, windows: PackedWindows, scaling: float
    ) -> AttentionState:
        """Attend; see `VarlenKernel`."""
        tables = (windows.query_starts, windows.key_starts, windows.max_queries, windows.max_keys)
        edges = {"window_size_left": -1, "window_size_right": 0 if windows.is_causal else -1}
        options, dropout, debugs = {**edges, "scale": scaling, "seqused_k": windows.key_lengths}, 0.0, False
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            queries, keys, values, *tables, dropout, windows.is_causal, debugs, **options
        )
        return AttentionState(out, lse.transpose(0, 1))


@cache
def usable_kernel(device: torch.device, dtype: torch.dtype, head_size: int = 64) -> VarlenKernel | None:
    """Return the kernel for a device; None where it is not installed, has not the dtype, or computes something else."""
    if device.type == "cpu":
        return Grouped()
    wrong = difference(TorchVarlen(), device, dtype, head_size)
    if not wrong:
        return TorchVarlen()
    _logger.warning(
        "No variable-length kernel on %s with %s, so rows are computed one by one: %s", device, dtype, wrong
    )
    return None


_SHAPES: tuple[tuple[tuple[int, int], tuple[int, ...], tuple[Span, ...]], ...] = (
    ((4, 2), (4, 3, 5), (Span(0, 7), Span(2, 12), Span(5, 12))),
    ((4, 2), (1, 1, 1), (Span(5, 6), Span(0, 9), Span(0, 12))),
    ((1, 1), (2, 2), (Span(3, 12), Span(0, 4))),
)
"""Numbers of query heads and key heads, queries of each window, and its keys: overlapping, backwards, a single one."""


def difference(kernel: VarlenKernel, device: torch.device, dtype: torch.dtype, head_size: int = 64) -> str:
    """Return how a kernel differs from `Grouped` in float64 on windows of several shapes; empty if it does not."""
    numbers = torch.Generator().manual_seed(0)
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2
    for (heads, key_heads), lengths, spans in _SHAPES:
        sizes = ((sum(lengths), heads), (12, key_heads), (12, key_heads))
        q, k, v = (torch.randn(*size, head_size, generator=numbers).to(dtype) for size in sizes)
        for is_causal in (True, False):
            windows = PackedWindows.of(lengths, spans, is_causal, device)
            try:
                output = kernel(q.to(device), k.to(device), v.to(device), windows, head_size**-0.5)
            except (AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                return f"{type(error).__name__}: {error}"
            on_cpu = PackedWindows.of(lengths, spans, is_causal, torch.device("cpu"))
            expected = Grouped()(q.double(), k.double(), v.double(), on_cpu, head_size**-0.5)
            for got, right in zip(output, expected, strict=True):
                if got.shape != right.shape or not torch.allclose(got.double().cpu(), right.double(), atol=tolerance):
                    return "its results are not those of PyTorch's attention in float64"
    return ""
