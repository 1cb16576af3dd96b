"""Attention: computing arrangements, and replacing a model's own attention while they are active."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invariant_rag.errors import UnknownName, UnsupportedCombination

if TYPE_CHECKING:
    import torch

    from invariant_rag.attention.call import Backend

BACKENDS = ("reference", "sdpa", "flex", "varlen")
"""Names of the backends. `auto` is `varlen` on CUDA, and `sdpa` elsewhere."""


def resolve_backend(backend: str | Backend, device: torch.device | None = None) -> Backend:
    """Return the backend of that name, or the instance as it is.

    Args:
        backend: A name from `BACKENDS`, `auto`, or an instance.
        device: Where the model is, by which `auto` chooses. None: not known yet.

    Raises:
        UnknownName: No backend has that name; the message lists the valid ones.
        UnsupportedCombination: `flex` was chosen, and this version of PyTorch has no FlexAttention that it can use.
    """
    if not isinstance(backend, str):
        if not all(callable(getattr(backend, name, None)) for name in ("rows", "weighted", "ranked")):
            raise UnknownName("backend", backend, ("auto", *BACKENDS))
        return backend
    if backend == "flex":
        return _flex()
    from invariant_rag.attention.reference import Reference
    from invariant_rag.attention.sdpa import SDPA
    from invariant_rag.attention.varlen import Varlen

    auto = Varlen if device is not None and device.type == "cuda" else SDPA
    classes: dict[str, type[Backend]] = {"auto": auto, "reference": Reference, "sdpa": SDPA, "varlen": Varlen}
    if backend not in classes:
        raise UnknownName("backend", backend, ("auto", *BACKENDS))
    return classes[backend]()


def available_backends() -> tuple[str, ...]:
    """Return the names in `BACKENDS` that work with the installed PyTorch: `flex` needs 2.9 or newer."""
    try:
        _flex()
    except UnsupportedCombination:
        return tuple(name for name in BACKENDS if name != "flex")
    return BACKENDS


def _flex() -> Backend:
    try:
        from invariant_rag.attention.flex import Flex
    except ImportError as error:
        raise UnsupportedCombination(
            "expected a PyTorch whose FlexAttention returns log-sum-exps on request (2.9 or newer) for 'flex'",
            hint="Update torch, or choose the backend 'sdpa'.",
        ) from error
    return Flex()
