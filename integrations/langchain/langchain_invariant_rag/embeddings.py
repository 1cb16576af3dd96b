"""The embedder of invariant-rag's retrievers, for LangChain's vector stores."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

from invariant_rag.models.embedders import DEFAULT_EMBEDDER, Embedder, load_embedder
from invariant_rag.segments import replace_surrogates
from langchain_core.embeddings import Embeddings


class InvariantEmbeddings(Embeddings):
    """Sentence embeddings that do not depend on what else is embedded: texts are embedded one by one.

    In a batch, the last bits of a vector depend on the texts next to it; then ties and near ties of a search depend on
    the order in which a corpus was given.

    Args:
        embedder: A sentence-transformers model, its hub id or its folder. Loaded on first use.
        batch_size: Texts to embed together. More than one is faster, and gives up the promise above.
    """

    def __init__(self, embedder: Embedder | str | Path = DEFAULT_EMBEDDER, *, batch_size: int = 1) -> None:
        self._embedder = embedder
        self._loaded: Embedder | None = None
        self._batch_size = batch_size
        self._lock = Lock()  # a fast tokenizer keeps its padding as state

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return one vector for each text."""
        readable = [replace_surrogates(text) for text in texts]
        batches = [readable[start : start + self._batch_size] for start in range(0, len(texts), self._batch_size)]
        with self._lock:
            loaded = self._load()
            return [
                [float(value) for value in vector]
                for batch in batches
                for vector in loaded.encode_document(batch, show_progress_bar=False)
            ]

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a question."""
        with self._lock:
            (vector,) = self._load().encode_query([replace_surrogates(text)], show_progress_bar=False)
        return [float(value) for value in vector]

    def _load(self) -> Embedder:
        """Return the embedder, loaded on the first call. Called under the lock."""
        if self._loaded is None:
            given = self._embedder
            self._loaded = load_embedder(given) if isinstance(given, str | Path) else given
        return self._loaded

    def __getstate__(self) -> dict[str, Any]:
        # A lock cannot leave its process, and an embedder that has a name is loaded where it is needed.
        return {name: value for name, value in vars(self).items() if name not in {"_lock", "_loaded"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._loaded = None
        self._lock = Lock()
