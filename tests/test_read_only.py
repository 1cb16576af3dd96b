"""Claims about orderings and methods, which never change, and about wrong arguments, which are typed errors."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from invariant_rag import RAG, InvariantModel, Judge, Segment
from invariant_rag.audit import audit
from invariant_rag.errors import ImmutableObject, InvariantRAGError
from invariant_rag.generation.citations import cite
from invariant_rag.methods import METHODS, resolve_method
from invariant_rag.methods.ape import APE
from invariant_rag.orderings import ORDERINGS, CrossEncoder, Embedding, MonoT5, resolve_ordering
from invariant_rag.rag import BM25Retriever
from invariant_rag.rag.pipeline import index_documents

SEGMENTS = [Segment("a mill"), Segment("a ferry")]
WRONG: list[Any] = [None, "3", b"", -1, 0, 1.5, math.nan, True, [], {}, object(), 10**400]


@pytest.mark.parametrize("kind", [*ORDERINGS.values(), *METHODS.values()])
def test_an_attribute_is_neither_assigned_nor_deleted(kind: Callable[[], Any]) -> None:
    for built in (kind(), copy.deepcopy(kind()), pickle.loads(pickle.dumps(kind()))):
        before = dict(vars(built))
        for name in ("name", "invariant", "new", *(each for each in before if not each.startswith("_"))):
            with pytest.raises(AttributeError):  # of a dataclass, or ours
                setattr(built, name, "other")
        with pytest.raises(AttributeError):
            del built.name
        assert {**vars(built), "_lock": 0} == {**before, "_lock": 0}


def test_the_error_says_what_never_changes() -> None:
    with pytest.raises(ImmutableObject, match="expected 'batch_size' of Embedding to be neither assigned nor deleted"):
        Embedding().batch_size = 3


def test_a_subclass_may_set_what_it_likes_while_it_is_built() -> None:
    class Mine(ORDERINGS["lexical"]):  # type: ignore[misc]
        def __init__(self) -> None:
            self.name = self.weight = "mine"

    assert Mine().weight == "mine"
    with pytest.raises(ImmutableObject):
        Mine().weight = "other"


class Fixed:
    def retrieve(self, query: str, k: int) -> list[Segment]:
        return SEGMENTS[:k]


def answer(question: str, segments: Any) -> str:
    return "x"


QUESTIONS = [{"question": "Q", "segments": ["a", "b"], "answers": ["a"]}]
ENTRIES: dict[str, Callable[[InvariantModel, Any], object]] = {
    "RAG model": lambda lm, wrong: RAG(wrong, Fixed()),
    "RAG retriever": RAG,
    "RAG k": lambda lm, wrong: RAG(lm, Fixed(), wrong),
    "RAG system": lambda lm, wrong: RAG(lm, Fixed(), system=wrong),
    "RAG ask": lambda lm, wrong: RAG(lm, Fixed()).ask(wrong, max_new_tokens=1),
    "documents": lambda lm, wrong: index_documents(wrong),
    "documents retriever": lambda lm, wrong: index_documents("README.md", wrong),
    "documents max_chars": lambda lm, wrong: index_documents("README.md", "bm25", max_chars=wrong),
    "documents overlap": lambda lm, wrong: index_documents("README.md", "bm25", overlap=wrong),
    "BM25": lambda lm, wrong: BM25Retriever(wrong),
    "BM25 query": lambda lm, wrong: BM25Retriever(SEGMENTS).retrieve(wrong, 1),
    "BM25 k": lambda lm, wrong: BM25Retriever(SEGMENTS).retrieve("mill", wrong),
    "cite answer": lambda lm, wrong: cite(wrong, "Q", SEGMENTS),
    "cite question": lambda lm, wrong: cite("mill", wrong, SEGMENTS),
    "method": lambda lm, wrong: resolve_method(wrong),
    "ordering": lambda lm, wrong: resolve_ordering(wrong),
    "APE temperature": lambda lm, wrong: APE(wrong),
    "APE scale": lambda lm, wrong: APE(0.9, wrong),
    "Embedding model": lambda lm, wrong: Embedding(wrong),
    "Embedding batch_size": lambda lm, wrong: Embedding(batch_size=wrong),
    "CrossEncoder model": lambda lm, wrong: CrossEncoder(wrong),
    "CrossEncoder device": lambda lm, wrong: CrossEncoder(device=wrong),
    "MonoT5 max_length": lambda lm, wrong: MonoT5(max_length=wrong),
    "MonoT5 true_word": lambda lm, wrong: MonoT5(true_word=wrong),
    "Judge": lambda lm, wrong: Judge(wrong),
    "Judge by": lambda lm, wrong: Judge(lm, by=wrong),
    "Judge criteria": lambda lm, wrong: Judge(lm, criteria=wrong),
    "Judge compare": lambda lm, wrong: Judge(lm).compare("Q", wrong, "b"),
    "Judge question": lambda lm, wrong: Judge(lm).compare(wrong, "a", "b"),
    "Judge reference": lambda lm, wrong: Judge(lm).compare("Q", "a", "b", reference=wrong),
    "Judge rank": lambda lm, wrong: Judge(lm).rank("Q", wrong),
    "Judge choose": lambda lm, wrong: Judge(lm).choose("Q", wrong),
    "audit system": lambda lm, wrong: audit(wrong, QUESTIONS),
    "audit questions": lambda lm, wrong: audit(answer, wrong),
    "audit out": lambda lm, wrong: audit(answer, QUESTIONS, out=None if isinstance(wrong, str) else wrong),
    "audit metric": lambda lm, wrong: audit(answer, QUESTIONS, metric=wrong),
    "audit judge": lambda lm, wrong: audit(answer, QUESTIONS, judge=wrong or b""),
    "audit remedies": lambda lm, wrong: audit(answer, QUESTIONS, remedies=wrong),
    "audit retriever": lambda lm, wrong: audit(answer, QUESTIONS, retriever=wrong),
    **{
        f"audit {name}": lambda lm, wrong, name=name: audit(answer, QUESTIONS, **{name: wrong})
        for name in ("margin", "k", "seed", "workers", "max_calls")
    },
}
HEAVY = {"audit workers": [10**400]}
"""Numbers that are right, and ask for more than a test has time for."""


@pytest.mark.parametrize("name", ENTRIES)
def test_a_wrong_argument_is_a_typed_error(name: str, model: InvariantModel) -> None:
    untyped = []
    for wrong in WRONG:
        if any(wrong is each or wrong == each for each in HEAVY.get(name, ())):
            continue
        try:
            ENTRIES[name](model, wrong)
        except InvariantRAGError:
            pass
        except Exception as error:  # noqa: BLE001 - that is what the test looks for
            untyped.append((type(wrong).__name__, repr(error)[:100]))
    assert not untyped
