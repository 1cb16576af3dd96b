"""The embedder of the core's retrievers as LangChain embeddings, and LangChain embeddings as such an embedder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from invariant_rag.checks import check_number
from invariant_rag.models.embedders import DEFAULT_EMBEDDER, Embedder, NamedEmbedder
from invariant_rag.segments import replace_surrogates
from langchain_core.embeddings import Embeddings

if TYPE_CHECKING:
    from numpy.typing import NDArray


class InvariantEmbeddings(Embeddings):
    """Sentence embeddings that do not depend on the rest of the batch: texts are embedded one by one.

    The last bits of a vector depend on the other texts in its batch. With batches, the order of near-equal search
    results therefore depends on the order of the corpus.

    Args:
        embedder: A sentence-transformers model, its hub id or its folder. Loaded on first use.
        batch_size: Texts per forward pass. More than one is faster, but vectors then depend on the batch.

    Raises:
        InvalidChoice: The batch size is no whole number from 1 on.
    """

    def __init__(self, embedder: Embedder | str | Path = DEFAULT_EMBEDDER, *, batch_size: int = 1) -> None:
        self._embedder = NamedEmbedder(embedder) if isinstance(embedder, str | Path) else embedder
        self._batch_size = check_number("batch_size", batch_size, 1)
        self._lock = Lock()  # a fast tokenizer keeps its padding as state

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return one vector per text."""
        clean, size = list(map(replace_surrogates, texts)), self._batch_size
        batches = [clean[start : start + size] for start in range(0, len(texts), size)]
        with self._lock:
            encoded = [self._embedder.encode_document(batch, show_progress_bar=False) for batch in batches]
        return [list(map(float, vector)) for batch in encoded for vector in batch]

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query."""
        with self._lock:
            (vector,) = self._embedder.encode_query([replace_surrogates(text)], show_progress_bar=False)
        return list(map(float, vector))

    def __reduce__(self) -> tuple[Any, ...]:
        # A lock cannot be pickled, and a named embedder is loaded again by the process that unpickles it.
        return partial(InvariantEmbeddings, batch_size=self._batch_size), (self._embedder,)


class LangChainEmbedder:
    """LangChain embeddings as an embedder for the core's retrievers."""

    def __init__(self, embeddings: Embeddings) -> None:
        self._embeddings = embeddings

    def encode_document(self, texts: list[str], /, *, show_progress_bar: bool) -> NDArray[np.float32]:
        """Return one vector per text, `[N, D]`. LangChain embeddings show no progress."""
        return np.array(self._embeddings.embed_documents(texts), dtype=np.float32)

    def encode_query(self, texts: list[str], /, *, show_progress_bar: bool) -> NDArray[np.float32]:
        """Return one vector per query, `[N, D]`."""
        return np.array([self._embeddings.embed_query(text) for text in texts], dtype=np.float32)
