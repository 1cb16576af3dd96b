"""Attention: computing arrangements, and replacing a model's own attention while they are active."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invariant_rag.errors import UnknownName

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from invariant_rag.attention.base import Backend

BACKENDS = ("reference", "sdpa", "varlen")
"""Names of the backends. `auto` is `varlen` on CUDA, and `sdpa` elsewhere."""


def resolve_backend(backend: str | Backend, device: torch.device | None = None) -> Backend:
    """Return the backend of a name from `BACKENDS`, or an instance as it is; `auto` chooses by the model's device.

    Raises:
        UnknownName: No backend has that name; the message lists the valid ones.
    """
    if not isinstance(backend, str):
        if not callable(getattr(backend, "attend", None)):
            raise UnknownName("backend", backend, ("auto", *BACKENDS))
        return backend
    from invariant_rag.attention.reference import Reference
    from invariant_rag.attention.sdpa import SDPA
    from invariant_rag.attention.varlen import Varlen

    auto = Varlen if device is not None and device.type == "cuda" else SDPA
    classes: dict[str, type[Backend]] = {"auto": auto, "reference": Reference, "sdpa": SDPA, "varlen": Varlen}
    if backend not in classes:
        raise UnknownName("backend", backend, ("auto", *BACKENDS))
    return classes[backend]()


def backend_label(backend: Backend, model: PreTrainedModel) -> str:
    """Return the name of a backend, with that of the kernel that it takes for a model: `varlen (torch-varlen)`."""
    choose = getattr(backend, "kernel_for", None)
    if choose is None:
        return backend.name
    config = model.config.get_text_config(decoder=True)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kernel = choose(model.device, model.dtype, head_size)
    return f"{backend.name} ({'sdpa' if kernel is None else kernel.name})"
