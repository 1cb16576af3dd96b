"""Entries through retrievers that LangChain builds on others, and through the retriever tool."""

from __future__ import annotations

from typing import Any

from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MergerRetriever,
    MultiQueryRetriever,
    MultiVectorRetriever,
    ParentDocumentRetriever,
    RePhraseQueryRetriever,
    TimeWeightedVectorStoreRetriever,
)
from langchain_classic.retrievers.document_compressors import DocumentCompressorPipeline, LLMChainExtractor
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langchain_core.stores import InMemoryStore
from langchain_core.tools.retriever import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import CharacterTextSplitter

from langchain_invariant_rag import SEGMENT_PROMPT, as_segments

from .base import ALL, NOTHING, PASS_SEGMENTS, QUESTION, entry, joined, text_of
from .segments import history
from .texts import format_each, lcel

OVER = "a retriever over others, then `format_docs`"
TOOL = "`create_retriever_tool`, called in the run that asks"
SEARCH = "`vector_store.similarity_search`, no retriever"


class ListedStore(InMemoryVectorStore):
    """A vector store that finds everything, in the order in which it was added, and equally near."""

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return [found for found, _ in self.similarity_search_with_relevance_scores(query)]

    def similarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        stored = self.store.values()
        return [(Document(each["text"], id=each["id"], metadata=dict(each["metadata"])), 1.0) for each in stored]


def embeddings() -> DeterministicFakeEmbedding:
    return DeterministicFakeEmbedding(size=8)


def listed_store(retriever: Any) -> ListedStore:
    store = ListedStore(embeddings())
    store.add_documents(list(retriever.documents))  # no retriever runs: nothing is known from before
    return store


@entry(OVER, "`VectorStoreRetriever`", todo=NOTHING, models=ALL)
def vector_store_retriever(model: Any, retriever: BaseRetriever) -> str:
    return lcel(model, listed_store(retriever).as_retriever(), joined)


@entry(OVER, "`EnsembleRetriever`", todo=NOTHING, models=ALL)
def ensemble(model: Any, retriever: BaseRetriever) -> str:
    both = EnsembleRetriever(retrievers=[retriever, retriever], weights=[0.5, 0.5])
    return lcel(model, both, joined)


@entry(OVER, "`EnsembleRetriever` over `as_segments`", todo=NOTHING, models=ALL)
def ensemble_of_segments(model: Any, retriever: BaseRetriever) -> str:
    both = EnsembleRetriever(retrievers=[as_segments(retriever), as_segments(retriever)], weights=[0.5, 0.5])
    return lcel(model, both, joined)


@entry(OVER, "`MergerRetriever`", todo=NOTHING, models=ALL)
def merger(model: Any, retriever: BaseRetriever) -> str:
    other = retriever.model_copy(update={"documents": [Document("It rains in Brenn.")]})
    return lcel(model, MergerRetriever(retrievers=[retriever, other]), joined)


@entry(OVER, "`MultiQueryRetriever`", todo=NOTHING, models=ALL)
def multi_query(model: Any, retriever: BaseRetriever) -> str:
    several = MultiQueryRetriever.from_llm(retriever=retriever, llm=model, include_original=True)
    return lcel(model, several, joined)


@entry(OVER, "`RePhraseQueryRetriever`", todo=NOTHING, models=ALL)
def rephrased(model: Any, retriever: BaseRetriever) -> str:
    return lcel(model, RePhraseQueryRetriever.from_llm(retriever=retriever, llm=model), joined)


@entry(OVER, "`ContextualCompressionRetriever` that splits", todo=NOTHING, models=ALL)
def split_anew(model: Any, retriever: BaseRetriever) -> str:
    splitter = CharacterTextSplitter(separator=" ", chunk_size=20, chunk_overlap=0)
    pipeline = DocumentCompressorPipeline(transformers=[splitter])
    both = ContextualCompressionRetriever(base_compressor=pipeline, base_retriever=retriever)
    return lcel(model, both, format_each("- {text}", "\n"))


@entry(
    OVER,
    "`ContextualCompressionRetriever` with `LLMChainExtractor`",
    todo=NOTHING,
    models=("completion", "canonical", "vote"),  # what a random chat model extracts has no letters
)
def extracted(model: Any, retriever: BaseRetriever) -> str:
    extractor = LLMChainExtractor.from_llm(model)
    both = ContextualCompressionRetriever(base_compressor=extractor, base_retriever=retriever)
    return lcel(model, both, joined)


@entry(OVER, "`ParentDocumentRetriever`", todo=NOTHING, models=ALL)
def parents(model: Any, retriever: BaseRetriever) -> str:
    splitter = CharacterTextSplitter(separator=" ", chunk_size=15, chunk_overlap=0)
    store = ListedStore(embeddings())
    both = ParentDocumentRetriever(vectorstore=store, docstore=InMemoryStore(), child_splitter=splitter)
    both.add_documents(retriever.invoke(QUESTION))
    return lcel(model, both, joined)


@entry(OVER, "`MultiVectorRetriever`", todo=NOTHING, models=ALL)
def multi_vector(model: Any, retriever: BaseRetriever) -> str:
    found = retriever.invoke(QUESTION)
    store, parents = ListedStore(embeddings()), InMemoryStore()
    parents.mset([(each.page_content, each) for each in found])
    store.add_documents([Document(each.page_content[:9], metadata={"doc_id": each.page_content}) for each in found])
    return lcel(model, MultiVectorRetriever(vectorstore=store, docstore=parents), joined)


@entry(OVER, "`TimeWeightedVectorStoreRetriever`", todo=NOTHING, models=ALL)
def time_weighted(model: Any, retriever: BaseRetriever) -> str:
    recent = TimeWeightedVectorStoreRetriever(vectorstore=ListedStore(embeddings()), decay_rate=0.0)
    recent.add_documents(retriever.invoke(QUESTION))
    return lcel(model, recent, joined)


def tool_chain(model: Any, retriever: BaseRetriever, **options: Any) -> str:
    """Call the tool as an agent does, then the model, in one run."""
    tool = create_retriever_tool(retriever, "search", "Searches the town's records.", **options)

    def run(question: str) -> str:
        call = {"type": "tool_call", "name": "search", "args": {"query": question}, "id": "1"}
        return text_of(model.invoke(history(tool.invoke(call))))

    return RunnableLambda(run).invoke(QUESTION)


TOOL_MODELS = ("chat", "canonical", "vote")
TOOL_OPTIONS: dict[str, dict[str, Any]] = {
    "`content`": {"response_format": "content"},
    "`content_and_artifact`": {"response_format": "content_and_artifact"},
    "`document_separator`": {"document_separator": "\n---\n"},
    "`document_prompt=SEGMENT_PROMPT`": {"document_prompt": SEGMENT_PROMPT},
    "`SEGMENT_PROMPT` and a `document_separator`": {"document_prompt": SEGMENT_PROMPT, "document_separator": "\n---\n"},
}


def add_tools() -> None:
    """Register one entry for each set of options of the retriever tool."""
    for variant, options in TOOL_OPTIONS.items():
        entry(TOOL, variant, todo=NOTHING, models=TOOL_MODELS)(
            lambda model, retriever, options=options: tool_chain(model, retriever, **options)
        )


add_tools()


@entry(SEARCH, "numbered texts", todo=PASS_SEGMENTS, warns=True, models=ALL)
def numbered_search(model: Any, retriever: BaseRetriever) -> str:
    store = listed_store(retriever)
    found = RunnableLambda(store.similarity_search)
    return lcel(model, found, format_each("Document {n}: {text}"))
