"""Retrievers whose documents keep their boundaries: an adapter for any retriever, and the one over invariant-rag's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from invariant_rag.errors import RetrievalError
from invariant_rag.rag.retrieval import FaissRetriever, Retriever
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field, PlainValidator

from langchain_invariant_rag.documents import Segments, to_document, to_segment, to_segments


class SegmentsRetriever(BaseRetriever):
    """What `as_segments` returns."""

    retriever: BaseRetriever
    """What finds the documents."""
    join_by: str | None = None
    """Metadata key of the source whose chunks become one segment."""
    position: str = "start_index"
    """Metadata key of a chunk's place in its source."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> Segments:
        found = self.retriever.invoke(query, config={"callbacks": run_manager.get_child()}, **kwargs)
        return self._arranged(found)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> Segments:
        found = await self.retriever.ainvoke(query, config={"callbacks": run_manager.get_child()}, **kwargs)
        return self._arranged(found)

    def _arranged(self, documents: Iterable[Document]) -> Segments:
        kept = list(_distinct(documents))
        return Segments(kept if self.join_by is None else _joined(kept, self.join_by, self.position))


def _distinct(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield one document of each content: of equal ones the same, whatever order they come in."""
    alike: dict[str, list[Document]] = {}
    for document in documents:
        alike.setdefault(to_segment(document).content_hash, []).append(document)
    for each in alike.values():
        yield min(each, key=lambda document: to_segment(document).canonical_key)


def _joined(documents: Sequence[Document], source: str, position: str) -> Iterator[Document]:
    """Yield one document for each source: its chunks in source order. One without a source stays on its own."""
    yield from (document for document in documents if source not in document.metadata)
    chunks: dict[Any, list[Document]] = {}
    for document in documents:
        if source in document.metadata:
            if position not in document.metadata:
                raise RetrievalError(
                    f"expected chunks with {position!r} in their metadata, got {sorted(document.metadata)}",
                    hint="Split with add_start_index=True, or name the key: as_segments(..., position=...).",
                )
            chunks.setdefault(document.metadata[source], []).append(document)
    for each in chunks.values():
        each.sort(key=lambda document: (document.metadata[position], document.page_content))
        text = "\n".join(document.page_content for document in each)
        yield Document(page_content=text, metadata=each[0].metadata)


def as_segments(
    retriever: BaseRetriever, *, join_by: str | None = None, position: str = "start_index"
) -> BaseRetriever:
    """Return a retriever whose documents keep their boundaries wherever a prompt puts them.

    It works unchanged in `{"context": as_segments(retriever), ...} | prompt | llm`. Documents of equal content (title
    and text) are returned once.

    Args:
        retriever: Any retriever. Keywords of `invoke` are passed on to it.
        join_by: Metadata key of a source, such as `source`: its chunks become one segment, in source order, where they
            are to be read one after the other.
        position: Metadata key of a chunk's place in its source, as text splitters write it.
    """
    return SegmentsRetriever(retriever=retriever, join_by=join_by, position=position)


def _checked(value: Any) -> Any:
    if not callable(getattr(value, "retrieve", None)):
        raise ValueError(f"expected something with retrieve(query, k), such as FaissRetriever, got {type(value)}")
    return value


class InvariantRetriever(BaseRetriever):
    """A retriever of invariant-rag, such as `FaissRetriever`: the same list, bit for bit, whatever the corpus's order.

    A document's metadata has the `score`, and the `title` if there is one.
    """

    retriever: Annotated[Retriever, PlainValidator(_checked)]
    """What finds the segments."""
    k: int = Field(default=4, ge=1)
    """How many documents to return."""

    @classmethod
    def from_documents(cls, documents: Iterable[Any], *, k: int = 4, **kwargs: Any) -> InvariantRetriever:
        """Index documents with FAISS.

        Args:
            documents: Documents, segments or strings.
            k: How many documents to return.
            **kwargs: As for `FaissRetriever`: `embedder`, `show_progress`.
        """
        return cls(retriever=FaissRetriever(to_segments(documents), **kwargs), k=k)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None
    ) -> Segments:
        found = self.retriever.retrieve(query, self.k if k is None else k)
        return Segments(to_document(segment) for segment in found)
