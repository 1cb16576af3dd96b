"""LangChain for invariant-rag: models, retrievers and chains whose answers ignore the order of the documents.

Public names are loaded on first use, so that importing the package does not import torch.
"""

# ruff: noqa: F401 - for type checkers

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from invariant_rag.errors import OrderWarning

    from langchain_invariant_rag.api_models import canonical, vote
    from langchain_invariant_rag.chat_models import ChatInvariant
    from langchain_invariant_rag.documents import Segments
    from langchain_invariant_rag.llms import InvariantLLM
    from langchain_invariant_rag.middleware import InvariantRAGMiddleware
    from langchain_invariant_rag.prompts import SEGMENT_PROMPT, SegmentsPlaceholder, create_invariant_documents_chain
    from langchain_invariant_rag.retrievers import InvariantEmbeddings, InvariantRetriever, as_segments

__version__ = version("langchain-invariant-rag")

_MODULES = {
    "api_models": ["canonical", "vote"],
    "chat_models": ["ChatInvariant"],
    "documents": ["Segments"],
    "errors": ["OrderWarning"],
    "llms": ["InvariantLLM"],
    "middleware": ["InvariantRAGMiddleware"],
    "prompts": ["SEGMENT_PROMPT", "SegmentsPlaceholder", "create_invariant_documents_chain"],
    "retrievers": ["InvariantEmbeddings", "InvariantRetriever", "as_segments"],
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*sorted(_HOMES), "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
