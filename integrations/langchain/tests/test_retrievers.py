"""Retrievers and vector stores, end to end: FAISS, LangChain's in-memory store, Qdrant in local mode."""

import pickle
from itertools import permutations

import pytest
from invariant_rag import Segment
from invariant_rag.errors import RetrievalError
from invariant_rag.rag.retrieval import FaissRetriever
from invariant_rag.testing.rounding import rounding
from langchain_core.documents import Document
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_qdrant import QdrantVectorStore

from langchain_invariant_rag import ChatInvariant, InvariantEmbeddings, InvariantRetriever, Segments, as_segments

from .shared import DOCUMENTS, PLACEHOLDER, QUESTION, SOME_ORDERS, WAYS, Listed

TEXTS = [document.page_content for document in DOCUMENTS]


@pytest.fixture(scope="module")
def embeddings():
    return InvariantEmbeddings()


def stores(documents, embeddings):
    memory = InMemoryVectorStore.from_documents(documents, embeddings)
    qdrant = QdrantVectorStore.from_documents(documents, embeddings, location=":memory:", collection_name="ferry")
    return {
        "FAISS": InvariantRetriever.from_documents(documents, k=3),
        "in memory": memory.as_retriever(search_kwargs={"k": 3}),
        "Qdrant": qdrant.as_retriever(search_kwargs={"k": 3}),
    }


def test_answers_do_not_depend_on_the_order_of_the_corpus(lm, embeddings):
    chat, answers = ChatInvariant(model=lm, max_tokens=8, sort_segments=False), set()
    for documents in SOME_ORDERS:
        for name, retriever in stores(documents, embeddings).items():
            chain = {"context": as_segments(retriever), "question": RunnablePassthrough()} | PLACEHOLDER | chat
            answer = chain.invoke(QUESTION)
            assert len(answer.response_metadata["order"]) == 3, name
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


class Counting(Listed):
    """Returns as many of its documents as it is told."""

    def _get_relevant_documents(self, query, *, run_manager, k=9):
        return list(self.documents)[:k]

    async def _aget_relevant_documents(self, query, *, run_manager, k=9):
        return list(self.documents)[:k]


CHUNKS = [each for each in DOCUMENTS if "start_index" in each.metadata]


def place(**other):
    return {"source": "s", "start_index": 0, **other}


ALIKE = [Document("a", metadata=place(title="T")), Document("a", metadata=place(title="U"))]
NESTED = [Document("a", metadata={"k": {"x": 1, "y": 2}}), Document("a", metadata={"k": {"y": 2, "x": 1}})]


@pytest.mark.parametrize(
    ("documents", "join_by", "expected"),
    [
        ([*DOCUMENTS, DOCUMENTS[0]], None, {*TEXTS}),
        ([*CHUNKS, Document("alone")], "source", {f"{TEXTS[2]}\n{TEXTS[1]}", "alone"}),
        ([*ALIKE, Document("b", metadata=place(start_index=5))], "source", {"a\nb"}),
        (NESTED, None, {"a"}),
    ],
)
def test_equal_documents_are_one_and_chunks_of_a_source_are_joined_alike_in_every_order(documents, join_by, expected):
    found = {
        tuple(sorted(map(repr, as_segments(Listed(documents=list(order)), join_by=join_by).invoke(""))))
        for order in permutations(documents)
    }
    assert len(found) == 1
    listed = as_segments(Listed(documents=documents), join_by=join_by).invoke("")
    assert (len(listed), {each.page_content for each in listed}) == (len(expected), expected)


def test_segments_are_retrieved_in_every_way_with_the_keywords_of_the_call():
    for way, ask in WAYS.items():
        listed = ask(as_segments(Counting(documents=DOCUMENTS)), QUESTION, k=2)
        assert isinstance(listed, Segments), way
        assert [each.page_content for each in listed] == TEXTS[:2]


@pytest.mark.parametrize("wrong", [{"start_index": None}, {"start_index": "0"}, {"source": ["s"]}])
def test_chunks_whose_place_is_no_number_or_whose_source_is_no_text_are_refused(wrong):
    chunks = [Document("a", metadata=place(**wrong)), Document("b", metadata=place())]
    with pytest.raises(RetrievalError, match="expected chunks with a number as 'start_index' and a text as 'source'"):
        as_segments(Listed(documents=chunks), join_by="source").invoke("")
