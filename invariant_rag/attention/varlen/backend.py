"""The backend `varlen`: all rows of a batch, whatever their segments, in a few calls of one kernel per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from invariant_rag.arrangement import Arrangement
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.rope import Rotation
from invariant_rag.attention.sdpa import SDPA
from invariant_rag.attention.varlen.decoding import Decoding, make_decoding
from invariant_rag.attention.varlen.kernels import VarlenKernel
from invariant_rag.attention.varlen.plan import Plan, make_plan
from invariant_rag.attention.varlen.selection import fastest_kernel

_MOST_PLANS = 4


class Varlen(SDPA):
    """Compute whole batches with a kernel for packed queries of variable lengths.

    RoToR is two calls per layer. PINE decodes with two
    calls, the first of which ranks the segments. Layers with a narrow sliding window or a soft cap, training, and what
    no window tells, are computed as `sdpa` does.

    Args:
        kernel: The kernel. None: the fastest that the device has.
    """

    name: ClassVar[str] = "varlen"
    reads_together: ClassVar[bool] = True

    def __init__(self, kernel: VarlenKernel | None = None) -> None:
        self.kernel = kernel

    def __repr__(self) -> str:
        return f"Varlen({'' if self.kernel is None else self.kernel.name})"

    def batch(
        self, arrangements: Sequence[Arrangement], padding: Sequence[int], call: AttentionCall, plans: dict[Any, Any]
    ) -> torch.Tensor | None:
        """Return `[B, Q, H, D]` for a whole batch; None for what is computed as `sdpa` does."""
        if not _can_window(call):
            return None
        plan = _plan_of(arrangements, padding, call, plans)
        queries = call.queries
        kernel = self.kernel_for(queries.device, queries.dtype, queries.shape[-1])
        return plan.attend(kernel, call)

    def kernel_for(self, device: torch.device, dtype: torch.dtype, head_size: int) -> VarlenKernel:
        """Return the kernel that computes layers of this kind."""
        return self.kernel or fastest_kernel(device, dtype, head_size)


def _plan_of(
    arrangements: Sequence[Arrangement], padding: Sequence[int], call: AttentionCall, plans: dict[Any, Any]
) -> Plan | Decoding:
    """Return the plan of a batch, which is made once for all layers."""
    num_queries, num_keys, device = call.queries.shape[2], call.keys.shape[2], call.queries.device
    if num_queries == 1:
        decoding: Decoding | None = _known(
            plans, ("decoding", tuple(padding), device), lambda: make_decoding(arrangements, padding, num_keys, device)
        )
        if decoding is not None:
            return decoding
    else:
        call.scratch.clear()  # it may be another text with the same arrangement
    key = (num_queries, num_keys, tuple(padding), device)
    plan: Plan = _known(plans, key, lambda: make_plan(arrangements, padding, num_queries, num_keys, device))
    return plan


def _known(plans: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Return a plan, made where it is not known; those made first are forgotten first."""
    if key not in plans:
        while len(plans) >= _MOST_PLANS:
            del plans[next(iter(plans))]
        plans[key] = make()
    return plans[key]


def _can_window(call: AttentionCall) -> bool:
    """Return whether kernels for packed queries compute a layer: plain softmax attention, rotary, no gradients."""
    return (
        isinstance(call.rotation, Rotation)
        and call.queries.shape[-1] == call.values.shape[-1]
        and call.softcap is None
        and call.dropout == 0.0
        and (call.sliding_window is None or call.sliding_window >= call.keys.shape[2])
        and not call.has_gradients()
    )
