"""Tools: calls that always parse, whatever the weights, histories with calls and results, and agents."""

from functools import partial
from itertools import permutations
from typing import Any

import pytest
from framework_cases import Writing, call_text, ended
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.json_schema import validate_value
from invariant_rag.generation.structured import ToolCall, ToolCalling
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage, convert_to_messages
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.memory import InMemorySaver

from langchain_invariant_rag import ChatInvariant, InvariantLLM, Segments, canonical
from langchain_invariant_rag.documents import chat_messages, to_turn

from .models import Departure, now, search
from .shared import DOCUMENTS, QUESTION, SOME_ORDERS, Listed, distinct, said, searching


@pytest.fixture(scope="module")
def chat(spoken):
    return ChatInvariant(model=spoken, max_tokens=160, sort_segments=False)


def add(one: int, two: int) -> int:
    """Add."""
    return one + two


DESCRIBED = {"type": "function", "function": {"name": "described", "parameters": Departure.model_json_schema()}}
KINDS = {"search": search, "add": add, "Departure": Departure, "described": DESCRIBED}
"""Tools of every kind that LangChain knows, by name."""
CALL = {"name": "search", "args": {"query": "ferry", "limit": 3}, "id": "call_1", "type": "tool_call"}
OPENAI_CHOICE = {"type": "function", "function": {"name": "add"}}
ANTHROPIC_CHOICE = {"type": "tool", "name": "Departure"}


@pytest.mark.parametrize("choice", ["any", "required", True, *KINDS, OPENAI_CHOICE, ANTHROPIC_CHOICE], ids=str)
@pytest.mark.parametrize("template", ["knows tools", "does not"])
def test_a_forced_answer_is_a_call_that_parses(spoken, lm, template, choice):
    chat = ChatInvariant(model=spoken if template == "knows tools" else lm, max_tokens=160)
    bound = chat.bind_tools([*KINDS.values()], tool_choice=choice, strict=True, parallel_tool_calls=False)
    answer = bound.invoke(QUESTION)
    (call,) = answer.tool_calls
    named = {str(OPENAI_CHOICE): "add", str(ANTHROPIC_CHOICE): "Departure"}.get(str(choice), choice)
    assert call["name"] == named or named in ("any", "required", True)
    validate_value(call["args"], convert_to_openai_tool(KINDS[call["name"]])["function"]["parameters"])
    assert (answer.content, answer.invalid_tool_calls) == ("", [])
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    assert [block["type"] for block in answer.content_blocks] == ["tool_call"]


@pytest.mark.parametrize(("parallel", "expected"), [(None, 2), (True, 2), (False, 1)])
def test_calls_are_parallel_unless_that_is_not_wanted(chat, parallel, expected):
    twice = ToolCalling(chat.lm).form.call_format.write([ToolCall("", "search", CALL["args"])] * 2)
    bound = chat.bind_tools([search, now], tool_choice="any", parallel_tool_calls=parallel, max_tokens=300)
    calls = bound.invoke(QUESTION, **ended(chat.lm, twice)).tool_calls
    assert [call["args"] for call in calls] == [CALL["args"]] * expected
    assert len({call["id"] for call in calls}) == expected


def test_tools_are_counted_and_a_completion_model_has_none(chat, lm):
    asked = [HumanMessage(QUESTION)]
    counted = chat.get_num_tokens_from_messages(asked, tools=[search])
    assert counted == chat.bind_tools([search]).invoke(asked, max_tokens=1).usage_metadata["input_tokens"]
    assert counted > chat.get_num_tokens_from_messages(asked)
    with pytest.raises(UnsupportedCombination, match="expected a prompt without tools"):
        InvariantLLM(model=lm).invoke(QUESTION, tools=[search])


# --- histories ------------------------------------------------------------------------------------------------------


def test_calls_and_results_keep_their_roles(chat):
    calls = [CALL, {**CALL, "id": "call_2"}]
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "I search.", "tool_calls": calls, "reasoning_content": "Hm."},
        {"role": "tool", "content": "one", "tool_call_id": "call_1", "name": "search"},
        {"role": "tool", "content": "two", "tool_call_id": "call_2", "name": "search"},
        {"role": "user", "content": "And?"},
    ]
    history = convert_to_messages([*turns, ("human", "So?")])
    turns[-1]["content"] += "\nSo?"
    converted, _ = chat_messages(history, map(to_turn, history))
    assert [{**each, "content": "".join(each["content"])} for each in converted] == turns
    prompt = chat.lm.chat_prompt(messages=turns)
    assert chat.invoke(history, max_tokens=8).content == chat.lm.generate(prompt, max_new_tokens=8).text


def test_results_stand_in_the_order_of_their_calls(chat):
    found = {"call_1": DOCUMENTS[:2], "call_2": DOCUMENTS[2:], "call_3": []}
    results = [ToolMessage(str(Segments(each)), tool_call_id=call) for call, each in found.items()]

    def asked(listed, calls=found, model=chat):
        called = AIMessage("", tool_calls=[{**CALL, "id": call} for call in calls])
        return model.invoke([HumanMessage(QUESTION), called, *listed, HumanMessage("So?")], max_tokens=8).content

    assert len({asked(order) for order in permutations(results)}) == 1
    assert asked(results) != asked(results, ["call_2", "call_1", "call_3"])  # another order of the calls
    sent = canonical(RunnableLambda(lambda messages: messages[2]))  # says which result is the first
    assert {asked(order, model=sent) for order in permutations(results)} == {asked(results, model=sent)}


def test_an_error_of_a_tool_is_said_to_be_one(chat):
    def asked(text, **status):
        result = ToolMessage(text, tool_call_id="call_1", **status)
        return chat.invoke([HumanMessage("a"), AIMessage("", tool_calls=[CALL]), result], max_tokens=8).content

    assert asked("no such file", status="error") == asked("Error: no such file") != asked("no such file")
    assert asked("Error: no such file", status="error") == asked("Error: no such file")


# --- agents ---------------------------------------------------------------------------------------------------------


def of_the_tutorial(retriever):
    @tool("search", response_format="content_and_artifact")
    def search_records(query: str) -> Any:
        """Search the harbour's records."""
        found = retriever.documents
        return "\n\n".join(f"Source: {each.metadata}\nContent: {each.page_content}" for each in found), found

    return search_records


SEARCHING = {
    "content": searching,
    "content_and_artifact": partial(searching, response_format="content_and_artifact"),
    "of the tutorial": of_the_tutorial,
}


def agent(chat, searches, then, first, **options):
    """Make an agent that searches once: random weights do it neither by themselves, nor do they end."""

    @wrap_model_call
    def in_turn(request, handler):
        searched = any(isinstance(message, ToolMessage) for message in request.messages)
        return handler(request.override(**then if searched else {"tool_choice": "any", **first}))

    call = call_text("search", {"query": "ferry"})
    writing = Writing(chat.lm, lambda prompt: "" if "<|im_start|>tool" in prompt else f"{call}<|im_end|>")
    model = chat.model_copy(update={"generation_kwargs": {**ended(chat.lm, ""), "logits_processor": [writing]}})
    return create_agent(model, [searches], middleware=[in_turn], **options)


@pytest.mark.parametrize("kind", SEARCHING)
def test_an_agent_ignores_the_order_of_what_its_tool_found_in_its_second_turn_too(chat, kind):
    def asked(documents, method="rotor"):
        model, short = chat.model_copy(update={"method": method}), {"model_settings": {"max_tokens": 8}}
        then = {"tool_choice": "none", **short}
        made = agent(model, SEARCHING[kind](Listed(documents=documents)), then, {}, checkpointer=InMemorySaver())
        thread = {"configurable": {"thread_id": "1"}}
        turns = [made.invoke({"messages": [("human", text)]}, thread)["messages"] for text in (QUESTION, "Sure?")]
        assert [each.type for each in turns[1]] == ["human", "ai", "tool", "ai", "human", "ai"]
        return [[each for each in turn if each.type == "ai"] for turn in turns]

    ours = [asked(documents) for documents in SOME_ORDERS]
    for *_, last in ours[0]:
        assert (last.response_metadata["sets"], last.response_metadata["invariant"]) == ([3], True)
    assert len({repr([list(map(said, turn)) for turn in turns]) for turns in ours}) == 1
    plain = [asked(documents, "sequential") for documents in SOME_ORDERS]
    for turn in range(2):  # the text of the plain model shows the order
        assert len({turns[turn][-1].text for turns in plain}) > 1


@pytest.mark.parametrize("strategy", [ToolStrategy, ProviderStrategy, lambda schema: schema])
def test_an_agent_with_tools_answers_with_an_object(chat, strategy):
    single = {"model_settings": {"parallel_tool_calls": False}}

    def asked(documents):
        then, first = {"tools": [], **single}, {"response_format": None, **single}
        made = agent(chat, searching(Listed(documents=documents)), then, first, response_format=strategy(Departure))
        result = made.invoke({"messages": [("human", QUESTION)]})
        assert isinstance(result["structured_response"], Departure)
        return result["structured_response"], [said(each) for each in result["messages"] if each.type == "ai"]

    assert distinct(asked, SOME_ORDERS) == 1


def test_with_tools_and_a_schema_an_answer_is_calls_or_an_object(chat):
    def asked(written, **options):
        writing = Writing(chat.lm, written)
        return chat.bind_tools([search], **{**wanted, **options}, logits_processor=[writing]).invoke(QUESTION)

    wanted = ProviderStrategy(Departure).to_model_kwargs()
    answer = asked(call_text("Departure", {"vessel": "ferry", "hour": 12}))
    assert Departure.model_validate_json(answer.text) == Departure(vessel="ferry", hour=12)
    assert (answer.tool_calls, answer.response_metadata["finish_reason"]) == ([], "stop")
    for called in (asked(call_text("search", CALL["args"])), asked("", tool_choice="any", parallel_tool_calls=False)):
        assert (called.content, [call["name"] for call in called.tool_calls]) == ("", ["search"])
    assert Departure.model_validate_json(asked("", tool_choice="none", response_format=Departure).text)
