"""Kernels for packed queries with a window of the keys each. All compute the same function, up to rounding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import ClassVar, NamedTuple, Protocol

import torch

from invariant_rag.arrangement import Span
from invariant_rag.attention.fused import attention_with_lse
from invariant_rag.attention.merge_states import AttentionState, merge_attn_states

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedWindows:
    """Windows of packed queries, as kernels take them.

    Attributes:
        lengths: For each window, how many queries it has; they cover all queries, in order.
        keys: For each window, its keys.
        is_causal: Whether the last query of a window sees all of its keys, the one before all but the last, and so on.
        query_starts: int32 `[W + 1]`: the first query of each window, and the end of the last.
        key_starts: int32 `[W + 1]`: the first key of each window, and the end of the last.
        key_lengths: int32 `[W]`.
    """

    lengths: tuple[int, ...]
    keys: tuple[Span, ...]
    is_causal: bool
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    key_lengths: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], keys: Sequence[Span], is_causal: bool, device: torch.device) -> PackedWindows:
        """Return windows with their tables on a device."""

        def table(numbers: Sequence[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=device)

        starts = [span.start for span in keys]
        return cls(
            tuple(lengths),
            tuple(keys),
            is_causal,
            table(list(accumulate(lengths, initial=0))),
            table([*starts, keys[-1].stop]),
            table([len(span) for span in keys]),
        )


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
        stop = 0
        for length, span in zip(windows.lengths, windows.keys, strict=True):
            stop += length
            block = by_head[0][:, :, stop - length : stop]
            own = span.stop - length if windows.is_causal else span.start
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


class TorchVarlen:
    """`torch.nn.attention.varlen`, FlashAttention within PyTorch 2.10 and newer: one call for all windows, on CUDA."""

    name: ClassVar[str] = "torch-varlen"

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, windows: PackedWindows, scaling: float
    ) -> Attended:
        """Attend; see `VarlenKernel`."""
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        out, lse = varlen_attn(
            queries,
            keys,
            values,
            windows.query_starts,
            windows.key_starts,
            max(windows.lengths),
            max(map(len, windows.keys)),
            return_aux=AuxRequest(lse=True),
            scale=scaling,
            window_size=(-1, 0) if windows.is_causal else (-1, -1),
            enable_gqa=queries.shape[1] != keys.shape[1],
            seqused_k=windows.key_lengths,
        )
        return Attended(out, lse.transpose(0, 1))


@cache
def fastest_kernel(device: torch.device, dtype: torch.dtype) -> VarlenKernel:
    """Return the fastest kernel that computes the right thing on a device with this PyTorch.

    Each candidate is compared with `Dense` on overlapping windows before it is trusted.
    """
    candidates: tuple[VarlenKernel, ...] = (TorchVarlen(), Grouped()) if device.type == "cuda" else (Grouped(),)
    for kernel in candidates:
        wrong = difference(kernel, device, dtype)
        if not wrong:
            return kernel
        _logger.warning(
            "The kernel %r is not used on %s with %s: %s. The next one is slower; results agree up to rounding.",
            kernel.name,
            device,
            dtype,
            wrong,
        )
    return Dense()


def difference(kernel: VarlenKernel, device: torch.device, dtype: torch.dtype) -> str:
    """Return how a kernel differs from `Dense` on overlapping windows of grouped heads; empty if it does not."""
    numbers = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(12, heads, 64, generator=numbers).to(device, dtype) for heads in (4, 2, 2))
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2
    spans = [Span(0, 7), Span(2, 12), Span(5, 12)]
    for is_causal in (True, False):
        windows = PackedWindows.of((4, 3, 5), spans, is_causal, device)
        try:
            found = kernel(queries, keys, values, windows, 0.125)
        except (AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        expected = Dense()(queries, keys, values, windows, 0.125)
        for got, right in zip(found, expected, strict=True):
            if got.shape != right.shape or not torch.allclose(got.float(), right.float(), atol=tolerance):
                return "its results are not those of matrix products"
    return ""
