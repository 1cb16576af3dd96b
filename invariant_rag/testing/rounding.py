"""How far rounding can move a result: bounds that are computed, and hold on other machines with other kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

_RUNS = 3
_LARGEST = 0.01
"""A bound above this part of the largest value says nothing: an argument that is wrong moves results as far."""

_PRODUCTS = frozenset({"mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addbmm", "addmv"})
_ATTENTION = frozenset({"_scaled_dot_product_flash_attention_for_cpu"})
_SUMS = frozenset({"sum", "mean", "cumsum"})
_SUMS_IN_ONE_KERNEL = frozenset(
    "_softmax softmax _safe_softmax _log_softmax logsumexp _logcumsumexp native_layer_norm _fused_rms_norm var "
    "var_mean std linalg_vector_norm norm segment_reduce index_add scatter_add _softmax_backward_data "
    "_log_softmax_backward_data native_layer_norm_backward embedding_dense_backward nll_loss_forward "
    "nll_loss_backward".split()
)
_FUNCTIONS = frozenset(
    "exp exp2 expm1 log log2 log1p pow rsqrt tanh sigmoid silu gelu erf softplus cos sin logaddexp mish".split()
)
"""Operations that are not named here are exact, or are rounded alike by IEEE 754. One that is missing makes bounds too
small, and never too large."""


class _OtherRounding(TorchDispatchMode):
    """Gives sums and functions the errors that another order of summation, or another kernel, may give them.

    A sum of n products, in any order, is off by about sqrt(n) u times the sum of their magnitudes (Higham and Mary,
    "A new approach to probabilistic rounding error analysis", 2019), where u is half the distance between 1 and the
    next number. Every result is moved by a random part of that: Monte Carlo arithmetic (Parker, 1997).
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = torch.Generator().manual_seed(seed)
        self._least = torch.finfo(dtype).eps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operation, and move what it returns."""
        kwargs = kwargs or {}
        with self:
            decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        name = func._schema.name.removeprefix("aten::")
        if name in _ATTENTION:
            return self._attention(func, args, kwargs)
        returned = func(*args, **kwargs)
        out = returned[0] if isinstance(returned, (tuple, list)) else returned
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return returned
        name = name.rstrip("_")  # exp_ is exp in place
        if name in _PRODUCTS:
            left, right = args[-2:]
            self._move(out, left.abs() @ right.abs() + out.abs(), left.shape[-1])
        elif name in _SUMS:
            terms = args[0].numel() // max(1, out.numel()) if name != "cumsum" else args[0].shape[args[1]]
            self._move(out, func(args[0].abs(), *args[1:], **kwargs), terms)
        elif name in _SUMS_IN_ONE_KERNEL:
            self._move(out, out.abs(), max(each.shape[-1] for each in args if isinstance(each, torch.Tensor)))
        elif name in _FUNCTIONS:
            self._move(out, out.abs(), 1)
        return returned

    def _attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call fused attention with scores that are moved, and move its weighted sums of values."""
        queries, keys, values, *rest = args
        moved = queries.clone()
        self._move(moved, queries.abs(), queries.shape[-1])
        magnitudes = func(queries, keys, values.abs(), *rest, **kwargs)
        returned = func(moved, keys, values, *rest, **kwargs)
        for out, magnitude in zip(returned[:2], magnitudes[:2], strict=True):
            self._move(out, magnitude.abs(), keys.shape[-2])
        return returned

    def _move(self, out: torch.Tensor, magnitudes: torch.Tensor, terms: int) -> None:
        unit = max(self._least, torch.finfo(out.dtype).eps) / 2
        part = torch.rand(out.shape, generator=self._random, dtype=torch.float64) * 2 - 1
        # What hides scores is as large as a number can be, and stays as it is.
        error = magnitudes.double().clamp(max=1e30).nan_to_num(0) * (unit * math.sqrt(terms)) * part
        out.add_(error.to(out.dtype))


def rounding(compute: Callable[..., Any], *args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> float:
    """Return how far rounding can move any value of a result, whatever the order of summation, kernel or machine.

    The result is computed once as it is, and three times with random errors of the size that rounding may have in each
    operation; the bound is the largest distance that is seen. The errors that real kernels make were 4 to 25 times
    smaller in every family of `FAMILIES`, since most of them cancel out.

    Args:
        compute: What is called with `args` and `kwargs`. It returns a tensor, numbers, or generations, of which
            log-probabilities are taken.
        args: Its arguments.
        dtype: The precision whose errors are made, also in a model of higher precision.
        kwargs: Its keywords.

    Returns:
        The bound, in units of the result.

    Raises:
        AssertionError: Rounding decides what the result is: which expert of a router, or which segment of PINE's,
            comes first, or which token is written. Choose another prompt or seed.
    """
    result = compute(*args, **kwargs)
    exact = _values(result)
    largest = float(exact[exact.isfinite()].abs().amax())
    bound = _unit(result) * largest
    for seed in range(_RUNS):
        with sdpa_kernel(SDPBackend.MATH), _OtherRounding(seed, dtype):
            moved = _values(compute(*args, **kwargs))
        same = moved.shape == exact.shape
        bound = max(bound, float((moved - exact).abs().nan_to_num(0).amax()) if same else math.inf)
    assert bound <= max(_LARGEST, 16 * _unit(result)) * largest, (
        f"rounding decides here: it moves values of {largest:.2g} by {bound:.2g}; choose another prompt or seed"
    )
    return bound


def assert_rounded_alike(found: Any, expected: Any, operations: int = 64, *, magnitude: float | None = None) -> None:
    """Assert that two results of the same few operations differ by their rounding alone, on any machine.

    For arithmetic that a test writes down twice. A chain of n operations is off by at most n eps times the largest
    value in it (Higham, "Accuracy and stability of numerical algorithms", section 3.1). For models, see `rounding`.

    Args:
        found: Numbers or a tensor.
        expected: The same.
        operations: Roundings on the way to one value of both results, at most.
        magnitude: The largest value on that way. None: that of both results.

    Raises:
        AssertionError: They differ by more.
    """
    largest = [float(each[each.isfinite()].abs().amax()) for each in map(_values, (found, expected))]
    scale = max(largest) if magnitude is None else magnitude
    bound = operations * max(_unit(found), _unit(expected)) * scale
    torch.testing.assert_close(_values(found), _values(expected), atol=bound, rtol=0)


def _unit(result: Any) -> float:
    """Return the distance between 1 and the next number in the precision that a result is returned in."""
    while isinstance(result, (list, tuple)) and result:
        result = result[0]
    return torch.finfo(torch.as_tensor(result).dtype if hasattr(result, "dtype") else torch.float64).eps


def _values(result: Any) -> torch.Tensor:
    """Return the numbers of a result in float64, in one dimension."""
    if hasattr(result, "logprobs"):
        result = result.logprobs
    if isinstance(result, torch.Tensor):
        return result.detach().double().flatten().clone()
    if isinstance(result, Iterable):
        return torch.cat([_values(each) for each in result])
    return torch.tensor([float(result)], dtype=torch.float64)
