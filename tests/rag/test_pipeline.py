"""Claims about RAG: documents in, an answer with citations out, whatever order the retriever lists chunks in."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from invariant_rag import RAG, Answer, InvariantModel, Segment
from invariant_rag.errors import RetrievalError, ToyModelWarning, UnknownName, UnsupportedCombination
from invariant_rag.rag.retrieval import RETRIEVERS, BM25Retriever, Retriever, index_documents

QUESTION = "Who built the mill of Brenn?"


class Shuffling:
    """Finds what another retriever finds, and lists it in another order every time."""

    def __init__(self, inner: Retriever) -> None:
        self.inner = inner
        self.random = random.Random(0)

    def retrieve(self, query: str, k: int) -> list[Segment]:
        found = self.inner.retrieve(query, k)
        return self.random.sample(found, len(found))


class Nothing:
    """Finds nothing."""

    def retrieve(self, query: str, k: int) -> list[Segment]:
        return []


@pytest.fixture(scope="module", params=[*RETRIEVERS])
def rag(request: pytest.FixtureRequest, docs: Path, model: InvariantModel) -> RAG:
    return RAG.from_documents(docs, model, request.param, k=4)


def test_ask_answers_as_the_model_does_on_the_retrieved_chunks(rag: RAG) -> None:
    answer = rag.ask(QUESTION, max_new_tokens=8)
    segments = rag.retriever.retrieve(QUESTION, 4)
    assert len(segments) == 4
    assert segments[0].title == "Mill"
    expected = rag.model.generate(rag.model.chat_prompt(QUESTION, segments), max_new_tokens=8)
    assert answer.generation == expected
    assert answer.text == expected.text
    assert list(answer.segments) == segments
    assert sorted(answer.order) == [0, 1, 2, 3]
    assert answer.timings.retrieve > 0
    assert answer.timings.generate > 0


def test_stream_gives_the_text_of_ask(rag: RAG) -> None:
    pieces = list(rag.stream(QUESTION, max_new_tokens=8))
    assert "".join(pieces) == rag.ask(QUESTION, max_new_tokens=8).text


def read_by(answer: Answer) -> list[Segment]:
    return [answer.segments[index] for index in answer.order]


def test_answers_ignore_the_order_in_which_the_retriever_lists_chunks(rag: RAG) -> None:
    first = rag.ask(QUESTION, max_new_tokens=8)
    shuffling = RAG(rag.model, Shuffling(rag.retriever), k=4)
    answers = [shuffling.ask(QUESTION, max_new_tokens=8) for _ in range(6)]
    assert len({tuple(segment.text for segment in answer.segments) for answer in answers}) > 1
    for answer in answers:
        assert answer.segments == first.segments
        assert read_by(answer) == read_by(first)
        assert answer.generation.token_ids == first.generation.token_ids
        assert answer.generation.logprobs == first.generation.logprobs
        assert [each.segment for each in answer.citations] == [each.segment for each in first.citations]


def test_answers_ignore_the_order_of_the_files(rag: RAG, docs: Path) -> None:
    files = sorted(docs.iterdir())
    forwards, backwards = (RAG.from_documents(each, rag.model, "bm25", k=3) for each in (files, files[::-1]))
    first, second = (each.ask(QUESTION, max_new_tokens=4) for each in (forwards, backwards))
    assert list(first.segments) == list(second.segments)
    assert first.generation == second.generation


def test_a_retriever_that_finds_nothing_still_gets_an_answer(model: InvariantModel) -> None:
    answer = RAG(model, Nothing()).ask("Anything?", max_new_tokens=4)
    assert answer.generation == model.generate(model.chat_prompt("Anything?", []), max_new_tokens=4)
    assert answer.citations == ()
    assert answer.order == ()


def test_the_system_message_reaches_the_model(docs: Path, model: InvariantModel) -> None:
    prompt = RAG.from_documents(docs, model, "bm25", system="Answer in one word.").prompt(QUESTION)
    assert "Answer in one word." in str(prompt.prefix)


def test_documents_and_model_can_be_named_by_path(docs: Path, tiny_folder: Path) -> None:
    rag = RAG.from_documents([docs / "mill.md"], tiny_folder, "bm25", method="pine", ordering="score")
    assert (rag.model.method.name, rag.model.ordering.name) == ("pine", "score")
    assert len(rag.ask(QUESTION, max_new_tokens=2).segments) == 1


def test_a_retriever_can_be_a_function_over_chunks(docs: Path, model: InvariantModel) -> None:
    chunks: list[Segment] = []

    def build(segments: list[Segment]) -> Retriever:
        chunks.extend(segments)
        return BM25Retriever(segments)

    RAG.from_documents(docs, model, build, max_chars=40)
    assert len(chunks) > 5
    assert max(len(chunk.text) for chunk in chunks) <= 40


def test_an_answer_becomes_json(rag: RAG) -> None:
    answer = rag.ask(QUESTION, max_new_tokens=4)
    document = json.loads(json.dumps(answer.as_dict()))
    assert document["answer"] == answer.text
    assert document["order"] == list(answer.order)
    assert document["usage"]["completion_tokens"] == len(answer.generation.token_ids)
    assert [each["title"] for each in document["segments"]] == [segment.title for segment in answer.segments]


def test_chunks_that_the_model_never_read_are_not_cited(
    tmp_path: Path, model: InvariantModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "long.txt").write_text("The mill of Brenn was built by Ada Kolm. " * 1000)
    (tmp_path / "short.txt").write_text("The mill of Brenn is old.")
    generate = InvariantModel.generate

    def answered(lm: InvariantModel, prompt: Any, **options: Any) -> Any:
        return replace(generate(lm, prompt, **options), text="Ada Kolm")

    monkeypatch.setattr(InvariantModel, "generate", answered)
    dropping, trimming = (
        RAG.from_documents(tmp_path, model.with_method(overflow=choice), "bm25", max_chars=100_000)
        for choice in ("drop_last", "trim_segments")
    )
    answer = dropping.ask(QUESTION, max_new_tokens=1)
    (long,) = (index for index, each in enumerate(answer.segments) if "Kolm" in each.text)
    assert answer.citations == ()
    assert (answer.as_dict()["dropped"], answer.as_dict()["trimmed"]) == ([long], [])
    answer = trimming.ask(QUESTION, max_new_tokens=1)
    assert [each.index for each in answer.citations] == [long]
    assert (answer.as_dict()["dropped"], answer.as_dict()["trimmed"]) == ([], [long])


@pytest.mark.parametrize("retriever", ["fais", "", None, "bm25:MODEL"])
def test_an_unknown_retriever_is_refused_with_the_list_of_names(docs: Path, retriever: Any) -> None:
    with pytest.raises(UnknownName, match="'bm25', 'faiss'"):
        RAG.from_documents(docs, retriever=retriever)


@pytest.mark.parametrize("wrong", [{"method": "rotr"}, {"ordering": "lexcal"}, {"overflow": "eror"}, {"metod": "pine"}])
def test_a_misspelt_choice_is_refused_before_anything_is_read(wrong: dict[str, str]) -> None:
    with pytest.raises(UnknownName, match="did you mean"):
        RAG.from_documents("no-such-folder", **wrong)


def test_options_for_a_model_that_is_loaded_already_are_refused(docs: Path, model: InvariantModel) -> None:
    with pytest.raises(UnsupportedCombination, match="method"):
        RAG.from_documents(docs, model, method="pine")


def test_documents_without_a_model_are_answered_by_a_toy_that_says_so(docs: Path) -> None:
    with pytest.warns(ToyModelWarning, match="knows only made-up places") as caught:
        RAG.from_documents(docs)
    assert [each.filename for each in caught] == [__file__]


def test_a_missing_folder_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="nowhere"):
        RAG.from_documents(tmp_path / "nowhere", "no-such-model")


def test_documents_without_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(RetrievalError, match=r"documents with text, got none in .*empty\.txt"):
        index_documents(tmp_path / "empty.txt")


def test_bm25_retrieves_unless_told_and_faiss_takes_a_model_by_name(docs: Path) -> None:
    assert isinstance(index_documents(docs), BM25Retriever)
    with pytest.raises(RetrievalError, match="'no-such/embedder' is neither in the local cache nor on the hub"):
        index_documents(docs, "faiss:no-such/embedder")


def test_fewer_than_one_chunk_is_refused(model: InvariantModel) -> None:
    with pytest.raises(RetrievalError, match="at least 1, got 0"):
        RAG(model, Nothing(), k=0)
