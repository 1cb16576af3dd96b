"""LangChain for invariant-rag: models, retrievers and chains whose answers ignore the order of the documents.

Public names are loaded on first use, so that the import loads no torch; what is retrieved is known from the import on.
"""

# ruff: noqa: F401 - for type checkers

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from invariant_rag._lazy import lazy_exports

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

_HOMES = {
    "api_models": "canonical vote",
    "chat_models": "ChatInvariant",
    "documents": "Segments",
    "llms": "InvariantLLM",
    "middleware": "InvariantRAGMiddleware",
    "prompts": "SEGMENT_PROMPT SegmentsPlaceholder create_invariant_documents_chain",
    "recognition": "OrderWarning",
    "retrievers": "InvariantEmbeddings InvariantRetriever as_segments",
}

__all__ = [*sorted(" ".join(_HOMES.values()).split()), "__version__"]  # noqa: PLE0604

__getattr__, __dir__ = lazy_exports(__name__, {name: home for home in _HOMES for name in _HOMES[home].split()})

from langchain_invariant_rag import tracking  # noqa: E402 - it attaches its handler
