"""Floating-point operations of a call, counted with `torch.utils.flop_counter` while it runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

# Fused attention by the place of `is_causal` among what follows queries, keys and values.
_FUSED = {
    "_scaled_dot_product_flash_attention_for_cpu": 1,
    "_scaled_dot_product_flash_attention": 1,
    "_scaled_dot_product_efficient_attention": 3,
    "_scaled_dot_product_cudnn_attention": 3,
}


def count_flops(call: Callable[[], object]) -> int:
    """Run a call and return its operations in matrix products and fused attention; a multiply-add counts as two.

    Causal fused attention counts what it sees, about half of the square: `FlopCounterMode` by itself counts all of it,
    and PyTorch's kernel for CPUs not at all. Where a mask is given, or scores are a matrix, what is masked counts too.
    """
    fused = {getattr(torch.ops.aten, name): partial(_attention, place) for name, place in _FUSED.items()}
    with FlopCounterMode(display=False, custom_mapping=fused) as counter:
        call()
    return int(counter.get_total_flops())


def _attention(
    place: int,
    queries: torch.Size,
    keys: torch.Size,
    values: torch.Size,
    *args: Any,
    **kwargs: Any,
) -> int:
    """Return the operations of fused attention for shapes `[B, H, Q, D]`, `[B, H_kv, S, D]` and `[B, H_kv, S, D_v]`."""
    batch, heads, count, width = queries
    length = keys[2]
    causal = kwargs.get("is_causal", args[place] if len(args) > place else False)
    seen = sum(min(index + 1, length) for index in range(count)) if causal else count * length
    return int(2 * batch * heads * seen * (width + values[3]))
