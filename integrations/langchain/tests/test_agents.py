"""Agents and graphs with tools: their answers ignore the order of what a tool found.

An agent asks its model several times, so it is asked in three orders of the documents; test_tools.py asks every one.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from invariant_rag import InvariantModel
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import create_retriever_tool, tool
from langgraph.checkpoint.memory import InMemorySaver

from langchain_invariant_rag import ChatInvariant

from .shared import QUESTION, Listed
from .tool_models import SOME_ORDERS, WRITTEN, Departure, Writing, distinct, ended, joined, said, search


@pytest.fixture(scope="module", params=["knows tools", "does not"])
def chat(request: Any, spoken: InvariantModel, lm: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=spoken if request.param == "knows tools" else lm, max_tokens=120, sort_segments=False)


@wrap_model_call
def search_once(request: ModelRequest[Any], handler: Any) -> Any:
    """Ask for a call of a tool first, and then for a short answer: random weights do neither by themselves."""
    searched = any(isinstance(message, ToolMessage) for message in request.messages)
    short: dict[str, Any] = {"tool_choice": "none", "model_settings": {"max_tokens": 8}}
    return handler(request.override(**short if searched else {"tool_choice": "any"}))


def calling(chat: ChatInvariant) -> ChatInvariant:
    """Return a model that searches once, and then says what it likes."""
    text = '<tool_call>\n{"name": "records", "arguments": {"query": "ferry"}}\n</tool_call>'
    return chat.model_copy(update={"generation_kwargs": ended(chat.lm, text)})


def retriever_tool(documents: list[Any], **options: Any) -> Any:
    return create_retriever_tool(Listed(documents=documents), "records", "Search the harbour's records.", **options)


def searching_tool(documents: list[Any]) -> Any:
    @tool(response_format="content_and_artifact")
    def records(query: str) -> Any:
        """Search the harbour's records."""
        return "\n\n".join(f"Source: {each.metadata}\nContent: {each.page_content}" for each in documents), documents

    return records


TOOLS: dict[str, Any] = {
    "content": retriever_tool,
    "content_and_artifact": lambda documents: retriever_tool(documents, response_format="content_and_artifact"),
    "of the tutorial": searching_tool,
}


@pytest.mark.parametrize("kind", TOOLS)
def test_an_agent_with_a_retriever_tool_ignores_the_order_of_what_it_found_in_its_second_turn_too(
    chat: ChatInvariant, kind: str
) -> None:
    def asked(documents: list[Any], method: str = "rotor") -> list[list[AIMessage]]:
        model = calling(chat.model_copy(update={"method": method}))
        agent: Any = create_agent(
            model, [TOOLS[kind](documents)], middleware=[search_once], checkpointer=InMemorySaver()
        )
        thread = {"configurable": {"thread_id": "1"}}
        turns = [agent.invoke({"messages": [("human", text)]}, thread)["messages"] for text in (QUESTION, "Sure?")]
        assert [each.type for each in turns[1]] == ["human", "ai", "tool", "ai", "human", "ai"]
        return [[each for each in turn if each.type == "ai"] for turn in turns]

    ours = [asked(documents) for documents in SOME_ORDERS]
    for *_, last in ours[0]:
        assert (last.response_metadata["sets"], last.response_metadata["invariant"]) == ([3], True)
    assert len({repr([list(map(said, turn)) for turn in turns]) for turns in ours}) == 1
    plain = [asked(documents, "sequential") for documents in SOME_ORDERS]
    for turn in range(2):  # the text of the plain model shows the order
        assert len({turns[turn][-1].text for turns in plain}) > 1


@pytest.mark.parametrize("strategy", [ToolStrategy(Departure), ProviderStrategy(Departure), Departure], ids=str)
def test_an_agent_with_tools_answers_with_an_object(chat: ChatInvariant, strategy: Any) -> None:
    @wrap_model_call
    def object_last(request: ModelRequest[Any], handler: Any) -> Any:
        searched = any(isinstance(message, ToolMessage) for message in request.messages)
        changes: dict[str, Any] = {"tools": []} if searched else {"response_format": None, "tool_choice": "any"}
        return handler(request.override(**changes, model_settings={"parallel_tool_calls": False}))

    def asked(documents: list[Any]) -> Any:
        tools = [retriever_tool(documents)]
        agent: Any = create_agent(calling(chat), tools, middleware=[object_last], response_format=strategy)
        result = agent.invoke({"messages": [("human", QUESTION)]})
        assert isinstance(result["structured_response"], Departure)
        return result["structured_response"], [said(each) for each in result["messages"] if each.type == "ai"]

    assert distinct(asked, SOME_ORDERS) == 1


def test_with_tools_and_a_schema_an_answer_is_calls_or_an_object(chat: ChatInvariant) -> None:
    bound = chat.bind_tools([search], **ProviderStrategy(Departure).to_model_kwargs())
    departure = '<tool_call>\n{"name": "Departure", "arguments": {"vessel": "ferry", "hour": 12}}\n</tool_call>'
    for text in (departure, WRITTEN):
        answer = bound.invoke(QUESTION, logits_processor=[Writing(chat.lm, text)])
        assert said(joined(list(bound.stream(QUESTION, logits_processor=[Writing(chat.lm, text)])))) == said(answer)
        if text is WRITTEN:
            assert (answer.content, answer.tool_calls[0]["args"]) == ("", {"query": "ferry", "limit": 3})
        else:
            assert Departure.model_validate_json(str(answer.content)) == Departure(vessel="ferry", hour=12)
            assert (answer.tool_calls, answer.response_metadata["finish_reason"]) == ([], "stop")
    forced = chat.bind_tools([search], tool_choice="any", response_format=Departure).invoke(QUESTION)
    assert {call["name"] for call in forced.tool_calls} == {"search"}
    none = chat.bind_tools([search], tool_choice="none", response_format=Departure).invoke([HumanMessage(QUESTION)])
    assert Departure.model_validate(json.loads(str(none.content)))
