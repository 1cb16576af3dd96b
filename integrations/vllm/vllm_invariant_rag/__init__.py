"""invariant-rag on vLLM: arranged attention in vLLM's own forward pass, and a backend that sends it requests.

Public names are loaded on first use: the backend over HTTP needs no vLLM.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from invariant_rag._lazy import lazy_exports

if TYPE_CHECKING:
    from vllm_invariant_rag.connector import InvariantRAGConnector
    from vllm_invariant_rag.errors import RequestRefused, UnsupportedServer, VLLMError, VLLMTimeout, VLLMUnreachable
    from vllm_invariant_rag.middleware import Documents
    from vllm_invariant_rag.model import VLLMBackend

__version__ = version("vllm-invariant-rag")

__all__ = [
    "Documents",
    "InvariantRAGConnector",
    "RequestRefused",
    "UnsupportedServer",
    "VLLMBackend",
    "VLLMError",
    "VLLMTimeout",
    "VLLMUnreachable",
]

_HOMES = {"Documents": "middleware", "InvariantRAGConnector": "connector", "VLLMBackend": "model"}
__getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "errors") | _HOMES)
