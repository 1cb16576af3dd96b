"""LangChain embeddings with the embedder of the core's retrievers, for vector stores."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

from invariant_rag.models.embedders import DEFAULT_EMBEDDER, Embedder, load_embedder
from invariant_rag.segments import replace_surrogates
from langchain_core.embeddings import Embeddings


class InvariantEmbeddings(Embeddings):
    """Sentence embeddings that do not depend on the rest of the batch: texts are embedded one by one.

    The last bits of a vector depend on the other texts in its batch. With batches, the order of near-equal search
    results therefore depends on the order of the corpus.

    Args:
        embedder: A sentence-transformers model, its hub id or its folder. Loaded on first use.
        batch_size: Texts per forward pass. More than one is faster, but vectors then depend on the batch.
    """

    def __init__(self, embedder: Embedder | str | Path = DEFAULT_EMBEDDER, *, batch_size: int = 1) -> None:
        self._embedder = embedder
        self._loaded: Embedder | None = None
        self._batch_size = batch_size
        self._lock = Lock()  # a fast tokenizer keeps its padding as state

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return one vector per text."""
        clean = [replace_surrogates(text) for text in texts]
        batches = [clean[start : start + self._batch_size] for start in range(0, len(texts), self._batch_size)]
        with self._lock:
            loaded = self._load()
            return [
                [float(value) for value in vector]
                for batch in batches
                for vector in loaded.encode_document(batch, show_progress_bar=False)
            ]

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query."""
        with self._lock:
            (vector,) = self._load().encode_query([replace_surrogates(text)], show_progress_bar=False)
        return [float(value) for value in vector]

    def _load(self) -> Embedder:
        """Return the embedder; load it on the first call. The caller holds the lock."""
        if self._loaded is None:
            embedder = self._embedder
            self._loaded = load_embedder(embedder) if isinstance(embedder, str | Path) else embedder
        return self._loaded

    def __getstate__(self) -> dict[str, Any]:
        # A lock cannot be pickled, and a named embedder is loaded again by the process that unpickles it.
        return {name: value for name, value in vars(self).items() if name not in {"_lock", "_loaded"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._loaded = None
        self._lock = Lock()
