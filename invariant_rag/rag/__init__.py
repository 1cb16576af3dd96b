"""Retrieval-augmented generation: load files, chunk, retrieve, generate, cite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invariant_rag._lazy import lazy_exports

if TYPE_CHECKING:
    from invariant_rag.rag.citations import Citation, cite
    from invariant_rag.rag.documents import Document, chunk_documents, load_documents
    from invariant_rag.rag.pipeline import RAG, Answer
    from invariant_rag.rag.retrieval import BM25Retriever, FaissRetriever, Retriever

_HOMES = {
    "RAG": "pipeline", "Answer": "pipeline", "BM25Retriever": "retrieval", "Citation": "citations", "cite": "citations",
    "Document": "documents", "FaissRetriever": "retrieval", "Retriever": "retrieval", "chunk_documents": "documents",
    "load_documents": "documents",
}  # fmt: skip
__all__ = [
    "RAG", "Answer", "BM25Retriever", "Citation", "Document", "FaissRetriever", "Retriever", "chunk_documents", "cite",
    "load_documents",
]  # fmt: skip
__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
