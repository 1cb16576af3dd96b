"""What an audit makes of LangChain's runnables and language models, whoever wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from invariant_rag.errors import AuditFailed
from invariant_rag.evaluation.audit import Audit, audit
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda

AS_IS = "as it is"
PAIRS = [{"question": f"q{n}", "segments": [f"good {n}", f"bad {n}"], "gold": 0, "pairwise": True} for n in range(4)]


def records(count: int) -> list[dict[str, Any]]:
    """Questions of which one segment, not always the same, holds the answer; no two segments are equal."""
    return [
        {
            "id": f"q{number}",
            "question": f"What is number {number}?",
            "segments": [
                f"Number {number} is right{number}." if place == number % 4 else f"Nothing {number} {place}."
                for place in range(4)
            ],
            "answers": [f"right{number}"],
        }
        for number in range(count)
    ]


def flips(found: Audit) -> float:
    return found[AS_IS].measures["flip_rate"].value


def test_langchain_runnables_and_language_models_are_recognised() -> None:
    chain = RunnableLambda(lambda given: {"answer": given["context"][0].page_content, "seen": given["question"]})
    result = audit(chain, records(4))
    assert result[AS_IS].measures["slot_spread"].value == 1.0

    counted = RunnableLambda(
        lambda text: AIMessage(
            [{"type": "text", "text": "right0"}],
            usage_metadata={"input_tokens": len(text), "output_tokens": 1, "total_tokens": len(text) + 1},
        )
    )
    result = audit(counted, records(1), to_input=lambda question, segments: question)
    assert result[AS_IS].measures["accuracy"].value == 1.0
    assert result[AS_IS].measures["tokens"].value == len("What is number 0?") + 1

    assert flips(audit(FakeListChatModel(responses=["always"]), records(2))) == 0.0
    picks_a = audit(FakeListChatModel(responses=["[[A]]"]), PAIRS, remedies=[])
    assert picks_a[AS_IS].measures["preference_fairness"].value == -1.0


def test_a_chain_that_never_sees_the_documents_is_refused(tmp_path: Path) -> None:
    calls = []

    def answer(given: dict[str, Any]) -> dict[str, str]:
        calls.append(given)
        return {"answer": given["question"]}

    blind = RunnableLambda(answer)
    for _ in range(2):
        with pytest.raises(AuditFailed, match="does not read the segments it is given") as refused:
            audit(blind, records(6), out=tmp_path)
        assert "combine chain" in refused.value.hint
    assert len(calls) == 6  # that of an audit goes on from its folder, too
    assert flips(audit(blind, records(6), to_input=lambda question, segments: {"question": question})) == 0.0
    calls.clear()
    with pytest.raises(AuditFailed, match="no question was asked in full"):
        audit(blind, records(6), budget=4)
    assert len(calls) == 4


def test_a_probe_refuses_no_chain_that_reads_its_documents() -> None:
    def right(given: dict[str, Any]) -> str:
        return next(each.page_content for each in given["context"] if "right" in each.page_content)

    assert flips(audit(RunnableLambda(right), records(4))) == 0.0  # it fails where no document is right
    assert flips(audit(RunnableLambda(lambda given: "I don't know."), records(4))) == 0.0


def test_changed_chains_of_langchain_are_told_apart(tmp_path: Path) -> None:
    def chain(template: str) -> Any:
        joined = RunnableLambda(lambda given: {"documents": given["context"][0].page_content, **given})
        return joined | PromptTemplate.from_template(template) | RunnableLambda(lambda prompt: prompt.text)

    audit(chain("Say {documents}"), records(2), remedies=[], out=tmp_path)
    assert audit(chain("Repeat {documents}"), records(2), remedies=[], out=tmp_path).reused.answers == 0
    again = audit(chain("Say {documents}"), records(2), remedies=[], out=tmp_path)
    assert again.reused.answers == again.calls
