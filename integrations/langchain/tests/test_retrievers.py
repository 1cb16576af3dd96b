"""Retrievers and vector stores, end to end: FAISS, LangChain's in-memory store, Qdrant in local mode."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from invariant_rag import InvariantModel, Segment
from invariant_rag.errors import RetrievalError
from invariant_rag.rag.retrieval import FaissRetriever
from invariant_rag.testing.rounding import rounding
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_qdrant import QdrantVectorStore
from pydantic import ValidationError

from langchain_invariant_rag import (
    ChatInvariant,
    InvariantEmbeddings,
    InvariantRetriever,
    SegmentsPlaceholder,
    as_segments,
)

from .shared import DOCUMENTS, ORDERS, QUESTION, Listed

PROMPT = ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])


@pytest.fixture(scope="module")
def embeddings() -> InvariantEmbeddings:
    return InvariantEmbeddings()


@pytest.fixture(scope="module")
def chat(lm: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=lm, max_tokens=8, sort_segments=False)


def stores(documents: list[Document], embeddings: InvariantEmbeddings) -> dict[str, Any]:
    memory = InMemoryVectorStore.from_documents(documents, embeddings)
    qdrant = QdrantVectorStore.from_documents(documents, embeddings, location=":memory:", collection_name="ferry")
    return {
        "FAISS": InvariantRetriever.from_documents(documents, k=3),
        "in memory": memory.as_retriever(search_kwargs={"k": 3}),
        "Qdrant": qdrant.as_retriever(search_kwargs={"k": 3}),
    }


def test_answers_do_not_depend_on_the_order_of_the_corpus(chat: ChatInvariant, embeddings: InvariantEmbeddings) -> None:
    answers = set()
    for documents in (ORDERS[0], ORDERS[3], ORDERS[5]):
        for name, retriever in stores(documents, embeddings).items():
            chain = {"context": as_segments(retriever), "question": RunnablePassthrough()} | PROMPT | chat
            answer = chain.invoke(QUESTION)
            assert len(answer.response_metadata["order"]) == 3, name
            answers.add(answer.content)
    assert len(answers) == 1


def test_a_vector_does_not_depend_on_its_neighbours(embeddings: InvariantEmbeddings) -> None:
    texts = [document.page_content for document in DOCUMENTS]
    together = embeddings.embed_documents(texts)
    assert together == embeddings.embed_documents(texts[::-1])[::-1]
    assert together == [embeddings.embed_documents([text])[0] for text in texts]
    batched = InvariantEmbeddings(batch_size=8).embed_documents(texts)
    bound = rounding(embeddings.embed_documents, texts)
    assert batched == [pytest.approx(vector, abs=bound) for vector in together]


def test_our_retriever_returns_what_the_core_finds() -> None:
    segments = [Segment("The ferry leaves at noon.", title="Ferry", metadata={"page": 2}), Segment("Two bakeries.")]
    core = FaissRetriever(segments)
    found = InvariantRetriever(retriever=core, k=2).invoke(QUESTION)
    (first, second) = core.retrieve(QUESTION, 2)
    assert [document.page_content for document in found] == [first.text, second.text]
    assert found[0].metadata == {"page": 2, "title": "Ferry", "score": first.score}
    assert len(InvariantRetriever(retriever=core).invoke(QUESTION, k=1)) == 1
    with pytest.raises(ValidationError, match="retrieve"):
        InvariantRetriever(retriever="no retriever")


def test_our_retriever_takes_an_embedder(embeddings: InvariantEmbeddings) -> None:
    texts = [document.page_content for document in DOCUMENTS]
    named, given = (
        InvariantRetriever.from_documents(texts, **each) for each in ({}, {"embedder": embeddings._embedder})
    )
    assert given.invoke(QUESTION) == named.invoke(QUESTION)
    with pytest.raises(RetrievalError, match="expected an embedder"):
        InvariantRetriever.from_documents(texts, embedder=3)


def test_chunks_of_one_source_are_joined_in_its_order() -> None:
    for documents in ORDERS:
        chunks = [each for each in documents if "start_index" in each.metadata] + [Document("alone")]
        found = as_segments(Listed(documents=chunks), join_by="source").invoke("")
        joined = "The lighthouse was built by Teso Carno.\nOstra has two bakeries."
        assert {each.page_content for each in found} == {joined, "alone"}
    with pytest.raises(RetrievalError, match="start_index"):
        as_segments(Listed(documents=DOCUMENTS), join_by="source").invoke("")


def test_equal_chunks_and_documents_keep_the_metadata_of_the_same_one_in_any_order() -> None:
    chunks = [
        Document("a", metadata={"source": "s", "start_index": 0, "title": "T"}),
        Document("a", metadata={"source": "s", "start_index": 0, "title": "U"}),
        Document("b", metadata={"source": "s", "start_index": 5}),
    ]
    nested = [Document("a", metadata={"k": {"x": 1, "y": 2}}), Document("a", metadata={"k": {"y": 2, "x": 1}})]
    for documents, join_by in ((chunks, "source"), (nested, None)):
        found = {
            tuple(sorted(map(repr, as_segments(Listed(documents=list(order)), join_by=join_by).invoke(""))))
            for order in permutations(documents)
        }
        assert len(found) == 1


@pytest.mark.parametrize("wrong", [{"start_index": None}, {"start_index": "0"}, {"source": ["s"]}])
def test_chunks_whose_place_is_no_number_or_whose_source_is_no_text_are_refused(wrong: dict[str, Any]) -> None:
    place = {"source": "s", "start_index": 0}
    chunks = [Document("a", metadata={**place, **wrong}), Document("b", metadata=place)]
    with pytest.raises(RetrievalError, match="expected chunks with a number as 'start_index' and a text as 'source'"):
        as_segments(Listed(documents=chunks), join_by="source").invoke("")
