"""invariant-rag on vLLM: a KV connector, the prefill worker that feeds it, and a backend that asks both.

Public names are loaded on first use: the backend over HTTP needs no vLLM, and the connector no model.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from invariant_rag._lazy import lazy_exports

if TYPE_CHECKING:
    from vllm_invariant_rag.backend import VLLMBackend
    from vllm_invariant_rag.connector import InvariantRAGConnector
    from vllm_invariant_rag.errors import (
        EntryUnusable,
        RequestRefused,
        UnsupportedServer,
        VLLMError,
        VLLMTimeout,
        VLLMUnreachable,
    )
    from vllm_invariant_rag.middleware import ClearRefusals
    from vllm_invariant_rag.prefill import Prefilled, PrefillWorker

__version__ = version("vllm-invariant-rag")

__all__ = [
    "ClearRefusals",
    "EntryUnusable",
    "InvariantRAGConnector",
    "PrefillWorker",
    "Prefilled",
    "RequestRefused",
    "UnsupportedServer",
    "VLLMBackend",
    "VLLMError",
    "VLLMTimeout",
    "VLLMUnreachable",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ClearRefusals": "middleware",
        "EntryUnusable": "errors",
        "InvariantRAGConnector": "connector",
        "PrefillWorker": "prefill",
        "Prefilled": "prefill",
        "RequestRefused": "errors",
        "UnsupportedServer": "errors",
        "VLLMBackend": "backend",
        "VLLMError": "errors",
        "VLLMTimeout": "errors",
        "VLLMUnreachable": "errors",
    },
)
