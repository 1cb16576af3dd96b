"""What an audit finds out about models of this package, and about LangChain's runnables and agents."""

from __future__ import annotations

import re
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.audit import Audit, Question, audit
from invariant_rag.audit.systems import as_system
from invariant_rag.errors import AuditFailed, UnsupportedCombination
from invariant_rag.segments import Segment
from langchain_core.language_models.llms import LLM
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langgraph.graph import START, MessagesState, StateGraph

from langchain_invariant_rag import ChatInvariant, InvariantLLM, canonical, vote

from .plain_models import Reader

QUESTIONS = [
    {"question": f"Which is number {number}?", "segments": [f"{name} {number}" for name in ("one", "two", "three")]}
    for number in range(3)
]
ASKED = Question("Who?", (Segment("It was Ann.", "Page"), Segment("Nobody.")), ("Ann",))


class TextReader(LLM):
    """A completion model that answers with the first document that it reads."""

    @property
    def _llm_type(self) -> str:
        return "reader"

    def _call(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        return re.findall(r"Document: (.*)", prompt)[0]


def flips(found: Audit) -> float:
    return len(found.flips) / len(found.asked)


@pytest.mark.parametrize("wrap", [canonical, vote])
@pytest.mark.parametrize("reader", [Reader(), TextReader()])
def test_wrapped_models_are_given_marked_documents(reader: Any, wrap: Any) -> None:
    assert flips(audit(reader, QUESTIONS, remedies=[])) == 1.0
    assert flips(audit(wrap(reader), QUESTIONS, remedies=[])) == 0.0


@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
def test_our_models_keep_every_answer_with_their_own_parameters(kind: Any, lm: InvariantModel) -> None:
    assert flips(audit(kind(model=lm, max_tokens=4), QUESTIONS, remedies=[])) == 0.0
    model = kind(model=lm, max_tokens=3, temperature=0.9, seed=1, stop=["x"], generation_kwargs={"top_k": 5})
    system = as_system(model)
    sampling = {"do_sample": True, "temperature": 0.9, "seed": 1, "top_k": 5}
    assert system.generation == {"max_new_tokens": 3, **sampling, "stop_strings": ["x"]}
    assert system.name != as_system(model.model_copy(update={"temperature": 0.8})).name
    assert as_system(model, generation={"max_new_tokens": 2}).generation["max_new_tokens"] == 2


def said(system: Any, **options: Any) -> str:
    return as_system(system, **options).ask(ASKED, ASKED.segments).text


def test_chains_get_what_their_input_schema_says_and_agents_a_message() -> None:
    def of_text(text: str) -> str:
        return text

    def of_mapping(given: dict[str, Any]) -> AIMessage:
        return AIMessage(f"{given['question']} {given['context'][0].page_content}")

    def of_nothing_declared(given):  # type: ignore[no-untyped-def]
        return {"answer": of_mapping(given)}

    def reply(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(f"Seen: {state['messages'][-1].content}")]}

    template = ChatPromptTemplate.from_template("{context} Question: {question}")
    for chain in (
        RunnableLambda(of_text),
        RunnableLambda(of_nothing_declared),
        RunnableLambda(lambda text: text.strip()),
        RunnableLambda(of_mapping),
        template | RunnableLambda(lambda value: value.to_string()),
        ChatPromptTemplate.from_template("{text}") | RunnableLambda(lambda value: value.to_string()),
        StateGraph(MessagesState).add_node("reply", reply).add_edge(START, "reply").compile(),
    ):
        assert "Who?" in said(chain)
        assert "It was Ann." in said(chain)
    with pytest.raises(UnsupportedCombination, match="nothing is known of tone"):
        as_system(ChatPromptTemplate.from_template("{context} {question} {tone}") | RunnableLambda(str))
    assert said(RunnableLambda(of_text), to_input=lambda question, segments: question) == "Who?"


def test_a_chain_that_never_sees_the_documents_is_refused() -> None:
    def answer(given: dict[str, Any]) -> dict[str, str]:
        return {"answer": given["question"]}

    with pytest.raises(AuditFailed, match="does not read the documents it is given") as refused:
        audit(RunnableLambda(answer), QUESTIONS)
    assert "behind the retriever" in refused.value.hint
    seen = RunnableLambda(lambda given: f"{given['input']} {given['context'][0].page_content}")
    assert flips(audit(seen, QUESTIONS, remedies=[])) == 1.0
