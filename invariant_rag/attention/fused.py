"""Attention that also returns its log-sum-exps. The one place that touches a private operator of PyTorch.

PyTorch's fused CPU kernel computes the log-sum-exps, but its public name, `scaled_dot_product_attention`, does not
return them. The operator is private, so a release may rename or change it. Then matrix products compute the same
function, slower, and a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

OPERATOR = "_scaled_dot_product_flash_attention_for_cpu"

Result: TypeAlias = tuple[Tensor, Tensor]
Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], Result]
"""Takes queries `[B, H, Q, D]`, keys and values `[B, H_kv, S, D]`, an additive mask that broadcasts to `[B, H, Q, S]`
or None, whether attention is causal, and the factor on the scores."""

_logger = logging.getLogger(__name__)


def attention_with_lse(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> Result:
    """Compute softmax attention on a CPU; return outputs `[B, H, Q, D_v]`, and log-sum-exps `[B, H, Q]`.

    The arguments are those of `Kernel`. Values `[B, H_kv, S, D_v]` may be narrower than the keys; a mask has the dtype
    of the queries. Log-sum-exps are in float32 at least.
    """
    width = values.shape[-1]
    if width < keys.shape[-1]:  # the kernel wants one width
        values = torch.nn.functional.pad(values, (0, keys.shape[-1] - width))
    out, lse = _kernel()(queries, keys, values, mask, is_causal, scaling)
    return out[..., :width], lse


@cache
def _kernel() -> Kernel:
    """Return the fastest kernel that computes the right thing with this PyTorch."""
    wrong = ""
    for kernel in (fused_kernel, ungrouped_kernel):
        wrong = _difference(kernel)
        if not wrong:
            return kernel
    _logger.warning(
        "PyTorch %s has no usable operator aten::%s (%s): attention on this CPU is computed by matrix products, which "
        "is slower; results agree up to rounding. Install a PyTorch that invariant-rag was tested with.",
        torch.__version__,
        OPERATOR,
        wrong,
    )
    return matmul_kernel


def _difference(kernel: Kernel) -> str:
    """Return how a kernel differs from matrix products on grouped heads; empty if it does not."""
    queries, keys = torch.linspace(-1, 1, 48).reshape(1, 2, 3, 8), torch.linspace(1, -1, 24).reshape(1, 1, 3, 8)
    for is_causal in (True, False):
        try:
            results = kernel(queries, keys, keys, None, is_causal, 0.5)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            return str(error)
        expected = matmul_kernel(queries, keys, keys, None, is_causal, 0.5)
        for found, right in zip(results, expected, strict=True):
            if found.shape != right.shape or not torch.allclose(found, right, atol=1e-5):
                return "its results are not those of matrix products"
    return ""


def fused_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scaling: float) -> Result:
    """Compute attention with PyTorch's fused CPU kernel."""
    out, lse = getattr(torch.ops.aten, OPERATOR)(q, k, v, is_causal=is_causal, attn_mask=mask, scale=scaling)
    return out, lse


def ungrouped_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scaling: float) -> Result:
    """Compute attention with the fused CPU kernel of PyTorch below 2.9, which is wrong for grouped heads."""
    groups = q.shape[1] // k.shape[1]
    return fused_kernel(
        q, k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1), mask, is_causal, scaling
    )


def matmul_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scaling: float) -> Result:
    """Compute attention by matrix products, in float32 or wider; memory grows with Q times S."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    keys, values = (each.to(wide).repeat_interleave(groups, dim=1) for each in (k, v))
    scores = q.to(wide) @ keys.mT * scaling
    if mask is not None:
        scores = scores + mask.to(wide)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)  # a query that sees nothing has no weights
    return (weights @ values).to(q.dtype), lse
