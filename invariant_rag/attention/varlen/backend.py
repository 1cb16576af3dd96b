"""The backend `varlen`: all rows of a batch, whatever their segments, in a few calls of one kernel per layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from invariant_rag.arrangement import Arrangement, HidingArrangement, RowArrangement, WeightedArrangement
from invariant_rag.attention.call import BatchCall
from invariant_rag.attention.rope import Rotation
from invariant_rag.attention.sdpa import SDPA
from invariant_rag.attention.varlen.decoding import Decoding, make_decoding
from invariant_rag.attention.varlen.kernels import VarlenKernel
from invariant_rag.attention.varlen.plan import Plan, make_plan, make_ranked_plan
from invariant_rag.attention.varlen.selection import fastest_kernel
from invariant_rag.attention.varlen.windows import lay_windows
from invariant_rag.methods.pine import RankedArrangement

_MOST_PLANS = 4
_TOLD_BY_WINDOWS = (RowArrangement, HidingArrangement, WeightedArrangement)


class Varlen(SDPA):
    """Compute whole batches with a kernel for packed queries of variable lengths.

    RoToR is two calls per layer: one over the segments laid out twice, and one over the prefix. PINE decodes with two
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
        self, arrangements: Sequence[Arrangement], padding: Sequence[int], call: BatchCall, plans: dict[Any, Any]
    ) -> torch.Tensor | None:
        """Return `[B, Q, H, D]` for a whole batch; None for what is computed as `sdpa` does."""
        if not _can_window(call):
            return None
        plan = _plan_of(arrangements, padding, call, plans)
        queries = call.queries
        kernel = self.kernel_for(queries.device, queries.dtype, queries.shape[-1])
        return None if plan is None else plan.attend(kernel, call)

    def kernel_for(self, device: torch.device, dtype: torch.dtype, head_size: int) -> VarlenKernel:
        """Return the kernel that computes layers of this kind."""
        return self.kernel or fastest_kernel(device, dtype, head_size)


def _plan_of(
    arrangements: Sequence[Arrangement], padding: Sequence[int], call: BatchCall, plans: dict[Any, Any]
) -> Plan | Decoding | None:
    """Return the plan of a batch; None where no window tells what a row sees. Plans are made once for all layers."""
    num_queries, num_keys, device = call.queries.shape[2], call.keys.shape[2], call.queries.device
    if num_queries == 1:
        decoding: Decoding | None = _known(
            plans, ("decoding", tuple(padding), device), lambda: _decoding(arrangements, padding, num_keys, device)
        )
        if decoding is not None:
            return decoding
    else:
        call.scratch.clear()  # it may be another text with the same arrangement
    key = (num_queries, num_keys, tuple(padding), device)
    plan: Plan | None = _known(plans, key, lambda: _plan(arrangements, padding, call))
    return plan


def _known(plans: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Return a plan, made where it is not known; those made first are forgotten first."""
    if key not in plans:
        while len(plans) >= _MOST_PLANS:
            del plans[next(iter(plans))]
        plans[key] = make()
    return plans[key]


def _ranked(arrangements: Sequence[Arrangement]) -> list[RankedArrangement]:
    """Return arrangements that all rank segments, in the same direction; otherwise none."""
    ranked = [each for each in arrangements if isinstance(each, RankedArrangement)]
    return ranked if len(ranked) == len(arrangements) and len({each.reverse for each in ranked}) == 1 else []


def _decoding(
    arrangements: Sequence[Arrangement], padding: Sequence[int], num_keys: int, device: torch.device
) -> Decoding | None:
    ranked = _ranked(arrangements)
    return make_decoding(ranked, padding, num_keys, device) if ranked else None


def _plan(arrangements: Sequence[Arrangement], padding: Sequence[int], call: BatchCall) -> Plan | None:
    num_queries, num_keys = call.queries.shape[2], call.keys.shape[2]
    rows = [each for each in arrangements if isinstance(each, RowArrangement) and type(each) in _TOLD_BY_WINDOWS]
    if len(rows) == len(arrangements):
        windows = lay_windows(rows, padding, num_queries, num_keys)
        return None if windows is None else make_plan(windows, len(rows) * num_queries, call.queries.device)
    ranked = _ranked(arrangements)
    return make_ranked_plan(ranked, padding, num_queries, num_keys, call.queries.device) if ranked else None


def _can_window(call: BatchCall) -> bool:
    """Return whether kernels for packed queries compute a layer: plain softmax attention, rotary, no gradients."""
    tensors = (call.queries, call.keys, call.values)
    return (
        isinstance(call.rotation, Rotation)
        and call.queries.shape[-1] == call.values.shape[-1]
        and call.softcap is None
        and call.dropout == 0.0
        and (call.sliding_window is None or call.sliding_window >= call.keys.shape[2])
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors))
    )
