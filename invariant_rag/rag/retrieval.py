"""Retrieve chunks for a question: dense with FAISS, lexical with BM25.

Every retriever sorts its corpus by content before it builds an index, and breaks ties by content hash. So the list it
returns, scores included, is the same bit for bit in whatever order the corpus was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import numpy as np

from invariant_rag.errors import RetrievalError
from invariant_rag.models.embedders import DEFAULT_EMBEDDER, Embedder, load_embedder
from invariant_rag.rag.text import words
from invariant_rag.segments import Segment, encodable, plain_rendering

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ENCODING = Lock()
"""One encoding at a time: embedders may be shared, and a fast tokenizer keeps its padding and truncation as state."""


class Retriever(Protocol):
    """Anything that finds chunks for a question. To write your own, write this one method."""

    def retrieve(self, query: str, k: int) -> list[Segment]:
        """Return the best `k` chunks (all of them if there are fewer), best first, each with its `score` set."""
        ...


class FaissRetriever:
    """Rank by the cosine of sentence embeddings, exactly (FAISS `IndexFlatIP` over normalised vectors).

    Title and text are embedded together; identical chunks are embedded once. A chunk that is longer than the embedder
    reads (256 word pieces for the default one) is ranked by its beginning.

    Args:
        segments: The corpus.
        embedder: A sentence-transformers model, its hub id or its folder.
        show_progress: Show a progress bar while the corpus is embedded.

    Raises:
        RetrievalError: A segment has token ids instead of text, or the embedder was not found.
    """

    def __init__(
        self,
        segments: Iterable[Segment],
        embedder: Embedder | str | Path = DEFAULT_EMBEDDER,
        *,
        show_progress: bool = False,
    ) -> None:
        from faiss import IndexFlatIP

        self._copies = [list(each) for _, each in groupby(_canonical(segments), lambda segment: segment.content_hash)]
        self._embedder = load_embedder(embedder) if isinstance(embedder, str | Path) else embedder
        if self._copies:
            texts = [encodable(plain_rendering(copies[0])) for copies in self._copies]
            with _ENCODING:
                vectors = _normalised(self._embedder.encode_document(texts, show_progress_bar=show_progress))
            self._index = IndexFlatIP(vectors.shape[1])
            self._index.add(vectors)

    def retrieve(self, query: str, k: int) -> list[Segment]:
        """Return the `k` chunks with the largest cosine to the query; `score` is the cosine."""
        _check_k(k)
        if not self._copies:
            return []
        with _ENCODING:
            vector = _normalised(self._embedder.encode_query([encodable(query)], show_progress_bar=False))
        return list(islice(self._ranked(vector, k), k))

    def _ranked(self, vector: NDArray[np.float32], k: int) -> Iterator[Segment]:
        """Yield at least `k` chunks by score, then content hash, as long as there are so many."""
        found = k
        while True:
            # One more than needed: where the k-th and the next tie, more are fetched, so that the hash decides.
            found = min(found + 1, len(self._copies))
            scores, rows = self._index.search(vector, found)
            if found == len(self._copies) or scores[0, -1] < scores[0, k - 1]:
                break
            found *= 2
        for negative, row in sorted(zip(-scores[0], rows[0], strict=True)):
            yield from (replace(segment, score=-float(negative)) for segment in self._copies[row])


class BM25Retriever:
    """Rank by BM25 over the words of title and text, whatever their case (bm25s, Lucene's variant: k1 1.5, b 0.75).

    A character that is written without spaces, such as an ideograph, is a word.

    A chunk that has no word of the query scores 0 and comes after all that have one.

    Args:
        segments: The corpus.
        show_progress: Show a progress bar while the corpus is indexed.

    Raises:
        RetrievalError: A segment has token ids instead of text.
    """

    def __init__(self, segments: Iterable[Segment], *, show_progress: bool = False) -> None:
        from bm25s import BM25

        self._segments = _canonical(segments)
        texts = [words(plain_rendering(segment)) for segment in self._segments]
        vocabulary = {word: index for index, word in enumerate(sorted({word for each in texts for word in each}))}
        self._index = BM25() if vocabulary else None
        if self._index:
            ids = [[vocabulary[word] for word in each] for each in texts]
            self._index.index((ids, vocabulary), create_empty_token=False, show_progress=show_progress)

    def retrieve(self, query: str, k: int) -> list[Segment]:
        """Return the `k` chunks with the largest BM25 score."""
        _check_k(k)
        scores = np.zeros(len(self._segments), dtype=np.float32)
        if self._index:
            scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(words(query)))
        # The corpus is sorted by content hash, so a stable sort leaves ties in that order.
        best = np.argsort(-scores, kind="stable")[:k]
        return [replace(self._segments[index], score=float(scores[index])) for index in best]


def _canonical(segments: Iterable[Segment]) -> list[Segment]:
    """Sort by content hash; identical chunks by their metadata."""
    chosen = list(segments)
    if any(segment.token_ids is not None for segment in chosen):
        raise RetrievalError("expected segments with text, got one with token ids")
    return sorted(chosen, key=lambda segment: (segment.content_hash, segment.canonical_key))


def _normalised(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `[N, D]` vectors of length one, float32 and contiguous, as FAISS wants them. Zero stays zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.where(lengths == 0, 1, lengths), dtype=np.float32)


def _check_k(k: int) -> None:
    if k < 1:
        raise RetrievalError(f"k: expected at least 1, got {k}")
