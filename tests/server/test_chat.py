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
from tests.server.conftest import CHAT, FLAGS, QUESTION, ask, body, client_of, content_of, form

ORDERS = list(permutations(FLAGS[:3]))
TOWN = {"type": "object", "properties": {"town": {"enum": ["Ostra", "Brenn"]}}, "required": ["town"]}
FUNCTION = {"name": "search", "description": "Search the atlas.", "parameters": TOWN}
SEARCH: dict[str, Any] = {"type": "function", "function": FUNCTION}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["white", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
ASKED: Any = [{"role": "user", "content": QUESTION}]


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_every_order_gives_the_reply_of_the_library(client: openai.OpenAI, embedded: InvariantModel) -> None:
    asked = {"response_format": form(COLOUR, strict=True)}
    (found,) = {ask(client, list(order), **asked).choices[0].message.content for order in ORDERS}
    assert json.loads(found)["colour"] in {"white", "green"}
    replies = [content_of(ask(client, list(order), logprobs=True)) for order in ORDERS]
    assert all(reply == replies[0] for reply in replies)
    expected = embedded.generate(embedded.chat_prompt(QUESTION, FLAGS[:3]), max_new_tokens=256)
    assert replies[0]["choices"][0]["message"]["content"] == expected.text == "white"
    assert {"invariant": True, "sets": [3]}.items() <= replies[0]["invariant"].items()
    twice, once = ask(client, [*FLAGS, FLAGS[0]]), ask(client, FLAGS)
    assert twice.invariant["sets"] == [5]
    assert twice.invariant["set_key"] != once.invariant["set_key"]


def test_documents_of_every_shape_are_read_alike_and_cited(client: openai.OpenAI) -> None:
    texts = [{"id": str(number), "title": "Atlas", "text": text} for number, text in enumerate(FLAGS)]
    data = [{"id": str(number), "data": {"title": "Atlas", "snippet": text}} for number, text in enumerate(FLAGS)]
    plain, cohere = ask(client, texts), ask(client, data)
    assert content_of(plain) == content_of(cohere)
    assert sorted(plain.invariant["order"]) == list("0123")
    (choice,) = ask(client, [{"id": "doc", "text": FLAGS[0]}, *FLAGS[1:]]).choices
    source = {"type": "document", "id": "doc", "set": 0, "document": {"id": "doc", "text": FLAGS[0]}}
    cited = {"start": 0, "end": 5, "text": "white", "sources": [source], "type": "TEXT_CONTENT"}
    assert choice.message.citations == [cited]


def test_each_set_may_number_its_documents_anew_and_a_citation_names_the_set(client: openai.OpenAI) -> None:
    mills, flags = ([{"id": str(place), "text": each[place]} for place in (0, 1)] for each in (FLAGS[2:], FLAGS))
    mill = [{"type": "documents", "documents": mills}, {"type": "text", "text": "What does the mill grind?"}]
    messages = [{"role": "user", "content": mill}, {"role": "assistant", "content": "barley"}, *ASKED]
    (choice,) = ask(client, flags, messages=messages).choices
    sources = [source for each in choice.message.citations for source in each["sources"]]
    assert [(each["set"], each["id"], each["document"]["text"]) for each in sources] == [(1, "0", FLAGS[0])]


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    whole = ask(client, FLAGS, logprobs=True)
    chunks = list(ask(client, FLAGS, stream=True, logprobs=True, stream_options={"include_usage": True}))
    assert (chunks[0].choices[0].delta.role, text_of(chunks)) == ("assistant", "white")
    *_, last, usage = chunks
    (ended,), (choice,) = last.choices, whole.choices
    assert (ended.finish_reason, ended.delta.citations) == (choice.finish_reason, choice.message.citations)
    assert (ended.logprobs.model_dump(), last.invariant) == (choice.logprobs.model_dump(), whole.invariant)
    assert (usage.choices, usage.usage.total_tokens) == ([], whole.usage.total_tokens)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_seed_gives_the_same_samples_and_each_answer_its_own(client: openai.OpenAI) -> None:
    def sampled(documents: list[str], seed: int) -> list[str]:
        options = {"temperature": 2.0, "n": 3, "seed": seed, "max_tokens": 8}
        return [each.message.content for each in ask(client, documents, "What is it?", **options).choices]

    first = sampled(FLAGS, 1)
    assert first == sampled(FLAGS[::-1], 1) != sampled(FLAGS, 2)
    assert len(set(first)) > 1


def test_a_stop_string_ends_the_answer_and_is_not_in_it(client: openai.OpenAI) -> None:
    asked: Any = {"question": "Who is the mayor of Ostra?", "stop": ["not"]}  # "The documents do not say."
    (whole,), chunks = ask(client, FLAGS, **asked).choices, list(ask(client, FLAGS, stream=True, **asked))
    assert whole.message.content == text_of(chunks) == "The documents do "
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "search"}}])
def test_a_tool_is_called_with_arguments_of_its_schema(choice: Any, client: openai.OpenAI) -> None:
    asked = {"tools": [SEARCH], "tool_choice": choice}
    (whole,) = ask(client, FLAGS, **asked).choices
    call = whole.message.tool_calls[0].function
    assert (whole.finish_reason, call.name) == ("tool_calls", "search")
    assert json.loads(call.arguments)["town"] in {"Ostra", "Brenn"}
    pieces = [
        each for chunk in ask(client, FLAGS, stream=True, **asked) for each in chunk.choices[0].delta.tool_calls or ()
    ]
    written = "".join(each.function.arguments or "" for each in pieces if each.index == 0)
    assert json.loads(written) == json.loads(call.arguments)


def test_results_of_tools_may_hold_documents(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"town": "Ostra"}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    replies = []
    for order in ORDERS:
        documents = [{"type": "document", "document": {"text": text}} for text in order]
        messages = [*ASKED, called, {"role": "tool", "tool_call_id": "call_1", "content": documents}]
        replies.append(content_of(ask(client, [], messages=messages, tools=[SEARCH], max_tokens=16)))
    assert all(reply == replies[0] for reply in replies)
    assert replies[0]["invariant"]["sets"] == [3]


def test_an_answer_that_runs_out_of_tokens_says_length(client: openai.OpenAI) -> None:
    free: Any = {
        "response_format": form(
            {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}
        )
    }
    tools: Any = {"tools": [SEARCH], "tool_choice": "required", "parallel_tool_calls": False}
    asked: Any = {"model": "small", "messages": ASKED}
    for more in (free, tools):
        for budget in (1, 5, 10):
            (choice,) = client.chat.completions.create(max_tokens=budget, **asked, **more).choices
            assert choice.finish_reason == "length"
            for call in choice.message.tool_calls or ():
                with pytest.raises(json.JSONDecodeError):
                    json.loads(call.function.arguments)
            chunks = client.chat.completions.create(max_tokens=budget, stream=True, **asked, **more)
            reasons = [each.choices[0].finish_reason for each in chunks if each.choices]
            assert [each for each in reasons if each] == ["length"]
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(max_tokens=5, **asked, **free)


def test_what_parse_returned_is_taken_back_and_not_read(client: openai.OpenAI, http: httpx.Client) -> None:
    function = {**FUNCTION, "parameters": {**TOWN, "additionalProperties": False}, "strict": True}
    tools: Any = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    reply = client.chat.completions.parse(
        model="small", messages=ASKED, max_tokens=200, parallel_tool_calls=False, **tools
    )
    plain: Any = reply.choices[0].message.to_dict()
    parsed = [call["function"].pop("parsed_arguments") for call in plain["tool_calls"]]
    assert parsed[0]["town"] in {"Ostra", "Brenn"}
    said = reply.choices[0].message.to_dict() | {"parsed": {"colour": "white"}}
    assert "parsed_arguments" in str(said)
    sent = [{"messages": [*ASKED, message, *ASKED]} for message in (said, plain)]
    tokens = [http.post("/tokenize", json=each).json()["tokens"] for each in sent]
    assert tokens[0] == tokens[1]


def test_a_request_chooses_how_its_documents_are_read(client: openai.OpenAI, embedded: InvariantModel) -> None:
    question, documents = "When does the ferry to Ostra leave?", FLAGS[::-1]
    plain = ask(client, documents, question, extra_body={"invariant": {"method": "sequential"}})
    lm = embedded.with_method("sequential")
    expected = lm.generate(lm.chat_prompt(question, documents), max_new_tokens=256).text
    assert plain.choices[0].message.content == expected
    assert {"method": "sequential", "ordering": "given", "invariant": False}.items() <= plain.invariant.items()


def test_documents_pasted_into_text_are_reported(client: openai.OpenAI) -> None:
    pasted = "\n".join(f"Document {number}: {text}" for number, text in enumerate(FLAGS, 1))
    reply = ask(client, [], f"{pasted}\n\n{QUESTION}")
    assert not reply.invariant["invariant"]
    assert "segments" in reply.invariant["warnings"][0]


def test_tokens_are_made_likelier_and_what_was_said_before_unlikelier(http: httpx.Client) -> None:
    def said(**more: Any) -> str:
        sent = {"prompt": QUESTION, "max_tokens": 12, **more}
        return str(http.post("/v1/completions", json=sent).json()["choices"][0]["text"])

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
        assert each.top_logprobs[0].logprob == each.logprob  # greedy
    sent = {"prompt": QUESTION, "max_tokens": 3, "logprobs": 2}
    tokens = http.post("/v1/completions", json=sent).json()["choices"][0]["logprobs"]
    assert [len(each) for each in tokens["top_logprobs"]] == [2, 2, 2]


NULLS = {"n": None, "stream": None, "documents": None, "invariant": None}
TALK, TEXT = {"messages": ASKED, "max_tokens": 4}, {"prompt": QUESTION, "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "sent", "more"),
    [
        (CHAT, TALK, {**NULLS, "tools": None}),
        (CHAT, TALK, {"prompt_cache_key": "a", "safety_identifier": "b", "logit_bias": {}}),
        ("/v1/completions", TEXT, NULLS),
        ("/tokenize", {"messages": ASKED}, {"documents": None, "tools": None}),
        ("/v1/judge", {"answers": ["a", "b"]}, {"invariant": None}),
    ],
)
def test_null_means_the_default_and_some_fields_are_ignored(
    path: str, sent: Any, more: Any, http: httpx.Client
) -> None:
    plain, given = (http.post(path, json=each) for each in (sent, sent | more))
    told = [{k: v for k, v in each.json().items() if k not in ("id", "created", "usage")} for each in (plain, given)]
    assert (plain.status_code, told[0]) == (given.status_code, told[1])
    assert given.status_code == 200


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
    assert min(calls[number] for number in (1, 2, 3)) <= (610 if cached else 535)


def test_documents_that_were_read_before_come_from_the_cache(client: openai.OpenAI) -> None:
    documents = [f"{text} Once more." for text in FLAGS]
    first, second = ask(client, documents), ask(client, documents[::-1])
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens > 40
    assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
