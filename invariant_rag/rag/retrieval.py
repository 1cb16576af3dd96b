"""Retrievers over segments: dense with FAISS, lexical with BM25.

Each retriever sorts its corpus by content hash before it builds the index, and breaks ties by content hash. Its
results, scores included, are bit-identical for every order of the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from invariant_rag.checks import check_flag, check_items, check_number, check_text, require_extra
from invariant_rag.errors import RetrievalError, UnknownName
from invariant_rag.models.embedders import DEFAULT_EMBEDDER, Embedder, NamedEmbedder, check_embedder
from invariant_rag.rag.documents import load_chunks, warn_skipped
from invariant_rag.segments import Segment, plain_rendering, replace_surrogates
from invariant_rag.shown import shown
from invariant_rag.words import split_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WITHOUT_FAISS = 'Or take the retriever "bm25", which needs no extra.'

_EMBEDDER_LOCK = Lock()
"""Held while embedding: embedders may be shared, and a fast tokenizer keeps its padding and truncation as state."""


@runtime_checkable
class Retriever(Protocol):
    """Interface of a retriever."""

    def retrieve(self, query: str, k: int) -> list[Segment]:
        """Return the `k` best chunks (or all, if there are fewer), best first, with their `score` set."""
        ...


class FaissRetriever:
    """Rank by cosine similarity of sentence embeddings, with exact search (FAISS `IndexFlatIP`, normalised vectors).

    Title and text are embedded together; identical chunks are embedded once. The embedder truncates long chunks (the
    default one to 256 word pieces). A pickle holds only the name of an embedder that was given by name.

    Args:
        segments: The corpus.
        embedder: A sentence-transformers model, its hub id or its folder.
        show_progress: Show a progress bar while embedding the corpus.

    Raises:
        RetrievalError: A segment has token ids instead of text, or the embedder is not found or is none.
        ExtraRequired: FAISS or sentence-transformers is not installed.
    """

    def __init__(
        self,
        segments: Iterable[Segment],
        embedder: Embedder | str | Path = DEFAULT_EMBEDDER,
        *,
        show_progress: bool = False,
    ) -> None:
        require_extra("faiss", "retrieval", hint=_WITHOUT_FAISS)
        from faiss import IndexFlatIP

        check_flag("show_progress", show_progress, error=RetrievalError)
        self._duplicates = [
            list(each) for _, each in groupby(_sort_by_content(segments), lambda segment: segment.content_hash)
        ]
        self._embedder = _resolve_embedder(embedder)
        if self._duplicates:
            texts = [replace_surrogates(plain_rendering(duplicates[0])) for duplicates in self._duplicates]
            with _EMBEDDER_LOCK:
                vectors = _normalize(self._embedder.encode_document(texts, show_progress_bar=show_progress), len(texts))
            self._index = IndexFlatIP(vectors.shape[1])
            self._index.add(vectors)

    def retrieve(self, query: str, k: int) -> list[Segment]:
        """Return the `k` chunks with the largest cosine similarity to the query, which is their `score`."""
        k = min(check_number("k", k, 1, error=RetrievalError), sum(map(len, self._duplicates)))
        check_text("query", query, error=RetrievalError)
        if not self._duplicates:
            return []
        with _EMBEDDER_LOCK:
            vector = _normalize(self._embedder.encode_query([replace_surrogates(query)], show_progress_bar=False), 1)
        if vector.shape[1] != self._index.d:
            raise RetrievalError(f"expected a query of {self._index.d} dimensions, got {vector.shape[1]}")
        return list(islice(self._ranked(vector, k), k))

    def _ranked(self, vector: NDArray[np.float32], k: int) -> Iterator[Segment]:
        """Yield at least `k` chunks (or all), by score, then content hash."""
        count = k
        while True:
            # One more than needed: while the k-th and the last tie, fetch more, so that the hash breaks the tie.
            count = min(count + 1, len(self._duplicates))
            scores, rows = self._index.search(vector, count)
            if count == len(self._duplicates) or scores[0, -1] < scores[0, k - 1]:
                break
            count *= 2
        for negative, row in sorted(zip(-scores[0], rows[0], strict=True)):
            yield from (replace(segment, score=-float(negative)) for segment in self._duplicates[row])


def _resolve_embedder(embedder: Embedder | str | Path) -> Embedder:
    if isinstance(embedder, str | Path):
        named = NamedEmbedder(embedder)
        named.load()  # what is not found is an error at once
        return named
    if not callable(getattr(embedder, "encode_document", None)):
        raise RetrievalError(
            f"expected an embedder with encode_document and encode_query, got {type(embedder).__name__}",
            hint="Give a sentence-transformers model, its hub id or its folder.",
        )
    return embedder


class BM25Retriever:
    """Rank by BM25 over the case-folded words of title and text (bm25s, Lucene's variant: k1 = 1.5, b = 0.75).

    In scripts without spaces each character is a word. Chunks without a word of the query have score 0.

    Args:
        segments: The corpus.
        show_progress: Show a progress bar while indexing the corpus.

    Raises:
        RetrievalError: A segment has token ids instead of text.
    """

    def __init__(self, segments: Iterable[Segment], *, show_progress: bool = False) -> None:
        from bm25s import BM25

        check_flag("show_progress", show_progress, error=RetrievalError)
        self._segments = _sort_by_content(segments)
        texts = [split_words(plain_rendering(segment)) for segment in self._segments]
        vocabulary = {word: index for index, word in enumerate(sorted({word for each in texts for word in each}))}
        self._index = BM25() if vocabulary else None
        if self._index:
            ids = [[vocabulary[word] for word in each] for each in texts]
            self._index.index((ids, vocabulary), create_empty_token=False, show_progress=show_progress)

    def retrieve(self, query: str, k: int) -> list[Segment]:
        """Return the `k` chunks with the largest BM25 score."""
        k = min(check_number("k", k, 1, error=RetrievalError), len(self._segments))
        check_text("query", query, error=RetrievalError)
        scores = np.zeros(len(self._segments), dtype=np.float32)
        if self._index:
            scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(split_words(query)))
        # The corpus is sorted by content hash, so a stable sort breaks ties by it.
        best = np.argsort(-scores, kind="stable")[:k]
        return [replace(self._segments[index], score=float(scores[index])) for index in best]


RetrieverFactory = Callable[[list[Segment]], Retriever]
RETRIEVERS: dict[str, RetrieverFactory] = {"faiss": FaissRetriever, "bm25": BM25Retriever}


def resolve_retriever(retriever: str | RetrieverFactory) -> RetrieverFactory:
    """Return what builds a retriever: a function as it is, or that of a name. Nothing is loaded.

    `faiss:MODEL` is the retriever `faiss` with another embedder.

    Raises:
        UnknownName: There is no retriever of that name.
        ExtraRequired: A package that it needs is not installed.
        RetrievalError: There is no such embedder.
    """
    if callable(retriever):
        return retriever
    name, colon, embedder = retriever.partition(":") if isinstance(retriever, str) else ("", "", "")
    if name not in RETRIEVERS or (colon and not (embedder and name == "faiss")):
        raise UnknownName("retriever", retriever, RETRIEVERS)
    if name == "faiss":
        require_extra("faiss", "retrieval", hint=_WITHOUT_FAISS)
        require_extra("sentence_transformers", "retrieval", hint=_WITHOUT_FAISS)
        check_embedder(embedder or DEFAULT_EMBEDDER)
    return partial(FaissRetriever, embedder=embedder) if embedder else RETRIEVERS[name]


def index_documents(
    paths: str | Path | Iterable[str | Path],
    retriever: str | RetrieverFactory = "bm25",
    *,
    max_chars: int = 1000,
    overlap: int = 0,
    strict: bool = False,
    on_skipped: Callable[[RetrievalError], object] = warn_skipped,
) -> Retriever:
    """Load and chunk documents, and build a retriever over the chunks.

    Arguments and errors are those of `RAG.from_documents` and, for `on_skipped`, of `load_documents`.
    """
    factory = resolve_retriever(retriever)
    return factory(load_chunks(paths, max_chars=max_chars, overlap=overlap, strict=strict, on_skipped=on_skipped))


def _sort_by_content(segments: Iterable[Segment]) -> list[Segment]:
    """Sort by content hash, and segments with the same hash by metadata and score."""
    corpus = check_items("segments", segments, Segment, error=RetrievalError)
    if any(segment.token_ids is not None for segment in corpus):
        raise RetrievalError("expected segments with text, got one with token ids", hint="Give segments with text.")
    return sorted(corpus, key=lambda segment: (segment.content_hash, segment.canonical_key))


def _normalize(vectors: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """Return `[N, D]` vectors of unit length as contiguous float32, for FAISS. Zero vectors stay zero.

    Raises:
        RetrievalError: The embedder returned something else than one vector of finite numbers for each text.
    """
    try:
        vectors = np.asarray(vectors, dtype=np.float32)
        usable = vectors.ndim == 2 and len(vectors) == count and vectors.size and bool(np.isfinite(vectors).all())
    except (TypeError, ValueError, OverflowError):
        usable = False
    if not usable:
        raise RetrievalError(
            f"expected {count} vectors of finite numbers from the embedder, got {shown(vectors)}",
            hint="Give another embedder.",
        )
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.where(lengths == 0, 1, lengths), dtype=np.float32)
