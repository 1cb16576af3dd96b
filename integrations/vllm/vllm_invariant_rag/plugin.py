"""What vLLM calls in each of its processes, before it builds a model (`vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Register our subclasses of vLLM's attention backends. Without our connector they do what their parents do."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"):
        register_backend(AttentionBackendEnum[name], f"vllm_invariant_rag.backends.{name}")
