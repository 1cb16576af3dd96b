"""Kernels for CUDA: one call for all windows, which may overlap. None is trusted before it was compared with `Dense`.

The varlen function of the package flash-attn 2 is not among them: it knows no used lengths, so its windows cannot
overlap. The kernel itself is in PyTorch.
"""

from __future__ import annotations

from math import log
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch

from invariant_rag.attention.varlen.kernels import Attended, PackedWindows, VarlenKernel

_CAUSAL_TO_THE_BOTTOM_RIGHT = 2
"""A `custom_mask_type` of memory-efficient attention."""

_WORKSPACE = 128 << 20
"""Bytes that FlashInfer recommends for its intermediate results."""


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
            windows.max_queries,
            windows.max_keys,
            return_aux=AuxRequest(lse=True),
            scale=scaling,
            window_size=(-1, 0) if windows.is_causal else (-1, -1),
            enable_gqa=queries.shape[1] != keys.shape[1],
            seqused_k=windows.key_lengths,
        )
        return Attended(out, lse.transpose(0, 1))


class FlashAttention3:
    """FlashAttention 3 for Hopper GPUs, the package `flash_attn_interface`."""

    name: ClassVar[str] = "flash-attention-3"

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, windows: PackedWindows, scaling: float
    ) -> Attended:
        """Attend; see `VarlenKernel`."""
        from flash_attn_interface import flash_attn_varlen_func

        out, lse = flash_attn_varlen_func(
            queries,
            keys,
            values,
            windows.query_starts,
            windows.key_starts,
            windows.max_queries,
            windows.max_keys,
            seqused_k=windows.key_lengths,
            softmax_scale=scaling,
            causal=windows.is_causal,
            return_attn_probs=True,  # the log-sum-exps
        )
        return Attended(out, lse.transpose(0, 1))


class FlashInfer:
    """FlashInfer's paged attention (package `flashinfer-python`), with pages of one token: so windows may overlap.

    Windows are planned when they are attended to for the first time, and then the device is waited for. All layers
    share the plan.
    """

    name: ClassVar[str] = "flashinfer"

    def __init__(self) -> None:
        self._plans: WeakKeyDictionary[PackedWindows, dict[Any, Any]] = WeakKeyDictionary()
        self._workspaces: dict[torch.device, torch.Tensor] = {}

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, windows: PackedWindows, scaling: float
    ) -> Attended:
        """Attend; see `VarlenKernel`."""
        heads, key_heads, size = queries.shape[1], keys.shape[1], queries.shape[2]
        plans, key = self._plans.setdefault(windows, {}), (heads, key_heads, size, queries.dtype, scaling)
        if key not in plans:
            plans[key] = self._plan(windows, heads, key_heads, size, queries.dtype, scaling)
        out, lse = plans[key].run(queries, (keys[:, None], values[:, None]), return_lse=True)
        return Attended(out, lse * log(2))  # its logarithms are to base 2

    def _plan(
        self, windows: PackedWindows, heads: int, key_heads: int, size: int, dtype: torch.dtype, scaling: float
    ) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        lengths, device = windows.key_lengths, windows.key_lengths.device
        ends = lengths.cumsum(0, dtype=torch.int32)
        # The keys of all windows, one window behind the other.
        first = torch.repeat_interleave(windows.key_starts[:-1] - ends + lengths, lengths)
        pages = torch.arange(len(first), dtype=torch.int32, device=device) + first
        if device not in self._workspaces:
            self._workspaces[device] = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        plan = BatchPrefillWithPagedKVCacheWrapper(self._workspaces[device], "NHD")
        plan.plan(
            windows.query_starts,
            torch.nn.functional.pad(ends, (1, 0)),
            pages,
            torch.ones_like(lengths),
            heads,
            key_heads,
            size,
            1,
            causal=windows.is_causal,
            sm_scale=scaling,
            q_data_type=dtype,
        )
        return plan


class AtenFlash:
    """The operator that `torch.nn.attention.varlen` calls: FlashAttention 2, in half precision, for older PyTorch."""

    name: ClassVar[str] = "aten-flash"

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, windows: PackedWindows, scaling: float
    ) -> Attended:
        """Attend; see `VarlenKernel`."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            queries,
            keys,
            values,
            windows.query_starts,
            windows.key_starts,
            windows.max_queries,
            windows.max_keys,
            0.0,
            windows.is_causal,
            False,
            scale=scaling,
            seqused_k=windows.key_lengths,
        )
        return Attended(out, lse.transpose(0, 1))


class AtenEfficient:
    """Memory-efficient attention of PyTorch, in float32 too. It wants a key head for every query head."""

    name: ClassVar[str] = "aten-efficient"

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, windows: PackedWindows, scaling: float
    ) -> Attended:
        """Attend; see `VarlenKernel`."""
        groups, count = queries.shape[1] // keys.shape[1], queries.shape[0]
        if groups > 1:
            keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        out, padded, *_ = torch.ops.aten._efficient_attention_forward(
            queries[None],
            keys[None],
            values[None],
            None,
            windows.query_starts,
            windows.key_starts,
            windows.max_queries,
            windows.max_keys,
            0.0,
            _CAUSAL_TO_THE_BOTTOM_RIGHT if windows.is_causal else 0,
            compute_log_sumexp=True,
            scale=scaling,
            seqlen_k=windows.key_lengths,
        )
        window = torch.repeat_interleave(windows.query_starts.diff(), output_size=count)
        place = torch.arange(count, device=queries.device) - windows.query_starts[window]
        return Attended(out[0], padded[window, :, place])  # `[W, H, longest window]`, to `[T, H]`


CUDA_KERNELS: tuple[VarlenKernel, ...] = (TorchVarlen(), FlashAttention3(), FlashInfer(), AtenFlash(), AtenEfficient())
"""The first that is there and right is taken."""
