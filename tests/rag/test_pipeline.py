"""Claims about RAG: documents in, an answer with citations out, whatever order the retriever lists chunks in."""

import json
import random
from dataclasses import replace

import pytest

from invariant_rag import RAG, InvariantModel
from invariant_rag.errors import RetrievalError, ToyModelWarning, UnknownName, UnsupportedCombination
from invariant_rag.rag.retrieval import RETRIEVERS, BM25Retriever, index_documents

QUESTION = "Who built the mill of Brenn?"


class Listing:
    """Finds what another retriever finds, and lists it in another order every time; None: nothing."""

    def __init__(self, inner):
        self.inner, self.random = inner, random.Random(0)

    def retrieve(self, query, k):
        found = self.inner.retrieve(query, k) if self.inner else []
        return self.random.sample(found, len(found))


@pytest.fixture(scope="module", params=[*RETRIEVERS])
def rag(request, docs, model):
    return RAG.from_documents(docs, model, request.param, k=4)


def test_ask_answers_as_the_model_does_on_the_retrieved_chunks_and_so_does_stream(rag):
    answer = rag.ask(QUESTION, max_new_tokens=8)
    segments = rag.retriever.retrieve(QUESTION, 4)
    assert (len(segments), segments[0].title) == (4, "Mill")
    expected = rag.model.generate(rag.model.chat_prompt(QUESTION, segments), max_new_tokens=8)
    assert (answer.generation, answer.text, list(answer.segments)) == (expected, expected.text, segments)
    assert sorted(answer.order) == [0, 1, 2, 3]
    assert min(answer.timings.retrieve, answer.timings.generate) > 0
    assert "".join(rag.stream(QUESTION, max_new_tokens=8)) == answer.text
    document = json.loads(json.dumps(answer.as_dict()))
    assert (document["answer"], document["order"]) == (answer.text, list(answer.order))
    assert document["usage"]["completion_tokens"] == len(answer.generation.token_ids)
    assert [each["title"] for each in document["segments"]] == [segment.title for segment in answer.segments]


def test_answers_ignore_the_order_in_which_the_retriever_lists_chunks(rag):
    def all_of(answer):
        read = [answer.segments[index] for index in answer.order]
        cited = [each.segment for each in answer.citations]
        return answer.segments, read, cited, answer.generation.token_ids, answer.generation.logprobs

    expected = all_of(rag.ask(QUESTION, max_new_tokens=8))
    listing = RAG(rag.model, Listing(rag.retriever), k=4)
    for _ in range(4):
        assert all_of(listing.ask(QUESTION, max_new_tokens=8)) == expected


def test_a_retriever_that_finds_nothing_still_gets_an_answer(model):
    answer = RAG(model, Listing(None)).ask("Anything?", max_new_tokens=4)
    assert answer.generation == model.generate(model.chat_prompt("Anything?", []), max_new_tokens=4)
    assert (answer.citations, answer.order) == ((), ())


def test_documents_and_model_can_be_named_by_path_and_a_retriever_can_be_a_function(docs, tiny_folder):
    chunks = []

    def build(segments):
        chunks.extend(segments)
        return BM25Retriever(segments)

    options = {"max_chars": 40, "system": "Answer in one word.", "method": "pine", "ordering": "score"}
    rag = RAG.from_documents([docs / "mill.md"], tiny_folder, build, **options)
    assert (rag.model.method.name, rag.model.ordering.name) == ("pine", "score")
    assert len(chunks) == len(rag.ask(QUESTION, max_new_tokens=2).segments) > 1
    assert max(len(chunk.text) for chunk in chunks) <= 40
    assert "Answer in one word." in str(rag.prompt(QUESTION).prefix)


def test_chunks_that_the_model_never_read_are_not_cited(tmp_path, model, monkeypatch):
    (tmp_path / "long.txt").write_text("The mill of Brenn was built by Ada Kolm. " * 1000)
    (tmp_path / "short.txt").write_text("The mill of Brenn is old.")
    generate = InvariantModel.generate

    def answered(lm, prompt, **options):
        return replace(generate(lm, prompt, **options), text="Ada Kolm")

    monkeypatch.setattr(InvariantModel, "generate", answered)
    for overflow, key, others in (("drop_last", "dropped", "trimmed"), ("trim_segments", "trimmed", "dropped")):
        rag = RAG.from_documents(tmp_path, model.with_method(overflow=overflow), "bm25", max_chars=100_000)
        answer = rag.ask(QUESTION, max_new_tokens=1)
        (long,) = (index for index, each in enumerate(answer.segments) if "Kolm" in each.text)
        assert [each.index for each in answer.citations] == ([] if key == "dropped" else [long])
        assert (answer.as_dict()[key], answer.as_dict()[others]) == ([long], [])


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        *(({"retriever": name}, UnknownName, "'bm25', 'faiss'") for name in ("fais", "", None, "bm25:MODEL")),
        *(({name: "eror"}, UnknownName, "choose from") for name in ("method", "ordering", "overflow")),
        ({"metod": "pine"}, UnknownName, "did you mean"),
        ({"model": "no-such-model"}, RetrievalError, "no-such-folder"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_before_anything_is_read(wrong, error, said):
    with pytest.raises(error, match=said):
        RAG.from_documents("no-such-folder", **wrong)


def test_bm25_and_a_toy_answer_unless_told_and_what_cannot_be_indexed_is_refused(docs, tmp_path, model):
    assert isinstance(index_documents(docs), BM25Retriever)
    with pytest.warns(ToyModelWarning, match="knows only made-up places") as caught:  # without a model, a toy answers
        RAG.from_documents(docs)
    assert [each.filename for each in caught] == [__file__]
    (tmp_path / "empty.txt").write_text(" \n")
    for call, error, said in (
        (lambda: RAG.from_documents(docs, model, method="pine"), UnsupportedCombination, "method"),
        (lambda: RAG(model, Listing(None), k=0), RetrievalError, "at least 1, got 0"),
        (lambda: index_documents(docs, "faiss:no-such/embedder"), RetrievalError, "got no-such/embedder: it is not in"),
        (lambda: index_documents(tmp_path / "empty.txt"), RetrievalError, r"documents with text, got none in .*empty"),
    ):
        with pytest.raises(error, match=said):
            call()
