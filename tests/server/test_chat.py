"""Chats over HTTP, with the `openai` package: every order of the documents gives the same answer, as in Python."""

from __future__ import annotations

import json
import threading
from collections import Counter
from itertools import permutations
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import openai
import pytest

import invariant_rag
from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.server import InProcess
from invariant_rag.testing.rounding import rounding
from tests.server.conftest import CHAT, FLAGS, QUESTION, ask, body, client_of, content_of

ORDERS = list(permutations(FLAGS[:3]))
SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the atlas.",
        "parameters": {"type": "object", "properties": {"town": {"enum": ["Ostra", "Brenn"]}}, "required": ["town"]},
    },
}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["white", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def test_every_order_gives_the_reply_of_the_library(client: openai.OpenAI, embedded: InvariantModel) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}
    objects = {ask(client, list(order), response_format=form).choices[0].message.content for order in ORDERS}
    assert json.loads("".join(objects))["colour"] in {"white", "green"}
    replies = [content_of(ask(client, list(order), logprobs=True)) for order in ORDERS]
    assert all(reply == replies[0] for reply in replies)
    expected = embedded.generate(embedded.chat_prompt(QUESTION, FLAGS[:3]), max_new_tokens=256)
    assert replies[0]["choices"][0]["message"]["content"] == expected.text == "white"
    assert replies[0]["invariant"]["invariant"]
    assert replies[0]["invariant"]["sets"] == [3]
    twice, once = ask(client, [*FLAGS, FLAGS[0]]), ask(client, FLAGS)
    assert twice.invariant["sets"] == [5]
    assert twice.invariant["set_key"] != once.invariant["set_key"]


def test_documents_of_every_shape_are_read_alike(client: openai.OpenAI) -> None:
    texts = [{"id": str(number), "title": "Atlas", "text": text} for number, text in enumerate(FLAGS)]
    data = [{"id": str(number), "data": {"title": "Atlas", "snippet": text}} for number, text in enumerate(FLAGS)]
    plain, cohere = ask(client, texts), ask(client, data)
    assert content_of(plain) == content_of(cohere)
    assert plain.invariant["order"] == cohere.invariant["order"]
    assert sorted(plain.invariant["order"]) == list("0123")


def test_the_answer_cites_the_documents_that_hold_it(client: openai.OpenAI) -> None:
    documents = [{"id": f"doc {number}", "text": text} for number, text in enumerate(FLAGS)]
    (choice,) = ask(client, documents).choices
    assert choice.message.citations == [
        {
            "start": 0,
            "end": 5,
            "text": "white",
            "sources": [{"type": "document", "id": "doc 0", "set": 0, "document": {"id": "doc 0", "text": FLAGS[0]}}],
            "type": "TEXT_CONTENT",
        }
    ]


def test_each_set_may_number_its_documents_anew_and_a_citation_names_the_set(client: openai.OpenAI) -> None:
    mills, flags = ([{"id": str(place), "text": each[place]} for place in (0, 1)] for each in (FLAGS[2:], FLAGS))
    mill = [{"type": "documents", "documents": mills}, {"type": "text", "text": "What does the mill grind?"}]
    turns = [{"role": "user", "content": mill}, {"role": "assistant", "content": "barley"}]
    messages = [*turns, {"role": "user", "content": QUESTION}]
    (choice,) = ask(client, flags, messages=messages).choices
    sources = [source for each in choice.message.citations for source in each["sources"]]
    assert [(each["set"], each["id"], each["document"]["text"]) for each in sources] == [(1, "0", FLAGS[0])]


def test_documents_that_were_read_before_come_from_the_cache(client: openai.OpenAI) -> None:
    documents = [f"{text} Once more." for text in FLAGS]
    first, second = ask(client, documents), ask(client, documents[::-1])
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens > 40
    assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = ask(client, FLAGS, logprobs=True)
    chunks = list(ask(client, FLAGS, stream=True, logprobs=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "white"
    *_, last, usage = chunks
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices[0].delta.citations == whole.choices[0].message.citations
    assert last.choices[0].logprobs.model_dump() == whole.choices[0].logprobs.model_dump()
    assert last.invariant == whole.invariant
    assert usage.choices == []
    assert usage.usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_seed_gives_the_same_samples_and_each_answer_its_own(client: openai.OpenAI) -> None:
    def sampled(documents: list[str], seed: int) -> list[str]:
        options = {"temperature": 2.0, "n": 3, "seed": seed, "max_tokens": 8}
        return [each.message.content for each in ask(client, documents, "What is it?", **options).choices]

    first = sampled(FLAGS, 1)
    assert first == sampled(FLAGS[::-1], 1) != sampled(FLAGS, 2)
    assert len(set(first)) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_not_in_it(stream: bool, client: openai.OpenAI) -> None:
    question = "Who is the mayor of Ostra?"  # "The documents do not say."
    reply = ask(client, FLAGS, question, stop=["not"], stream=stream)
    if stream:
        chunks = list(reply)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert (text, reason) == ("The documents do ", "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "search"}}])
def test_a_tool_is_called_with_arguments_of_its_schema(choice: Any, client: openai.OpenAI) -> None:
    (whole,) = ask(client, FLAGS, tools=[SEARCH], tool_choice=choice).choices
    (call,) = whole.message.tool_calls[:1]
    assert whole.finish_reason == "tool_calls"
    assert call.function.name == "search"
    assert json.loads(call.function.arguments)["town"] in {"Ostra", "Brenn"}
    pieces = [
        chunk.choices[0].delta.tool_calls[0]
        for chunk in ask(client, FLAGS, tools=[SEARCH], tool_choice=choice, stream=True)
        if chunk.choices[0].delta.tool_calls
    ]
    assert json.loads("".join(each.function.arguments or "" for each in pieces if each.index == 0)) == json.loads(
        call.function.arguments
    )


def test_results_of_tools_may_hold_documents(client: openai.OpenAI) -> None:
    def messages(texts: Any) -> list[dict[str, Any]]:
        call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"town": "Ostra"}'}}
        documents = [{"type": "document", "document": {"text": text}} for text in texts]
        return [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": documents},
        ]

    replies = [ask(client, [], messages=messages(order), tools=[SEARCH], max_tokens=16) for order in ORDERS]
    assert all(content_of(reply) == content_of(replies[0]) for reply in replies)
    assert replies[0].invariant["sets"] == [3]


def test_an_answer_that_runs_out_of_tokens_says_length(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
    form: Any = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
    tools: Any = {"tools": [SEARCH], "tool_choice": "required", "parallel_tool_calls": False}
    asked: Any = {"model": "small", "messages": [{"role": "user", "content": QUESTION}]}
    for more in (form, tools):
        for budget in (1, 5, 10):
            (choice,) = client.chat.completions.create(max_tokens=budget, **asked, **more).choices
            assert choice.finish_reason == "length"
            for call in choice.message.tool_calls or ():
                with pytest.raises(json.JSONDecodeError):
                    json.loads(call.function.arguments)
            chunks = list(client.chat.completions.create(max_tokens=budget, stream=True, **asked, **more))
            reasons = [each.choices[0].finish_reason for each in chunks if each.choices]
            assert [each for each in reasons if each] == ["length"]
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(max_tokens=5, **asked, **form)


def test_what_parse_returned_is_taken_back_and_not_read(client: openai.OpenAI, http: httpx.Client) -> None:
    parameters = {**SEARCH["function"]["parameters"], "additionalProperties": False}
    function = {**SEARCH["function"], "parameters": parameters, "strict": True}
    strict: Any = {"type": "function", "function": function}
    asked: Any = [{"role": "user", "content": QUESTION}]
    tools: Any = {"tools": [strict], "tool_choice": "required", "parallel_tool_calls": False}
    reply = client.chat.completions.parse(model="small", messages=asked, max_tokens=200, **tools)
    plain = reply.choices[0].message.to_dict()
    parsed = [call["function"].pop("parsed_arguments") for call in plain["tool_calls"]]  # type: ignore[attr-defined]
    assert parsed[0]["town"] in {"Ostra", "Brenn"}
    said = reply.choices[0].message.to_dict() | {"parsed": {"colour": "white"}}

    def read(message: Any) -> Any:
        return http.post("/tokenize", json={"messages": [*asked, message, *asked]}).json()["tokens"]

    assert "parsed_arguments" in str(said)
    assert read(said) == read(plain)


def test_a_request_chooses_how_its_documents_are_read(client: openai.OpenAI, embedded: InvariantModel) -> None:
    question, documents = "When does the ferry to Ostra leave?", FLAGS[::-1]
    plain = ask(client, documents, question, extra_body={"invariant": {"method": "sequential"}})
    lm = embedded.with_method("sequential")
    expected = lm.generate(lm.chat_prompt(question, documents), max_new_tokens=256).text
    assert plain.choices[0].message.content == expected
    assert (plain.invariant["method"], plain.invariant["ordering"]) == ("sequential", "given")
    assert not plain.invariant["invariant"]


def test_documents_pasted_into_text_are_reported(client: openai.OpenAI) -> None:
    pasted = "\n".join(f"Document {number}: {text}" for number, text in enumerate(FLAGS, 1))
    reply = ask(client, [], f"{pasted}\n\n{QUESTION}")
    assert not reply.invariant["invariant"]
    assert "segments" in reply.invariant["warnings"][0]


def test_tokens_are_made_likelier_and_what_was_said_before_unlikelier(http: httpx.Client) -> None:
    def said(**more: Any) -> str:
        body = {"prompt": QUESTION, "max_tokens": 12, **more}
        return str(http.post("/v1/completions", json=body).json()["choices"][0]["text"])

    (token,) = http.post("/tokenize", json={"prompt": " barley"}).json()["tokens"][-1:]
    repeated = said(logit_bias={str(token): 100.0})
    assert repeated.split() == repeated.split()[:1] * 12
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert said(logit_bias={str(token): 1.0}, **penalty) != repeated
    assert len(set(said(logit_bias={str(token): 9.0}, frequency_penalty=2.0).split())) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_likeliest_tokens_are_those_of_the_model(
    stream: bool, http: httpx.Client, client: openai.OpenAI, embedded: InvariantModel
) -> None:
    prompt = embedded.chat_prompt(QUESTION, FLAGS)

    def likeliest() -> list[list[float]]:
        tops = embedded.generate(prompt, max_new_tokens=256, top_logprobs=3).top_logprobs
        return [[value for _, value in each] for each in tops]

    expected, bound = likeliest(), rounding(likeliest)
    found = ask(client, FLAGS, logprobs=True, top_logprobs=3, stream=stream)
    content = (list(found)[-1] if stream else found).choices[0].logprobs.content
    for each, wanted in zip(content, expected, strict=True):
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(wanted, abs=bound)
    assert [each.top_logprobs[0].logprob for each in content] == [each.logprob for each in content]  # greedy
    body = {"prompt": QUESTION, "max_tokens": 3, "logprobs": 2}
    tokens = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert [len(each) for each in tokens["top_logprobs"]] == [2, 2, 2]


def test_null_means_the_default_and_some_fields_are_ignored(http: httpx.Client) -> None:
    nulls = {"n": None, "stream": None, "documents": None, "invariant": None}
    chat = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
    for path, sent, more in (
        ("/v1/chat/completions", chat, {**nulls, "tools": None}),
        ("/v1/chat/completions", chat, {"prompt_cache_key": "a", "safety_identifier": "b", "logit_bias": {}}),
        ("/v1/completions", {"prompt": QUESTION, "max_tokens": 4}, nulls),
        ("/tokenize", {"messages": chat["messages"]}, {"documents": None, "tools": None}),
        ("/v1/judge", {"answers": ["a", "b"]}, {"invariant": None}),
    ):
        plain, given = (http.post(path, json=each).json() for each in (sent, sent | more))
        assert _told(given) == _told(plain)


def _told(reply: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in reply
    return {name: value for name, value in reply.items() if name not in ("id", "created", "usage")}


@pytest.mark.parametrize("cached", [False, True])
def test_one_chat_takes_few_calls(cached: bool, embedded: InvariantModel) -> None:
    """Functions of the package that are called for two tokens behind three documents. The goal is 350."""
    package, calls = str(Path(invariant_rag.__file__).parent), Counter[int]()
    number = 0

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[number] += 1

    threading.setprofile(record)  # for threads that begin from now on
    try:
        with client_of(InProcess(embedded, caches={"": KeyValueCache()} if cached else None)) as http:
            for number in range(4):  # the first one begins threads
                documents = [f"{text} {number}." for text in FLAGS[:3]]
                assert http.post(CHAT, json=body(documents=documents, max_tokens=2)).status_code == 200
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert min(calls[number] for number in (1, 2, 3)) <= (742 if cached else 668)
