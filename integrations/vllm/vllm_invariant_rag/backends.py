"""Backends of vLLM whose implementation is `ArrangedAttentionImpl`. vLLM imports the one that it chooses."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from vllm_invariant_rag.attention import ArrangedAttentionImpl, BatchBuilder

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


def register() -> None:
    """Register them, in each process of vLLM. Without our connector they do what their parents do."""
    for name in BACKENDS:
        register_backend(AttentionBackendEnum[name], f"{__name__}.{name}")


@cache
def __getattr__(name: str) -> Any:
    """Return the subclass of the backend that vLLM itself has under a name."""
    if name not in BACKENDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, kind = AttentionBackendEnum[name].value.rpartition(".")
    parent = getattr(import_module(module), kind)
    implementation, builder = parent.get_impl_cls(), parent.get_builder_cls()
    arranged = type(f"Arranged{implementation.__name__}", (ArrangedAttentionImpl, implementation), {})
    most = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    limited: dict[str, Any] = {}
    if builder._cudagraph_support.value > most.value:
        # A graph of a batch with prompts in it would replay without our code.
        limited = {"_cudagraph_support": most, "get_cudagraph_support": staticmethod(lambda *_: most)}
    builder = type(builder.__name__, (BatchBuilder, builder), limited)
    members = {"get_impl_cls": staticmethod(lambda: arranged), "get_builder_cls": staticmethod(lambda: builder)}
    return type(name, (parent,), members)
