"""Tools: calls that always parse, whatever the weights, and histories with their calls and results."""

from __future__ import annotations

import asyncio
from itertools import permutations
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.tools import ToolCall, ToolCalling
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda

from langchain_invariant_rag import ChatInvariant, InvariantLLM, Segments, canonical

from .shared import DOCUMENTS, QUESTION
from .tool_models import Departure, Writing, joined, now, said, search


@pytest.fixture(scope="module", params=["knows tools", "does not"])
def chat(request: Any, spoken: InvariantModel, lm: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=spoken if request.param == "knows tools" else lm, max_tokens=160, sort_segments=False)


# --- calls ----------------------------------------------------------------------------------------------------------


OPENAI_CHOICE = {"type": "function", "function": {"name": "search"}}
ANTHROPIC_CHOICE = {"type": "tool", "name": "search"}


@pytest.mark.parametrize("choice", ["any", "required", True, "search", OPENAI_CHOICE, ANTHROPIC_CHOICE])
def test_a_forced_answer_is_calls_that_parse(chat: ChatInvariant, choice: Any) -> None:
    answer = chat.bind_tools([search, now], tool_choice=choice, parallel_tool_calls=False).invoke(QUESTION)
    assert answer.tool_calls
    assert (answer.content, answer.invalid_tool_calls) == ("", [])
    for call in answer.tool_calls:
        {"search": search, "now": now}[call["name"]].invoke(call["args"])
    if choice not in ("any", "required", True):
        assert {call["name"] for call in answer.tool_calls} == {"search"}
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    assert answer.usage_metadata["output_tokens"] <= 160
    assert {block["type"] for block in answer.content_blocks} == {"tool_call"}


def test_tools_of_every_kind_are_taken(chat: ChatInvariant) -> None:
    def add(one: int, two: int) -> int:
        """Add."""
        return one + two

    described = {"type": "function", "function": {"name": "described", "parameters": Departure.model_json_schema()}}
    tools = [search, add, Departure, described]
    for name in ("search", "add", "Departure", "described"):
        answer = chat.bind_tools(tools, tool_choice=name, strict=True, parallel_tool_calls=False).invoke(QUESTION)
        assert [call["name"] for call in answer.tool_calls] == [name]
    assert chat.invoke(QUESTION, tools=[add], tool_choice="any").tool_calls


def test_calls_are_parallel_unless_that_is_not_wanted(chat: ChatInvariant) -> None:
    twice = ToolCalling(chat.lm).form.call_format.write([ToolCall("", "search", {"query": "ferry", "limit": 3})] * 2)
    for parallel, expected in ((None, 2), (True, 2), (False, 1)):
        bound = chat.bind_tools([search, now], tool_choice="any", parallel_tool_calls=parallel)
        writing = Writing(chat.lm, f"{twice}<|im_end|>")
        calls = bound.invoke(QUESTION, max_tokens=300, logits_processor=[writing]).tool_calls
        assert [call["args"] for call in calls] == [{"query": "ferry", "limit": 3}] * expected
        assert len({call["id"] for call in calls}) == expected


def test_a_stream_of_calls_is_what_invoke_returns(chat: ChatInvariant) -> None:
    bound = chat.bind_tools([search, now], tool_choice="any")
    expected = said(bound.invoke(QUESTION, documents=DOCUMENTS))
    chunks = list(bound.stream(QUESTION, documents=DOCUMENTS))
    assert said(joined(chunks)) == expected
    pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert len(pieces) > 3
    assert [piece["name"] for piece in pieces if piece["name"]] == [call["name"] for call in expected["calls"]]

    async def collected() -> list[Any]:
        return [chunk async for chunk in bound.astream(QUESTION, documents=DOCUMENTS)]

    assert said(asyncio.run(bound.ainvoke(QUESTION, documents=DOCUMENTS))) == expected
    assert said(joined(asyncio.run(collected()))) == expected


@pytest.mark.parametrize("room", [60, 110, 150])
def test_parallel_calls_that_run_out_of_room_say_so_and_none_looks_complete(chat: ChatInvariant, room: int) -> None:
    form = ToolCalling(chat.lm).form.call_format
    calls = [ToolCall("", "search", {"query": f"ferry {n}", "limit": 3}) for n in range(4)]
    models = [chat.model_copy(update={"max_tokens": room, **more}) for more in ({}, {"streaming": True})]
    bound = [each.bind_tools([search], tool_choice="any") for each in models]
    whole, streamed = (each.invoke(QUESTION, logits_processor=[Writing(chat.lm, form.write(calls))]) for each in bound)
    joint = joined(list(bound[0].stream(QUESTION, logits_processor=[Writing(chat.lm, form.write(calls))])))
    assert whole.response_metadata["finish_reason"] == "length"
    assert [each["args"] for each in whole.tool_calls] == [
        dict(each.arguments) for each in calls[: len(whole.tool_calls)]
    ]
    assert len(whole.tool_calls) < 4
    for other in (streamed, joint):
        assert said(other) == said(whole)
        assert other.invalid_tool_calls == whole.invalid_tool_calls


def test_a_completion_model_has_no_tools(lm: InvariantModel) -> None:
    with pytest.raises(UnsupportedCombination, match="expected a prompt without tools"):
        InvariantLLM(model=lm).invoke(QUESTION, tools=[search])


def test_tools_are_counted_and_cached_with_the_prompt(thinker: ChatInvariant, llm_cache: Any) -> None:
    bound = thinker.bind_tools([search], tool_choice="any")
    answer = bound.invoke(QUESTION)
    counted = thinker.get_num_tokens_from_messages([HumanMessage(QUESTION)], tools=[search])
    assert (
        counted
        == answer.usage_metadata["input_tokens"]
        > thinker.get_num_tokens_from_messages([HumanMessage(QUESTION)])
    )
    thinker.bind_tools([now], tool_choice="any").invoke(QUESTION)
    assert len(llm_cache._cache) == 2
    again = bound.invoke(QUESTION)
    assert (again.tool_calls, again.id) == (answer.tool_calls, again.id)
    assert len(llm_cache._cache) == 2


# --- histories ------------------------------------------------------------------------------------------------------

CALL = {"name": "search", "args": {"query": "ferry", "limit": 3}, "id": "call_1", "type": "tool_call"}


def written(lm: InvariantModel, messages: list[dict[str, Any]]) -> str:
    generation = lm.generate(lm.chat_prompt(messages=messages), max_new_tokens=8)
    return generation.text


def test_calls_and_results_keep_their_roles(thinker: ChatInvariant) -> None:
    calls, reasoning = [CALL, {**CALL, "id": "call_2"}], {"reasoning_content": "Hm."}
    history = [
        SystemMessage("Be brief."),
        HumanMessage(QUESTION),
        AIMessage("I search.", tool_calls=calls, additional_kwargs=reasoning),
        ToolMessage("one", tool_call_id="call_1", name="search"),
        ToolMessage("two", tool_call_id="call_2", name="search"),
        HumanMessage("And?"),
    ]
    expected = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "I search.", "tool_calls": calls, **reasoning},
        {"role": "tool", "content": "one", "tool_call_id": "call_1", "name": "search"},
        {"role": "tool", "content": "two", "tool_call_id": "call_2", "name": "search"},
        {"role": "user", "content": "And?"},
    ]
    answer = thinker.invoke(history, max_tokens=8)
    assert answer.content == written(thinker.lm, expected)
    assert answer.content != written(thinker.lm, [{**each, "reasoning_content": ""} for each in expected])
    assert answer.content != written(thinker.lm, [*expected[:3], *expected[4:]])


def test_results_stand_in_the_order_of_their_calls(chat: ChatInvariant) -> None:
    found = {"call_1": DOCUMENTS[:2], "call_2": DOCUMENTS[2:], "call_3": []}
    results = [ToolMessage(str(Segments(each)), tool_call_id=call) for call, each in found.items()]

    def asked(model: Any, listed: Any, calls: Any = found) -> str:
        called = AIMessage("", tool_calls=[{**CALL, "id": call} for call in calls])
        return str(model.invoke([HumanMessage(QUESTION), called, *listed, HumanMessage("So?")], max_tokens=8).content)

    assert len({asked(chat, order) for order in permutations(results)}) == 1
    assert asked(chat, results) != asked(chat, results, ["call_2", "call_1", "call_3"])  # another order of the calls
    sent: list[list[str]] = []

    def send(messages: list[Any], **_: Any) -> AIMessage:
        sent.append([each.tool_call_id for each in messages if isinstance(each, ToolMessage)])
        return AIMessage("ok")

    asked(canonical(RunnableLambda(send)), results[::-1])
    assert sent == [[*found]]


def test_the_answer_of_a_model_is_a_history_for_the_next_call(chat: ChatInvariant) -> None:
    bound = chat.bind_tools([search], tool_choice="any", parallel_tool_calls=False)
    whole, chunk = bound.invoke(QUESTION), joined(list(bound.stream(QUESTION)))
    results = [search.invoke(call) for call in whole.tool_calls]
    answers = {
        str(chat.invoke([HumanMessage(QUESTION), each, *results], max_tokens=8).content) for each in (whole, chunk)
    }
    assert len(answers) == 1


def test_an_error_of_a_tool_is_said_to_be_one(thinker: ChatInvariant) -> None:
    def asked(text: str, **status: Any) -> Any:
        result = ToolMessage(text, tool_call_id="call_1", **status)
        return thinker.invoke([HumanMessage("a"), AIMessage("", tool_calls=[CALL]), result], max_tokens=8).content

    assert asked("no such file", status="error") == asked("Error: no such file") != asked("no such file")
    assert asked("Error: no such file", status="error") == asked("Error: no such file")
