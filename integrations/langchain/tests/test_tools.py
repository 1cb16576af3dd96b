"""Tools: calls that always parse, whatever the weights; agents whose answers ignore the order of what a tool found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import IncompleteObject, InvalidPrompt, InvalidTool, UnsupportedCombination
from invariant_rag.generation.tools import ToolCall, ToolCalling
from invariant_rag.testing import toy_tokenizer
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import create_retriever_tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from transformers import PreTrainedModel

from langchain_invariant_rag import ChatInvariant, InvariantLLM, InvariantRAGMiddleware, canonical
from langchain_invariant_rag.documents import to_segment

from .shared import DOCUMENTS, ORDERS, QUESTION, Listed
from .tool_models import TEMPLATE, WRITTEN, Departure, EndsAfter, Writing, now, search


@pytest.fixture(scope="module")
def spoken(weights: PreTrainedModel) -> InvariantModel:
    """The tiny model, with a chat template that knows tools."""
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return InvariantModel(weights, tokenizer)


@pytest.fixture(scope="module", params=["knows tools", "does not"])
def chat(request: Any, spoken: InvariantModel, lm: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=spoken if request.param == "knows tools" else lm, max_tokens=160, sort_segments=False)


@pytest.fixture(scope="module")
def thinker(spoken: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=spoken, max_tokens=110, sort_segments=False)


def joined(chunks: Sequence[Any]) -> AIMessageChunk:
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert isinstance(total, AIMessageChunk)
    return total


def said(message: BaseMessage) -> dict[str, Any]:
    """What must be the same however a message was asked for."""
    assert isinstance(message, AIMessage)
    calls = [{**call, "type": "tool_call"} for call in message.tool_calls]
    return {
        "content": message.content,
        "calls": calls,
        "extra": message.additional_kwargs,
        "usage": message.usage_metadata,
        "report": message.response_metadata,
    }


def distinct(ask: Callable[[list[Any]], Any]) -> int:
    return len({repr(ask(order)) for order in ORDERS})


# --- calls ----------------------------------------------------------------------------------------------------------


OPENAI_CHOICE = {"type": "function", "function": {"name": "search"}}
ANTHROPIC_CHOICE = {"type": "tool", "name": "search"}


@pytest.mark.parametrize("choice", ["any", "required", True, "search", OPENAI_CHOICE, ANTHROPIC_CHOICE])
def test_a_forced_answer_is_calls_that_parse(chat: ChatInvariant, choice: Any) -> None:
    answer = chat.bind_tools([search, now], tool_choice=choice).invoke(QUESTION)
    assert answer.tool_calls
    assert (answer.content, answer.invalid_tool_calls) == ("", [])
    for call in answer.tool_calls:
        {"search": search, "now": now}[call["name"]].invoke(call["args"])
    if choice not in ("any", "required", True):
        assert {call["name"] for call in answer.tool_calls} == {"search"}
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    assert answer.usage_metadata["output_tokens"] <= 160
    assert {block["type"] for block in answer.content_blocks} == {"tool_call"}


@pytest.mark.parametrize("choice", ["none", False])
def test_no_tool_is_called_where_none_is_wanted(chat: ChatInvariant, choice: Any) -> None:
    bound = chat.bind_tools([search], tool_choice=choice)
    writing = Writing(chat.lm, '<tool_call>\n{"name": "search"')
    answer = bound.invoke(QUESTION, max_tokens=50, logits_processor=[writing])
    assert answer.content
    assert not answer.tool_calls


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


def test_text_before_a_call_is_the_content(chat: ChatInvariant) -> None:
    text = f"Let me see.\n{WRITTEN}<|im_end|>"
    bound = chat.bind_tools([search])
    answer = bound.invoke(QUESTION, logits_processor=[Writing(chat.lm, text)])
    assert answer.content == "Let me see."
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("search", {"query": "ferry", "limit": 3})]
    streamed = joined(list(bound.stream(QUESTION, logits_processor=[Writing(chat.lm, text)])))
    assert said(streamed) == said(answer)


def test_calls_ignore_the_order_of_segments(chat: ChatInvariant) -> None:
    def calls(model: ChatInvariant, documents: list[Any]) -> Any:
        answer = model.bind_tools([search, now], tool_choice="any").invoke(QUESTION, documents=documents)
        return said(answer)["calls"]

    assert distinct(lambda documents: calls(chat, documents)) == 1
    plain = chat.model_copy(update={"method": "sequential"})
    assert distinct(lambda documents: calls(plain, documents)) > 1


def test_stop_sequences_cut_the_text_and_no_call(chat: ChatInvariant) -> None:
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "a STOP b", "limit": 3}}\n</tool_call><|im_end|>'
    bound = chat.bind_tools([search]).bind(stop=["STOP"])
    answer = bound.invoke(QUESTION, logits_processor=[Writing(chat.lm, "Wait. " + call)])
    assert answer.tool_calls[0]["args"] == {"query": "a STOP b", "limit": 3}
    writing = "One STOP two. " + call
    answer = bound.invoke(QUESTION, logits_processor=[Writing(chat.lm, writing)])
    assert (answer.content, answer.tool_calls) == ("One ", [])
    assert answer.response_metadata["finish_reason"] == "stop"
    streamed = joined(list(bound.stream(QUESTION, logits_processor=[Writing(chat.lm, writing)])))
    assert said(streamed) == said(answer)


def test_numbers_of_documents_in_arguments_are_those_of_the_caller(chat: ChatInvariant) -> None:
    text = '<tool_call>\n{"name": "search", "arguments": {"query": "see [1]", "limit": 3}}\n</tool_call><|im_end|>'
    bound = chat.model_copy(update={"known_documents": DOCUMENTS}).bind_tools([search], tool_choice="any")
    found = set()
    for order in ORDERS:
        numbered = "\n".join(f"[{number}] {each.page_content}" for number, each in enumerate(order, 1))
        options = {"input": f"{numbered}\n{QUESTION}"}
        answer = bound.invoke(**options, logits_processor=[Writing(chat.lm, text)])
        streamed = joined(list(bound.stream(**options, logits_processor=[Writing(chat.lm, text)])))
        assert said(streamed) == said(answer)
        number = int(answer.tool_calls[0]["args"]["query"][5:-1])
        found.add(order[number - 1].page_content)
    assert len(found) == 1


def test_a_call_that_is_cut_off_is_an_error(chat: ChatInvariant) -> None:
    bound = chat.bind_tools([search], tool_choice="any")
    for call in (bound.invoke, lambda prompt, **options: list(bound.stream(prompt, **options))):
        with pytest.raises(IncompleteObject, match="whole calls"):
            call(QUESTION, stopping_criteria=[EndsAfter(60)])


def test_wrong_choices_say_what_there_is(chat: ChatInvariant) -> None:
    with pytest.raises(InvalidTool, match="choose from 'auto', 'none', 'required', 'any', 'search'"):
        chat.bind_tools([search], tool_choice="find").invoke(QUESTION)
    with pytest.raises(InvalidTool, match=r"as tool_choice, got \{'type': 'x'\}"):
        chat.bind_tools([search], tool_choice={"type": "x"})
    with pytest.raises(InvalidTool, match="got none"):
        chat.bind_tools([], tool_choice="any").invoke(QUESTION)


def test_a_completion_model_has_no_tools(lm: InvariantModel) -> None:
    with pytest.raises(UnsupportedCombination, match="a completion model does not call them"):
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


def test_concurrent_requests_with_tools_are_decoded_alone(thinker: ChatInvariant) -> None:
    bound = thinker.model_copy(update={"micro_batching": True}).bind_tools([search, now], tool_choice="any")
    prompts = [f"{QUESTION} {number}" for number in range(4)]
    alone = [said(bound.invoke(prompt)) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: said(bound.invoke(prompt)), prompts)) == alone


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
    results = [ToolMessage("found", tool_call_id=call, artifact=each) for call, each in found.items()]

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
    bound = chat.bind_tools([search], tool_choice="any")
    whole, chunk = bound.invoke(QUESTION), joined(list(bound.stream(QUESTION)))
    results = [search.invoke(call) for call in whole.tool_calls]
    answers = {
        str(chat.invoke([HumanMessage(QUESTION), each, *results], max_tokens=8).content) for each in (whole, chunk)
    }
    assert len(answers) == 1


def test_neighbouring_messages_of_the_assistant_are_one(thinker: ChatInvariant) -> None:
    apart = [
        HumanMessage("a"),
        AIMessage("I see."),
        AIMessage("", tool_calls=[CALL]),
        ToolMessage("one", tool_call_id="call_1"),
    ]
    calls: dict[str, Any] = {"role": "assistant", "content": "I see.", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "one", "tool_call_id": "call_1"}
    expected = written(thinker.lm, [{"role": "user", "content": "a"}, calls, result])
    assert thinker.invoke(apart, max_tokens=8).content == expected


def test_an_error_of_a_tool_is_said_to_be_one(thinker: ChatInvariant) -> None:
    def asked(text: str, **status: Any) -> Any:
        result = ToolMessage(text, tool_call_id="call_1", **status)
        return thinker.invoke([HumanMessage("a"), AIMessage("", tool_calls=[CALL]), result], max_tokens=8).content

    assert asked("no such file", status="error") == asked("Error: no such file") != asked("no such file")
    assert asked("Error: no such file", status="error") == asked("Error: no such file")


RESULTS: dict[str, Callable[[list[Document]], ToolMessage]] = {
    "artifact": lambda documents: ToolMessage("text", tool_call_id="call_1", artifact=documents),
    "blocks": lambda documents: ToolMessage(
        [{"type": "text-plain", "mime_type": "text/plain", "text": each.page_content} for each in documents],
        tool_call_id="call_1",
    ),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_documents_that_a_tool_found_are_a_set_in_its_result(chat: ChatInvariant, kind: str) -> None:
    def asked(model: ChatInvariant, documents: list[Any]) -> AIMessage:
        result = RESULTS[kind]([Document(each.page_content) for each in documents])
        return model.invoke([HumanMessage(QUESTION), AIMessage("", tool_calls=[CALL]), result], max_tokens=8)

    assert asked(chat, DOCUMENTS).response_metadata["sets"] == [3]
    assert distinct(lambda documents: said(asked(chat, documents))) == 1
    assert distinct(lambda documents: asked(chat.model_copy(update={"method": "sequential"}), documents).content) > 1
    segments = [to_segment(each.page_content) for each in DOCUMENTS]
    result = {"role": "tool", "tool_call_id": "call_1", "content": segments}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "tool_calls": [CALL]},
        result,
    ]
    assert asked(chat, DOCUMENTS).content == written(chat.lm, messages)


# --- agents ---------------------------------------------------------------------------------------------------------


@wrap_model_call
def search_once(request: ModelRequest[Any], handler: Any) -> Any:
    """Ask for a call of a tool first, and then for an answer: random weights do neither by themselves."""
    searched = any(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request.override(tool_choice="none" if searched else "any"))


def retriever_tool(documents: list[Any], **options: Any) -> Any:
    return create_retriever_tool(Listed(documents=documents), "records", "Search the harbour's records.", **options)


@pytest.mark.parametrize("response_format", ["content", "content_and_artifact"])
def test_an_agent_with_a_retriever_tool_ignores_the_order_of_what_it_found(
    chat: ChatInvariant, response_format: Any
) -> None:
    def asked(documents: list[Any], method: str = "rotor") -> list[BaseMessage]:
        model = chat.model_copy(update={"method": method, "max_tokens": 80})
        tools = [retriever_tool(documents, response_format=response_format)]
        agent: Any = create_agent(model, tools=tools, middleware=[search_once])
        return list(agent.invoke({"messages": [("human", QUESTION)]})["messages"])

    messages = asked(DOCUMENTS)
    assert [message.type for message in messages[:3]] == ["human", "ai", "tool"]
    assert messages[-1].response_metadata["sets"] == [3] * sum(each.type == "tool" for each in messages)
    assert messages[-1].response_metadata["invariant"]
    assert distinct(lambda documents: [said(each) for each in asked(documents) if each.type == "ai"]) == 1
    assert distinct(lambda documents: asked(documents, "sequential")[-1].content) > 1


def test_a_graph_of_model_and_tool_node_ignores_the_order_of_what_it_found(thinker: ChatInvariant) -> None:
    def asked(documents: list[Any]) -> Any:
        tools = [retriever_tool(documents, response_format="content_and_artifact")]

        def model(state: MessagesState) -> Any:
            searched = isinstance(state["messages"][-1], ToolMessage)
            bound = thinker.bind_tools(tools, tool_choice="none" if searched else "any", parallel_tool_calls=False)
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

    assert distinct(asked) == 1


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
            chat, tools=[retriever_tool(documents)], middleware=[object_last], response_format=FORMATS[strategy]
        )
        result = agent.invoke({"messages": [("human", QUESTION)]})
        assert isinstance(result["structured_response"], Departure)
        return result["structured_response"], [said(each) for each in result["messages"] if each.type == "ai"]

    assert distinct(asked) == 1


def test_an_agent_without_tools_of_its_own_answers_through_one(chat: ChatInvariant) -> None:
    def asked(documents: list[Any]) -> Any:
        middleware = [InvariantRAGMiddleware(Listed(documents=documents))]
        agent: Any = create_agent(chat, tools=[], middleware=middleware, response_format=ToolStrategy(Departure))
        return agent.invoke({"messages": [("human", QUESTION)]})["structured_response"]

    assert isinstance(asked(DOCUMENTS), Departure)
    assert distinct(asked) == 1


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


# --- reasoning, template variables, log-probabilities ---------------------------------------------------------------


def test_reasoning_stands_apart_from_the_answer(thinker: ChatInvariant) -> None:
    text = "It is early.\n</think>\n\nAt noon.<|im_end|>"
    for model, options in (
        (thinker.model_copy(update={"template_kwargs": {"enable_thinking": True}}), {}),
        (thinker, {"template_kwargs": {"enable_thinking": True}}),
    ):
        bound: Any = model.bind(eos_token_id=thinker.lm.tokenizer.convert_tokens_to_ids("<|im_end|>"), **options)
        answer = bound.invoke(QUESTION, logits_processor=[Writing(model.lm, text)])
        assert (answer.content, answer.additional_kwargs) == ("At noon.", {"reasoning_content": "It is early."})
        assert answer.content_blocks == [
            {"type": "reasoning", "reasoning": "It is early."},
            {"type": "text", "text": "At noon."},
        ]
        chunks = list(bound.stream(QUESTION, logits_processor=[Writing(model.lm, text)]))
        assert said(joined(chunks)) == said(answer)
        assert sum("reasoning_content" in chunk.additional_kwargs for chunk in chunks) > 3


def test_a_forced_call_skips_the_reasoning_that_the_template_opens(thinker: ChatInvariant) -> None:
    bound = thinker.bind_tools([now], tool_choice="any", template_kwargs={"enable_thinking": True})
    answer = bound.invoke(QUESTION, max_tokens=120)
    assert answer.tool_calls
    assert "reasoning_content" not in answer.additional_kwargs


def test_a_variable_that_the_template_does_not_know_is_an_error(thinker: ChatInvariant) -> None:
    with pytest.raises(InvalidPrompt, match="got enable_thnking, which do not occur in it"):
        thinker.invoke(QUESTION, template_kwargs={"enable_thnking": True})


def test_log_probabilities_come_in_the_shape_of_openai(thinker: ChatInvariant) -> None:
    model = thinker.model_copy(update={"logprobs": True, "max_tokens": 12})
    answer = model.invoke(QUESTION)
    listed = answer.response_metadata["logprobs"]["content"]
    messages = [{"role": "user", "content": QUESTION}]
    generation = thinker.lm.generate(thinker.lm.chat_prompt(messages=messages), max_new_tokens=12)
    assert [each["logprob"] for each in listed] == list(generation.logprobs)
    assert "".join(each["token"] for each in listed) == answer.content
    assert b"".join(bytes(each["bytes"]) for each in listed).decode() == answer.content
    assert all(each["logprob"] <= 0 and each["top_logprobs"] == [] for each in listed)
    assert len(listed) == answer.usage_metadata["output_tokens"] == 12
    assert said(joined(list(thinker.bind(logprobs=True, max_tokens=12).stream(QUESTION)))) == said(answer)
    assert "logprobs" not in thinker.invoke(QUESTION, max_tokens=12).response_metadata
    assert "logprobs" not in model.invoke(QUESTION, logprobs=False).response_metadata
    stop = str(answer.content)[4:6]
    stopped = model.invoke(QUESTION, stop=[stop])
    assert "".join(each["token"] for each in stopped.response_metadata["logprobs"]["content"]) == stopped.content
