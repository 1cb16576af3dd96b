"""Backends of vLLM whose implementation is `ArrangedAttention`. Each is imported by vLLM where it is chosen."""

from __future__ import annotations

from functools import cache
from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_invariant_rag.attention import ArrangedAttention

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


def __getattr__(name: str) -> Any:
    if name in BACKENDS:
        return _subclass(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _subclass(name: str) -> type:
    """Return the subclass of the backend that vLLM itself has under a name."""
    from importlib import import_module

    module, _, kind = AttentionBackendEnum[name].value.rpartition(".")
    parent = getattr(import_module(module), kind)
    implementation, builder = parent.get_impl_cls(), parent.get_builder_cls()
    arranged = type(f"Arranged{implementation.__name__}", (ArrangedAttention, implementation), {})
    support = builder._cudagraph_support
    if support.value > AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE.value:
        # A graph of a batch with prompts in it would replay without our code.
        limited = {
            "_cudagraph_support": AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
            "get_cudagraph_support": classmethod(lambda cls, *_: cls._cudagraph_support),
        }
        builder = type(builder.__name__, (builder,), limited)
    members = {
        "get_impl_cls": staticmethod(lambda: arranged),
        "get_builder_cls": staticmethod(lambda: builder),
    }
    return type(name, (parent,), members)
