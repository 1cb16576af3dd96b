"""Typed errors that a request can cause, as a user with curl sees them: which field, what was expected, what to do."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from invariant_rag import InvariantModel
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.orderings import MonoT5
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.engines.base import Call, Emit, EngineReply
from tests.server.conftest import QUESTION, serving

CHAT, TEXT, JUDGE = "/v1/chat/completions", "/v1/completions", "/v1/judge"


class Faulty(InProcess):
    """An engine with a bug."""

    def answer_all(self, calls: Sequence[Call], emit: Emit, abandoned: Any) -> list[EngineReply]:
        if calls[0].request.question == "fault":
            raise ZeroDivisionError("secret")
        return super().answer_all(calls, emit, abandoned)


@pytest.fixture(scope="module")
def http(embedded: InvariantModel) -> Iterator[httpx.Client]:
    settings = Settings(max_new_tokens=3000, timeout=30)
    with (
        serving(Faulty(embedded, "small"), settings, MonoT5(EMBEDDED["monot5"])) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40, **more}


def form(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}


def tool(parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def said(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


def judged(**options: str) -> dict[str, Any]:
    return {"answers": ["a"], "invariant": options}


def required(**parts: Any) -> dict[str, Any]:
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}


TWICE = required(a={"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2, "uniqueItems": True})
BOUNDARY = required(a={"type": "string", "pattern": r"\bb"})
SLOTS = {"type": "documents", "documents": [{"text": "a"}], "slots": [{"before": [{"field": "title", "colour": 1}]}]}
FIELD = {"type": "documents", "documents": [{"text": "a"}], "slots": [{"after": [{"field": "colour"}]}]}
SAME_ID = [{"id": "1", "text": "a"}, {"id": "1", "text": "b"}]
NAMED = {"type": "function", "function": {"name": "g"}}
CASES: dict[str, tuple[str, dict[str, Any], int, str, str]] = {
    "stop": (CHAT, chat(stop=["x" * 1001]), 400, "stop", "stop: expected texts of at most 1000"),
    "stop, streamed": (CHAT, chat(stop=["x" * 1001], stream=True), 400, "stop", "stop: expected"),
    "max_tokens": (CHAT, chat(max_tokens=3001), 400, "max_tokens", "at most 3000"),
    "schema and stop": (CHAT, chat(response_format=form({}), stop="a"), 400, "response_format", "without stop and"),
    "schema": (CHAT, chat(response_format=form({"type": 3})), 400, "response_format", "JSON schema"),
    "xgrammar": (CHAT, chat(response_format=form(BOUNDARY)), 400, "response_format", "ord boundary"),
    "keyword": (CHAT, chat(response_format=form(TWICE)), 400, "response_format", "uniqueItems"),
    "parameters": (CHAT, chat(tools=[tool({"type": 3})]), 400, "tools", "JSON schema"),
    "arguments": (CHAT, chat(tools=[tool(TWICE)], tool_choice="required", max_tokens=80), 422, "tools", "non-unique"),
    "tool": (CHAT, chat(tools=[tool({}, colour=1)]), 400, "tools[0].function.colour", "unknown field"),
    "tools": (CHAT, chat(tools=[tool({}), tool({})]), 400, "tools", "distinct names"),
    "tool_choice": (CHAT, chat(tools=[tool({})], tool_choice=NAMED), 400, "tool_choice", "unknown tool_choice 'g'"),
    "variable": (CHAT, chat(chat_template_kwargs={"colour": 1}), 400, "chat_template_kwargs", "colour"),
    "window": (CHAT, chat(documents=["word " * 9000]), 400, "messages", "context window"),
    "window of a text": (TEXT, {"prompt": "word " * 9000}, 400, "prompt", "context window"),
    "score": (CHAT, chat(documents=["a"], invariant={"ordering": "score"}), 400, "documents", "expects a score"),
    "method": (CHAT, chat(invariant={"method": "x"}), 400, "invariant.method", "invariant.method: expected one of"),
    "seed": (CHAT, chat(seed=1 << 64), 400, "seed", f"{-(1 << 63)} to {(1 << 64) - 1}"),
    "seeds": (CHAT, chat(seed=(1 << 64) - 1, n=2), 400, "seed", f"at most {(1 << 64) - 2} with n=2"),
    "ids": (CHAT, chat(documents=SAME_ID), 400, "documents", "'1'"),
    "ids of a message": (CHAT, said({"type": "documents", "documents": SAME_ID}), 400, "documents", "'1'"),
    "ids of a completion": (TEXT, {"prompt": "a", "documents": SAME_ID}, 400, "documents", "'1'"),
    "slots": (CHAT, said(SLOTS), 400, "messages[0].content[0].slots[0].before[0].colour", "unknown field"),
    "field": (CHAT, said(FIELD), 400, "messages", "'colour'"),
    "judge and given": (JUDGE, judged(ordering="given"), 400, "invariant.ordering", "'given'"),
    "judge and overflow": (JUDGE, judged(overflow="drop_last"), 400, "invariant.overflow", "whole"),
    "criteria": (JUDGE, {"answers": ["a"], "criteria": {}}, 400, "criteria", "criteria"),
    "answers": (JUDGE, {"answers": [str(n) for n in range(27)]}, 400, "answers", "1 to 26"),
}
PYTHON = ("max_new_tokens", "stop_strings", "--", "Segment(", "Judge(", "pydantic", "/project/", "template_kwargs:")


@pytest.mark.parametrize("name", CASES)
def test_an_error_names_the_field_and_what_to_do_over_http(name: str, http: httpx.Client) -> None:
    path, body, status, param, said = CASES[name]
    response = http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert said in error["message"]
    assert error["hint"]
    shown = (error["message"] + error["hint"]).replace("chat_template_kwargs:", "")
    assert not [each for each in PYTHON if each in shown], error


@pytest.mark.parametrize("strict", [None, True])
def test_strict_false_leaves_the_check_to_the_caller(strict: bool | None, http: httpx.Client) -> None:
    more = {} if strict is None else {"strict": strict}
    tools = {"tool_choice": "required", "max_tokens": 80}
    assert http.post(CHAT, json=chat(tools=[tool(TWICE, **more)], **tools)).status_code == 422
    given = chat(tools=[tool(TWICE, strict=False)], **tools)
    call = http.post(CHAT, json=given).json()["choices"][0]["message"]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"a": [1, 1]}


def test_a_fault_is_logged_once_and_its_answer_has_the_id_of_the_request(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"messages": [{"role": "user", "content": "fault"}]}
    with caplog.at_level(logging.INFO):
        responses = [http.post(CHAT, json=body | {"stream": stream}) for stream in (False, True)]
    for response in responses:
        assert response.status_code == 500
        assert "secret" not in response.text
        fields = [getattr(each, "fields", {}) for each in caplog.records]
        mine = [each for each in fields if each.get("request_id") == response.headers["x-request-id"]]
        assert len(mine) == 2
        assert all(each["error"] == "ZeroDivisionError" for each in mine)
    assert sum(each.exc_info is not None for each in caplog.records) == 2


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100_000, 431),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
    ],
)
def test_what_is_no_http_is_refused_in_the_shape_of_all_errors(head: bytes, status: int, http: httpx.Client) -> None:
    with socket.create_connection((http.base_url.host, http.base_url.port)) as raw:
        raw.settimeout(10)
        raw.sendall(head)
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    found, _, body = answer.partition(b"\r\n\r\n")
    assert found.startswith(f"HTTP/1.1 {status} ".encode())
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_reranker_that_is_a_toy_says_so(http: httpx.Client) -> None:
    reply = http.post("/v2/rerank", json={"model": "monot5", "query": "q", "documents": ["a"]}).json()
    assert reply["model"] == "monot5-embedded"
    assert "--reranker" in reply["meta"]["warnings"][0]
