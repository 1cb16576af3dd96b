"""Retrievers and vector stores, end to end: FAISS, LangChain's in-memory store, Qdrant in local mode."""

import pickle
from itertools import permutations

import pytest
from invariant_rag import Segment
from invariant_rag.errors import RetrievalError
from invariant_rag.rag.retrieval import FaissRetriever
from invariant_rag.testing.rounding import rounding
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_qdrant import QdrantVectorStore

from langchain_invariant_rag import ChatInvariant, InvariantEmbeddings, InvariantRetriever, Segments, as_segments

from .shared import DOCUMENTS, PLACEHOLDER, QUESTION, SOME_ORDERS, TEXTS, WAYS, Listed, rag


@pytest.fixture(scope="module")
def embeddings():
    return InvariantEmbeddings()


def test_answers_do_not_depend_on_the_order_of_the_corpus(lm, embeddings):
    chat, answers = ChatInvariant(model=lm, max_tokens=8, sort_segments=False), set()
    for order in SOME_ORDERS:
        memory = InMemoryVectorStore.from_documents(order, embeddings)
        qdrant = QdrantVectorStore.from_documents(order, embeddings, location=":memory:", collection_name="ferry")
        retrievers = [each.as_retriever(search_kwargs={"k": 3}) for each in (memory, qdrant)]
        for retriever in (*retrievers, InvariantRetriever.from_documents(order, k=3)):
            answer = rag(chat, as_segments(retriever), list, PLACEHOLDER).invoke(QUESTION)
            assert len(answer.response_metadata["order"]) == 3, retriever
            answers.add(answer.content)
    assert len(answers) == 1


def test_a_vector_does_not_depend_on_its_neighbours_also_of_a_pickle(embeddings):
    together = embeddings.embed_documents(TEXTS)
    for each in (embeddings, pickle.loads(pickle.dumps(embeddings))):
        assert each.embed_documents(TEXTS[::-1])[::-1] == together
        assert [each.embed_documents([text])[0] for text in TEXTS] == together
    batched = InvariantEmbeddings(batch_size=8).embed_documents(TEXTS)
    bound = rounding(embeddings.embed_documents, TEXTS)
    assert batched == [pytest.approx(vector, abs=bound) for vector in together]
    assert embeddings.embed_query("a\ud83d") == embeddings.embed_query("a\ufffd")  # half of a surrogate pair


def test_our_retriever_returns_what_the_core_finds_with_any_embedder(embeddings):
    segments = [Segment("The ferry leaves at noon.", title="Ferry", metadata={"page": 2}), Segment("Two bakeries.")]
    core = FaissRetriever(segments)
    found = InvariantRetriever(retriever=core, k=2).invoke(QUESTION)
    (first, second) = core.retrieve(QUESTION, 2)
    assert [document.page_content for document in found] == [first.text, second.text]
    assert found[0].metadata == {"page": 2, "title": "Ferry", "score": first.score}
    assert len(InvariantRetriever(retriever=core).invoke(QUESTION, k=1)) == 1
    given = InvariantRetriever.from_documents(TEXTS, embedder=embeddings._embedder)
    assert given.invoke(QUESTION) == InvariantRetriever.from_documents(TEXTS).invoke(QUESTION)
    with pytest.raises(RetrievalError, match="expected an embedder"):
        InvariantRetriever.from_documents(TEXTS, embedder=3)


def chunk(text, start_index=0, source="s", **fields):
    return Document(text, metadata={"source": source, "start_index": start_index, **fields})


NESTED = [Document("a", metadata={"k": {"x": 1, "y": 2}}), Document("a", metadata={"k": {"y": 2, "x": 1}})]


@pytest.mark.parametrize(
    ("documents", "join_by", "expected"),
    [
        ([*DOCUMENTS, DOCUMENTS[0]], None, {*TEXTS}),
        ([chunk("two", 40), chunk("one"), Document("alone")], "source", {"one\ntwo", "alone"}),
        ([chunk("a", title="T"), chunk("a", title="U"), chunk("b", 5)], "source", {"a\nb"}),
        (NESTED, None, {"a"}),
    ],
)
def test_equal_documents_are_one_and_chunks_of_a_source_are_joined_alike_in_every_order(documents, join_by, expected):
    found = [as_segments(Listed(documents=each), join_by=join_by).invoke("") for each in permutations(documents)]
    assert len({tuple(sorted(map(repr, each))) for each in found}) == 1
    assert (len(found[0]), {each.page_content for each in found[0]}) == (len(expected), expected)


def test_segments_are_retrieved_in_every_way_with_the_keywords_of_the_call():
    found = [ask(as_segments(Listed()), QUESTION, k=2) for ask in WAYS.values()]
    assert found == [DOCUMENTS[:2]] * len(WAYS)
    assert set(map(type, found)) == {Segments}


@pytest.mark.parametrize("wrong", [{"start_index": None}, {"start_index": "0"}, {"source": ["s"]}])
def test_chunks_whose_place_is_no_number_or_whose_source_is_no_text_are_refused(wrong):
    with pytest.raises(RetrievalError, match="expected chunks with a number as 'start_index' and a text as 'source'"):
        as_segments(Listed(documents=[chunk("a", **wrong), chunk("b")]), join_by="source").invoke("")
