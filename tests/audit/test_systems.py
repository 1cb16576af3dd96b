"""Claims about what can be audited, and what an answer is; and about one prompt in many orders."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from invariant_rag import RAG, InvariantModel, Prompt
from invariant_rag.audit import Question, audit
from invariant_rag.audit.order_check import check_order
from invariant_rag.audit.systems import as_reply, as_system
from invariant_rag.errors import AuditFailed, InvalidPrompt, UnsupportedCombination
from invariant_rag.orderings import Given
from invariant_rag.rag.retrieval import BM25Retriever
from invariant_rag.segments import Segment
from tests.audit.known import records

ASKED = Question("Who?", (Segment("It was Ann.", "Page"), Segment("Nobody.")), ("Ann",))


@pytest.fixture(scope="module")
def plain(chat_llama, tokenizer):
    return InvariantModel(chat_llama, tokenizer, method="sequential")


def said(system, **options):
    return as_system(system, **options).ask(ASKED, ASKED.segments).text


class Functions:
    """Functions with annotations, and a callable object."""

    @staticmethod
    def of_texts(question: str, contexts: list[str]) -> str:
        return f"{question} {contexts[0]}"

    @staticmethod
    def of_text(question: str, context: str) -> str:
        return f"{question} {context}"

    @staticmethod
    def of_mapping(inputs: dict[str, Any]) -> dict[str, Any]:
        return {"answer": f"{inputs['question']} {inputs['context'][0]}", "sources": []}

    def __call__(self, question: str, temperature: float = 0.0, segments: Any = ()) -> str:
        return f"{question} {segments[0].text}"


@pytest.mark.parametrize(
    "system",
    [
        Functions.of_texts,
        Functions.of_text,
        Functions.of_mapping,
        Functions(),
        lambda text: text,
        lambda inputs: inputs["question"] + inputs["context"][0],  # refuses a text
        lambda documents, question: f"{question} {documents[0].text}",
        lambda *, question, documents, **others: f"{question} {documents[0].text}",
    ],
)
def test_a_callable_is_called_as_its_signature_says(system):
    assert "Who?" in said(system)
    assert "It was Ann." in said(system)


def test_a_function_of_something_else_is_refused():
    for system, message in ((lambda one, two, three: "x", r"got one of \['one', 'two', 'three'\]"), (3, "got int")):
        with pytest.raises(UnsupportedCombination, match=message):
            as_system(system)


MESSAGE = SimpleNamespace(content="Ann", usage_metadata={"total_tokens": 7})  # what a chat model returns
BLOCKS = {"content": [{"type": "text", "text": "A"}, {"type": "text", "text": "nn"}]}


def test_an_answer_is_found_in_whatever_holds_one_and_what_holds_none_is_refused_by_its_keys():
    holders = ["Ann", MESSAGE, {"answer": "Ann"}, {"output": MESSAGE}, {"result": {"text": "Ann"}}]
    holders += [{"messages": [{"content": "Who?"}, MESSAGE]}, BLOCKS]
    assert {as_reply(value).text for value in holders} == {"Ann"}
    assert as_reply({"output": MESSAGE}).tokens == 7
    for value, message in (({"docs": 3}, r"got a mapping with \['docs'\]"), ([], "got list"), (None, "got NoneType")):
        with pytest.raises(AuditFailed, match=message):
            as_reply(value)


def test_a_model_of_ours_is_tried_with_methods(plain):
    found = audit(plain, records(4, size=3), remedies=["sort", "rotor", "set-based"], generation={"max_new_tokens": 3})
    assert [each.fixes for each in found.comparisons] == [True] * 3
    invariant = audit(plain.with_method("rotor"), records(4, size=3), remedies=(), generation={"max_new_tokens": 3})
    assert not [each for each in invariant.asked if len({answer.text for answer in each.answers[3:]}) > 1]
    assert all(text in as_system(plain).sent(ASKED, ASKED.segments) for text in ("It was Ann.", "Who?"))


def test_a_rag_is_audited_with_what_its_retriever_finds_and_answers_end_before_a_stop(plain):
    rag = RAG(plain, BM25Retriever([Segment(text) for text in ("a mill", "a ferry", "a bridge")]), k=2)
    found = audit(rag, [{"question": "ferry", "answer": "ferry"}], generation={"max_new_tokens": 2})
    assert [len(each.question.segments) for each in found.asked] == [2]
    stop = (whole := said(plain, generation={"max_new_tokens": 6}))[2:4]
    assert said(plain, generation={"max_new_tokens": 6, "stop_strings": stop}) == whole[: whole.index(stop)]


PROMPT = Prompt("Documents: ", ["salt and copper ", "the river Senn ", "a mill in Brenn ", "noon "], "Where? ")


class Pretended(Given):
    """Says that it is invariant, and keeps the order given."""

    name: ClassVar[str] = "pretended"
    invariant: ClassVar[bool] = True


def test_an_invariant_model_gives_one_output_and_the_plain_model_several(model):
    steps = []
    told = nullcontext(lambda: steps.append(None))
    check = check_order(model, PROMPT, 6, progress=lambda label, total: told, max_new_tokens=8)
    assert (check.promised, check.identical, check.broken) == (True, True, False)
    assert [count for _, count in check.answers] == [7]
    assert check.plain_distinct >= len(check.plain_answers) > 1
    assert sum(count for _, count in check.plain_answers) == 7
    assert len(steps) == 14
    with pytest.raises(InvalidPrompt, match="at least 1, got 0"):
        check_order(model, PROMPT, 0)


def test_a_model_that_promises_nothing_breaks_nothing_and_a_broken_promise_is_seen(model):
    # One token: the order changes its probability long before it changes the token.
    plain = model.with_method("sequential", ordering="given")
    first, again, other = (check_order(plain, PROMPT, 4, seed=seed, max_new_tokens=1) for seed in (1, 1, 2))
    assert (first.promised, first.identical, first.broken) == (False, False, False)
    assert first.answers == first.plain_answers
    assert first.distinct > len(first.answers)
    assert first == again != other
    two = check_order(plain, Prompt("Documents: ", ["x ", "yy "], "Where? "), 4, max_new_tokens=1)
    assert (two.distinct, two.answers) == (2, (("B", 5),))  # the same token, with another probability
    broken = check_order(model.with_method("rotor", ordering=Pretended()), PROMPT, 4, max_new_tokens=1)
    assert (broken.promised, broken.broken, broken.identical) == (True, True, False)
