"""Agents and graphs with tools: their answers ignore the order of what a tool found.

An agent asks its model several times, so it is asked in three orders of the documents; every order is asked in
test_tools.py and test_invariance.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from invariant_rag import InvariantModel
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.tools import create_retriever_tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from langchain_invariant_rag import ChatInvariant, InvariantRAGMiddleware

from .shared import DOCUMENTS, QUESTION, Listed
from .tool_models import SOME_ORDERS, WRITTEN, Departure, Writing, distinct, joined, said, search


@pytest.fixture(scope="module", params=["knows tools", "does not"])
def chat(request: Any, spoken: InvariantModel, lm: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=spoken if request.param == "knows tools" else lm, max_tokens=160, sort_segments=False)


@wrap_model_call
def search_once(request: ModelRequest[Any], handler: Any) -> Any:
    """Ask for a call of a tool first, and then for an answer: random weights do neither by themselves."""
    searched = any(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request.override(tool_choice="none" if searched else "any"))


def calling(chat: ChatInvariant, name: str) -> ChatInvariant:
    """Return a model that calls a tool once, and then says what it likes."""
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {{"query": "ferry"}}}}\n</tool_call><|im_end|>'
    end = chat.lm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    options = {"eos_token_id": end, "logits_processor": [Writing(chat.lm, text)]}
    return chat.model_copy(update={"generation_kwargs": options})


def retriever_tool(documents: list[Any], **options: Any) -> Any:
    return create_retriever_tool(Listed(documents=documents), "records", "Search the harbour's records.", **options)


@pytest.mark.parametrize("response_format", ["content", "content_and_artifact"])
def test_an_agent_with_a_retriever_tool_ignores_the_order_of_what_it_found(
    chat: ChatInvariant, response_format: Any
) -> None:
    def asked(documents: list[Any], method: str = "rotor") -> list[BaseMessage]:
        model = calling(chat.model_copy(update={"method": method, "max_tokens": 120}), "records")
        tools = [retriever_tool(documents, response_format=response_format)]
        agent: Any = create_agent(model, tools=tools, middleware=[search_once])
        return list(agent.invoke({"messages": [("human", QUESTION)]})["messages"])

    messages = asked(DOCUMENTS)
    assert [message.type for message in messages[:3]] == ["human", "ai", "tool"]
    assert messages[-1].response_metadata["sets"] == [3] * sum(each.type == "tool" for each in messages)
    assert messages[-1].response_metadata["invariant"]
    assert distinct(lambda documents: [said(each) for each in asked(documents) if each.type == "ai"], SOME_ORDERS) == 1
    assert distinct(lambda documents: asked(documents, "sequential")[-1].content, SOME_ORDERS) > 1


def test_a_graph_of_model_and_tool_node_ignores_the_order_of_what_it_found(thinker: ChatInvariant) -> None:
    def asked(documents: list[Any]) -> Any:
        tools = [retriever_tool(documents, response_format="content_and_artifact")]
        caller = calling(thinker, "records")

        def model(state: MessagesState) -> Any:
            searched = isinstance(state["messages"][-1], ToolMessage)
            bound = caller.bind_tools(tools, tool_choice="none" if searched else "any", parallel_tool_calls=False)
            return {"messages": [bound.invoke(state["messages"])]}

        graph: Any = StateGraph(MessagesState)
        graph.add_node("model", model)
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        messages = graph.compile().invoke({"messages": [("human", QUESTION)]})["messages"]
        assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
        return said(messages[-1])

    assert distinct(asked, SOME_ORDERS) == 1


FORMATS: dict[str, Any] = {"tool": ToolStrategy(Departure), "provider": ProviderStrategy(Departure), "auto": Departure}


@pytest.mark.parametrize("strategy", FORMATS)
def test_an_agent_with_tools_answers_with_an_object(chat: ChatInvariant, strategy: str) -> None:
    @wrap_model_call
    def object_last(request: ModelRequest[Any], handler: Any) -> Any:
        searched = any(isinstance(message, ToolMessage) for message in request.messages)
        last, first = {"tools": []}, {"response_format": None, "tool_choice": "any"}
        changes: dict[str, Any] = last if searched else first
        return handler(request.override(**changes, model_settings={"parallel_tool_calls": False}))

    def asked(documents: list[Any]) -> Any:
        agent: Any = create_agent(
            calling(chat, "records"),
            tools=[retriever_tool(documents)],
            middleware=[object_last],
            response_format=FORMATS[strategy],
        )
        result = agent.invoke({"messages": [("human", QUESTION)]})
        assert isinstance(result["structured_response"], Departure)
        return result["structured_response"], [said(each) for each in result["messages"] if each.type == "ai"]

    assert distinct(asked, SOME_ORDERS) == 1


def test_an_agent_without_tools_of_its_own_answers_through_one(chat: ChatInvariant) -> None:
    def asked(documents: list[Any]) -> Any:
        middleware = [InvariantRAGMiddleware(Listed(documents=documents))]
        agent: Any = create_agent(chat, tools=[], middleware=middleware, response_format=ToolStrategy(Departure))
        return agent.invoke({"messages": [("human", QUESTION)]})["structured_response"]

    assert isinstance(asked(DOCUMENTS), Departure)
    assert distinct(asked, SOME_ORDERS) == 1


def test_with_tools_and_a_schema_an_answer_is_calls_or_an_object(chat: ChatInvariant) -> None:
    bound = chat.bind_tools([search], **ProviderStrategy(Departure).to_model_kwargs())
    texts = {
        "object": '<tool_call>\n{"name": "Departure", "arguments": {"vessel": "ferry", "hour": 12}}\n</tool_call>',
        "call": WRITTEN,
    }
    for kind, text in texts.items():
        answer = bound.invoke(QUESTION, logits_processor=[Writing(chat.lm, text)])
        assert said(joined(list(bound.stream(QUESTION, logits_processor=[Writing(chat.lm, text)])))) == said(answer)
        if kind == "object":
            assert Departure.model_validate_json(str(answer.content)) == Departure(vessel="ferry", hour=12)
            assert (answer.tool_calls, answer.response_metadata["finish_reason"]) == ([], "stop")
        else:
            assert (answer.content, answer.tool_calls[0]["args"]) == ("", {"query": "ferry", "limit": 3})
    forced = chat.bind_tools([search], tool_choice="any", response_format=Departure).invoke(QUESTION)
    assert {call["name"] for call in forced.tool_calls} == {"search"}
    none = chat.bind_tools([search], tool_choice="none", response_format=Departure).invoke(QUESTION)
    assert Departure.model_validate(json.loads(str(none.content)))
