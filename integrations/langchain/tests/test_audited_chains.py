"""What an audit makes of LangChain's runnables and agents, whoever wrote them."""

from __future__ import annotations

from typing import Any

import pytest
from invariant_rag.audit import Question, audit
from invariant_rag.audit.systems import as_system
from invariant_rag.errors import AuditFailed, UnsupportedCombination
from invariant_rag.segments import Segment
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langgraph.graph import START, MessagesState, StateGraph

ASKED = Question("Who?", (Segment("It was Ann.", "Page"), Segment("Nobody.")), ("Ann",))


def records(count: int) -> list[dict[str, Any]]:
    """Questions of which one segment, not always the same, holds the answer; no two segments are equal."""
    return [
        {
            "question": f"What is number {number}?",
            "segments": [
                f"Number {number} is right{number}." if place == number % 4 else f"Nothing {number} {place}."
                for place in range(4)
            ],
            "answers": [f"right{number}"],
        }
        for number in range(count)
    ]


def said(system: Any, **options: Any) -> str:
    return as_system(system, **options).ask(ASKED, ASKED.segments).text


def test_chains_of_langchain_get_what_their_input_schema_says() -> None:

    def of_text(text: str) -> str:
        return text

    def of_mapping(given: dict[str, Any]) -> AIMessage:
        return AIMessage(f"{given['question']} {given['context'][0].page_content}")

    template = ChatPromptTemplate.from_template("{context} Question: {question}")

    def of_nothing_declared(given):  # type: ignore[no-untyped-def]
        return {"answer": AIMessage(f"{given['question']} {given['context'][0].page_content}")}

    for chain in (
        RunnableLambda(of_text),
        RunnableLambda(of_nothing_declared),
        RunnableLambda(lambda text: text.strip()),
        RunnableLambda(of_mapping),
        template | RunnableLambda(lambda value: value.to_string()),
        ChatPromptTemplate.from_template("{text}") | RunnableLambda(lambda value: value.to_string()),
    ):
        assert "Who?" in said(chain)
        assert "It was Ann." in said(chain)
    with pytest.raises(UnsupportedCombination, match="nothing is known of tone"):
        as_system(ChatPromptTemplate.from_template("{context} {question} {tone}") | RunnableLambda(str))
    assert said(RunnableLambda(of_text), to_input=lambda question, segments: question) == "Who?"


def test_agents_get_a_message_and_say_the_last_one() -> None:

    def reply(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(f"Seen: {state['messages'][-1].content}")]}

    graph = StateGraph(MessagesState)
    graph.add_node("reply", reply)
    graph.add_edge(START, "reply")
    assert "It was Ann." in said(graph.compile())


def test_a_chain_that_never_sees_the_documents_is_refused() -> None:

    def answer(given: dict[str, Any]) -> dict[str, str]:
        return {"answer": given["question"]}

    with pytest.raises(AuditFailed, match="does not read the documents it is given") as refused:
        audit(RunnableLambda(answer), records(6))
    assert "behind the retriever" in refused.value.hint
    assert audit(RunnableLambda(lambda given: "I don't know."), records(4)).screen.between == 0.0
