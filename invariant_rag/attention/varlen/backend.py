"""The backend `varlen`: all rows of a batch, whatever their segments, in a few calls of one kernel per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from invariant_rag.arrangement import Arrangement, HidingArrangement, RowArrangement, WeightedArrangement
from invariant_rag.attention.call import BatchCall
from invariant_rag.attention.rope import Rotation
from invariant_rag.attention.sdpa import SDPA
from invariant_rag.attention.varlen.kernels import VarlenKernel, fastest_kernel
from invariant_rag.attention.varlen.plan import Plan, make_plan, make_ranked_plan
from invariant_rag.attention.varlen.windows import lay_windows
from invariant_rag.methods.pine import RankedArrangement

_MOST_PLANS = 4
_TOLD_BY_WINDOWS = (RowArrangement, HidingArrangement, WeightedArrangement)


class Varlen(SDPA):
    """Compute whole batches with a kernel for packed queries of variable lengths.

    RoToR is two calls per layer: one over the segments laid out twice, and one over the prefix. Layers with a narrow
    sliding window or a soft cap, training, and what no window tells, are computed as `sdpa` does.

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
        self, arrangements: Sequence[Arrangement], padding: Sequence[int], call: BatchCall, plans: dict[Any, Any]
    ) -> torch.Tensor | None:
        """Return `[B, Q, H, D]` for a whole batch; None for what is computed as `sdpa` does."""
        num_queries, num_keys = call.queries.shape[2], call.keys.shape[2]
        if not _can_window(call, num_keys):
            return None
        key = (num_queries, num_keys, tuple(padding), call.queries.device)
        if key not in plans:
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            plans[key] = _plan(arrangements, padding, call)
        plan: Plan | None = plans[key]
        if plan is None:
            return None
        kernel = self.kernel or fastest_kernel(call.queries.device, call.queries.dtype)
        return plan.attend(kernel, call)


def _plan(arrangements: Sequence[Arrangement], padding: Sequence[int], call: BatchCall) -> Plan | None:
    """Return the plan of a batch; None where no window tells what a row sees."""
    num_queries, num_keys = call.queries.shape[2], call.keys.shape[2]
    rows = [each for each in arrangements if isinstance(each, RowArrangement) and type(each) in _TOLD_BY_WINDOWS]
    if len(rows) == len(arrangements):
        windows = lay_windows(rows, padding, num_queries, num_keys)
        return None if windows is None else make_plan(windows, len(rows) * num_queries, call.queries.device)
    ranked = [each for each in arrangements if isinstance(each, RankedArrangement)]
    if len(ranked) < len(arrangements) or len({each.reverse for each in ranked}) > 1 or num_queries == 1:
        return None
    return make_ranked_plan(ranked, padding, num_queries, num_keys, call.queries.device)


def _can_window(call: BatchCall, num_keys: int) -> bool:
    """Return whether kernels for packed queries compute a layer: plain softmax attention, rotary, no gradients."""
    tensors = (call.queries, call.keys, call.values)
    return (
        isinstance(call.rotation, Rotation)
        and call.queries.shape[-1] == call.values.shape[-1]
        and call.softcap is None
        and call.dropout == 0.0
        and (call.sliding_window is None or call.sliding_window >= num_keys)
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors))
    )
