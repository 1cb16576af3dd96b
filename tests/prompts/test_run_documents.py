"""Documents are known in the run that retrieved them, and nowhere else."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from invariant_rag import Segment
from invariant_rag.prompts import KnownDocument, RunDocuments


def known(*texts: str) -> list[KnownDocument]:
    return [KnownDocument.of(Segment(text)) for text in texts]


def texts_of(runs: RunDocuments, run: object) -> list[list[str]]:
    return [[each.segment.text for each in retrieval.documents] for retrieval in runs.of(run)]  # type: ignore[arg-type]


@pytest.fixture
def runs() -> RunDocuments:
    """A chain with a retriever and a model, and another chain."""
    runs = RunDocuments()
    for run, parent in (("chain", None), ("retriever", "chain"), ("model", "chain"), ("other", None)):
        runs.start(run, parent)
    return runs


def test_a_model_knows_what_its_chain_retrieved_and_another_chain_does_not(runs: RunDocuments) -> None:
    runs.add("retriever", known("a", "b"))
    runs.end("retriever")
    assert texts_of(runs, "model") == texts_of(runs, "chain") == [["a", "b"]]
    assert texts_of(runs, "other") == texts_of(runs, "unheard of") == texts_of(runs, None) == []
    assert [each.segment.text for each in runs.elsewhere("other")] == ["a", "b"]
    assert [each.segment.text for each in runs.elsewhere(None)] == ["a", "b"]
    assert runs.elsewhere("model") == ()


def test_documents_are_forgotten_when_the_root_run_ends(runs: RunDocuments) -> None:
    runs.add("retriever", known("a"))
    runs.end("chain")
    assert texts_of(runs, "model") == []
    runs.start("chain", None)
    assert texts_of(runs, "chain") == []


@pytest.mark.parametrize("ended", [True, False])
def test_a_retriever_replaces_what_the_retrievers_below_it_found(runs: RunDocuments, ended: bool) -> None:
    for run in ("one", "two"):
        runs.start(run, "retriever")
        runs.add(run, known(run))
        if ended:
            runs.end(run)
    assert texts_of(runs, "model") == [["one"], ["two"]]
    runs.add("retriever", known("two"))
    assert texts_of(runs, "model") == [["two"]]


def test_two_retrievals_of_a_run_are_two_and_an_empty_one_is_none(runs: RunDocuments) -> None:
    runs.start("second", "chain")
    runs.add("retriever", known("a"))
    runs.add("second", known("b"))
    runs.add("model", [])
    assert texts_of(runs, "model") == [["a"], ["b"]]
    runs.add("retriever", known("c"))
    assert sorted(texts_of(runs, "model")) == [["b"], ["c"]]


def test_a_run_that_is_its_own_parent_is_a_root() -> None:
    runs = RunDocuments()
    runs.start("loop", "loop")
    runs.start("a", "b")
    runs.start("b", "a")
    runs.add("loop", known("x"))
    runs.add("a", known("y"))
    assert texts_of(runs, "loop") == [["x"]]


def test_nothing_is_left_of_twenty_thousand_runs() -> None:
    runs = RunDocuments()
    for number in range(20_000):
        root, retriever = ("root", number), ("retriever", number)
        runs.start(root, None)
        runs.start(retriever, root)
        runs.add(retriever, known(str(number)))
        if number % 2:  # the others are abandoned
            runs.end(retriever)
            runs.end(root)
    assert len(runs._runs) <= 10_000
    assert len(runs.elsewhere(None)) == 256
    for number in range(20_000):
        runs.end(("root", number))
        runs.end(("retriever", number))
    assert len(runs._runs) == 0


def test_sixteen_threads_never_see_the_documents_of_each_other(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    runs = RunDocuments()

    def chain(number: int) -> bool:
        root, retriever, model = (number, "chain"), (number, "retriever"), (number, "model")
        runs.start(root, None)
        runs.start(retriever, root)
        runs.add(retriever, known(f"{number}"))
        runs.end(retriever)
        runs.start(model, root)
        mine = texts_of(runs, model)
        others = {each.segment.text for each in runs.elsewhere(model)}
        runs.end(model)
        runs.end(root)
        return mine == [[f"{number}"]] and f"{number}" not in others

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(chain, range(800)))
    assert len(runs._runs) == 0
