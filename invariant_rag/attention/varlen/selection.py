"""Which kernel a device gets: the fastest that computes the right thing there."""

from __future__ import annotations

import logging
from functools import cache

import torch

from invariant_rag.arrangement import Span
from invariant_rag.attention.varlen.cuda_kernels import CUDA_KERNELS
from invariant_rag.attention.varlen.kernels import Dense, Grouped, PackedWindows, VarlenKernel

_logger = logging.getLogger(__name__)

_SHAPES: tuple[tuple[tuple[int, int], tuple[int, ...], tuple[Span, ...]], ...] = (
    ((4, 2), (4, 3, 5), (Span(0, 7), Span(2, 12), Span(5, 12))),
    ((4, 2), (1, 1, 1), (Span(5, 6), Span(0, 9), Span(0, 12))),
    ((1, 1), (2, 2), (Span(3, 12), Span(0, 4))),
)
"""Numbers of query heads and key heads, queries of each window, and its keys: overlapping, backwards, a single one."""


@cache
def fastest_kernel(device: torch.device, dtype: torch.dtype, head_size: int = 64) -> VarlenKernel:
    """Return the fastest kernel that computes the right thing on a device with this PyTorch.

    Each candidate is compared with `Dense` before it is trusted. One that is not installed is passed over.
    """
    candidates: tuple[VarlenKernel, ...] = CUDA_KERNELS if device.type == "cuda" else (Grouped(),)
    passed_over: list[str] = []
    for kernel in candidates:
        wrong = difference(kernel, device, dtype, head_size)
        if not wrong:
            _logger.info("Kernel on %s with %s: %r. %s", device, dtype, kernel.name, " ".join(passed_over))
            return kernel
        passed_over.append(f"Not {kernel.name!r}: {wrong}.")
    _logger.warning(
        "No kernel is usable on %s with %s: attention is computed by matrix products, which is slower and takes memory "
        "for every query and key. %s",
        device,
        dtype,
        " ".join(passed_over),
    )
    return Dense()


def difference(kernel: VarlenKernel, device: torch.device, dtype: torch.dtype, head_size: int = 64) -> str:
    """Return how a kernel differs from `Dense` on windows of several shapes; empty if it does not."""
    numbers = torch.Generator().manual_seed(0)
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2
    for (heads, key_heads), lengths, spans in _SHAPES:
        sizes = ((sum(lengths), heads), (12, key_heads), (12, key_heads))
        queries, keys, values = (torch.randn(*size, head_size, generator=numbers).to(device, dtype) for size in sizes)
        for is_causal in (True, False):
            windows = PackedWindows.of(lengths, spans, is_causal, device)
            try:
                found = kernel(queries, keys, values, windows, head_size**-0.5)
            except (AttributeError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                return f"{type(error).__name__}: {error}"
            # In float64: products of float32 may be rounded to TF32.
            expected = Dense()(queries.double(), keys.double(), values.double(), windows, head_size**-0.5)
            for got, right in zip(found, expected, strict=True):
                if got.shape != right.shape or not torch.allclose(got.double(), right, atol=tolerance):
                    return "its results are not those of matrix products"
    return ""
