"""Retrievers that return `Segments`: adapters for those of LangChain and of the core; and embeddings for both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from invariant_rag.checks import check_number
from invariant_rag.errors import RetrievalError
from invariant_rag.models.embedders import DEFAULT_EMBEDDER, Embedder, NamedEmbedder
from invariant_rag.rag.retrieval import FaissRetriever, Retriever
from invariant_rag.rag.text_splitting import join_chunks
from invariant_rag.segments import replace_surrogates
from invariant_rag.shown import shown
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from pydantic import Field

from langchain_invariant_rag.documents import Segments, to_document, to_segment, to_segments


class SegmentsRetriever(BaseRetriever):
    """The retriever that `as_segments` returns."""

    retriever: BaseRetriever
    join_by: str | None = None
    position: str = "start_index"

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> Segments:
        return self._to_segments(self.retriever.invoke(query, {"callbacks": run_manager.get_child()}, **kwargs))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> Segments:
        return self._to_segments(await self.retriever.ainvoke(query, {"callbacks": run_manager.get_child()}, **kwargs))

    def _to_segments(self, documents: Iterable[Document]) -> Segments:
        """Return one document per content hash: the one with the smallest canonical key, in any input order."""
        unique: dict[str, Document] = {}
        for each in documents:
            key = to_segment(each).content_hash
            unique[key] = min(unique.get(key, each), each, key=_content)
        return Segments(unique.values() if self.join_by is None else self._joined(list(unique.values()), self.join_by))

    def _joined(self, documents: Sequence[Document], source: str) -> Iterator[Document]:
        """Yield the documents without a source, then one for each source with its chunks in source order."""
        yield from (each for each in documents if source not in each.metadata)
        sources: dict[Any, list[Document]] = {}
        for each in documents:
            if source in each.metadata:
                offset, name = each.metadata.get(self.position), each.metadata[source]
                if not isinstance(offset, int) or not isinstance(name, str | int | float | None):
                    raise RetrievalError(
                        f"expected chunks with a number as {self.position!r} and a text as {source!r} in their "
                        f"metadata, got {shown(offset)} and {shown(name)}",
                        hint="Split with add_start_index=True, or set the keys: as_segments(..., position=...).",
                    )
                sources.setdefault(name, []).append(each)
        for chunks in sources.values():
            chunks.sort(key=lambda each: (each.metadata[self.position], each.page_content, *_content(each)))
            text = join_chunks((each.metadata[self.position], each.page_content) for each in chunks)
            yield Document(page_content=text, metadata=chunks[0].metadata)


def _content(document: Document) -> tuple[Any, ...]:
    """Return a sort key. Documents with equal ones are alike, to the order of what their metadata hold."""
    return (to_segment(document).canonical_key, repr(document.metadata))


def as_segments(
    retriever: BaseRetriever, *, join_by: str | None = None, position: str = "start_index"
) -> BaseRetriever:
    """Wrap a retriever so that its documents keep their boundaries in any prompt template.

    Documents with the same title and text are returned once.

    Args:
        retriever: Any retriever. Keywords of `invoke` are passed on to it.
        join_by: Metadata key of the source, such as `source`: the chunks of one source become one segment, in source
            order; text in which they overlap is not repeated. None: every chunk is a segment.
        position: Metadata key of a chunk's offset in its source, as written by text splitters.
    """
    return SegmentsRetriever(retriever=retriever, join_by=join_by, position=position)


class InvariantRetriever(BaseRetriever):
    """LangChain retriever for one of the core, such as `FaissRetriever`: the order of the corpus changes no result."""

    retriever: Retriever
    k: int = Field(default=4, ge=1)

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[Any],
        *,
        k: int = 4,
        embedder: Embedder | str | Path = DEFAULT_EMBEDDER,
        show_progress: bool = False,
    ) -> InvariantRetriever:
        """Index documents (also segments or strings) with FAISS.

        Args:
            documents: The documents. They are returned with their ids.
            k: Number of documents to return.
            embedder: A sentence-transformers model, its hub id or its folder.
            show_progress: Show a progress bar while embedding the documents.
        """
        return cls(retriever=FaissRetriever(to_segments(documents), embedder, show_progress=show_progress), k=k)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> Segments:
        segments = self.retriever.retrieve(query, self.k if k is None else k)
        return Segments(map(to_document, segments))


class InvariantEmbeddings(Embeddings):
    """Sentence embeddings, text by text: in a batch, the last bits of a vector depend on the other texts.

    Args:
        embedder: A sentence-transformers model, its hub id or its folder. Loaded on first use.
        batch_size: Texts per forward pass. More than one is faster, but near-equal search results may then change
            places with the order of the corpus.
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
