"""The backend `varlen`: all rows of a batch, whatever their segments, in a few calls of one kernel per layer.

A plan is made once for a batch and used by all layers. A layer needs one kernel call for the causal windows and one for
every few slots of other windows, however many segments and prompts there are; log-sum-exps merge the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from invariant_rag.arrangement import Arrangement
from invariant_rag.attention.base import AttentionCall
from invariant_rag.attention.positions import Rotation
from invariant_rag.attention.sdpa import SDPA
from invariant_rag.attention.softmax import merge_attn_states
from invariant_rag.attention.varlen.kernels import PackedLayer, PackedWindows, VarlenKernel, usable_kernel
from invariant_rag.attention.varlen.packing import Pass, Weights, attend_packed, lay_windows, make_passes, merge_sinks
from invariant_rag.attention.varlen.ranking import RankedDecoding, Ranking, make_ranked_decoding, make_ranking


class Varlen(SDPA):
    """Compute whole batches with a kernel for packed queries of variable lengths.

    RoToR is two calls per layer. PINE decodes with two calls, the first of which ranks the segments. Layers with a
    narrow sliding window, a soft cap, ALiBi or values of another width, and training, are computed as `sdpa` does.

    Args:
        kernel: The kernel. None: `torch-varlen` on CUDA, in half precision; PyTorch's fused attention on a CPU.
    """

    name: ClassVar[str] = "varlen"
    batched_prefill: ClassVar[bool] = True

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
        kernel = self.kernel_for(call.queries.device, call.queries.dtype, call.queries.shape[-1])
        return None if kernel is None else _plan_of(arrangements, padding, call, plans).attend(kernel, call)

    def kernel_for(self, device: torch.device, dtype: torch.dtype, head_size: int) -> VarlenKernel | None:
        """Return the kernel that computes layers of this kind; None where they are computed as `sdpa` does."""
        return self.kernel or usable_kernel(device, dtype, head_size)


def _can_window(call: AttentionCall) -> bool:
    """Return whether kernels for packed queries compute a layer: plain softmax attention, rotary, no gradients."""
    return (
        isinstance(call.rotation, Rotation)
        and call.queries.shape[-1] == call.values.shape[-1]
        and call.softcap is None
        and call.dropout == 0.0
        and (call.sliding_window is None or call.sliding_window >= call.keys.shape[2])
        and not (torch.is_grad_enabled() and call.has_gradients())
    )


def _plan_of(
    arrangements: Sequence[Arrangement], padding: Sequence[int], call: AttentionCall, plans: dict[Any, Any]
) -> _Plan | RankedDecoding:
    """Return the plan of a batch, which is made once for all layers."""
    num_queries, num_keys, device = call.queries.shape[2], call.keys.shape[2], call.queries.device
    if num_queries == 1:
        key: Any = ("decoding", tuple(padding), device)
        decoding: RankedDecoding | None = _known(
            plans, key, lambda: make_ranked_decoding(arrangements, padding, num_keys, device)
        )
        if decoding is not None:
            return decoding
    else:
        call.scratch.clear()  # it may be another text with the same arrangement
    key = (num_queries, num_keys, tuple(padding), device)
    plan: _Plan = _known(plans, key, lambda: _make_plan(arrangements, padding, num_queries, num_keys, device))
    return plan


def _known(plans: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Return a plan, made where it is not known; of more than four, those made first are forgotten."""
    if key not in plans:
        while len(plans) >= 4:
            del plans[next(iter(plans))]
        plans[key] = make()
    return plans[key]


@dataclass(frozen=True)
class _Plan:
    """How one layer attends for a batch."""

    causal: PackedWindows  # what all queries attend to causally
    weights: Weights | None  # how that is weighed
    others: tuple[Pass, ...]
    rankings: tuple[Ranking, ...]  # of the first, second... set that a query ranks
    to_zero: torch.Tensor  # shifts of all keys of the batch to position 0 `[T, 1]`, for rankings

    def attend(self, kernel: VarlenKernel, call: AttentionCall) -> torch.Tensor:
        """Return one layer's attention `[B, Q, H, D]`."""
        packed = (each.transpose(1, 2).flatten(0, 1) for each in (call.queries, call.keys, call.values))
        layer = PackedLayer(kernel, call, *packed)
        state = attend_packed(layer, self.causal, layer.queries, self.weights)
        for each in self.others:
            state = merge_attn_states((state, each.attend(layer)))
        if self.rankings:
            unrotated = call.rotation.unscaled(call.rotation.rotate_by(layer.keys, self.to_zero))
            for ranking in self.rankings:
                state = ranking.attend(layer, unrotated, state)
        out = merge_sinks(state, call.sinks).out
        return out.reshape(call.queries.shape[0], -1, *out.shape[1:])


def _make_plan(
    arrangements: Sequence[Arrangement], padding: Sequence[int], num_queries: int, num_keys: int, device: torch.device
) -> _Plan:
    """Return the plan of a left-padded batch."""
    windows = lay_windows(arrangements, padding, num_queries, num_keys)

    def positions(count: int) -> list[int]:
        return [max(0, num_keys - count + index - padded) for padded in padding for index in range(count)]

    lengths, attended = [len(each.queries) for each in windows.causal], [each.keys for each in windows.causal]
    ranked = [(each, positions(num_queries)) for each in windows.ranked]
    return _Plan(
        causal=PackedWindows.of(lengths, attended, True, device),
        weights=Weights.of(windows.causal, device),
        others=make_passes(windows.others, len(arrangements) * num_queries, device),
        rankings=tuple(make_ranking(*each, device) for each in ranked),
        to_zero=-torch.tensor(positions(num_keys) if ranked else [], device=device)[:, None],
    )
