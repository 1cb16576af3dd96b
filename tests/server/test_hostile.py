"""Hostile requests: none makes the server fail, none learns of another's, and the server still answers."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import httpx
import pytest
from invariant_rag.server.schema_limits import check_schema, check_tools

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.orderings import MonoT5
from invariant_rag.server import InProcess, Settings
from tests.server.conftest import FLAGS, QUESTION, serving
from tests.server.hostile import hostile_request

SEEDS = range(120)
SECRET = "The secret of Gesthaven is 83.1."
STATUSES = {200, 400, 401, 404, 405, 408, 413, 422, 429, 504}


@pytest.fixture(scope="module")
def target(embedded: InvariantModel) -> Iterator[httpx.Client]:
    settings = Settings(max_new_tokens=32, timeout=20, body_timeout=1, max_body_bytes=1 << 19)
    engine = InProcess(embedded, "small", caches={"": KeyValueCache()})
    monot5 = MonoT5(EMBEDDED["monot5"])
    with serving(engine, settings, monot5) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


def check_refusal(seed: int, http: httpx.Client) -> int:
    """Send one hostile request, and return its status.

    Raises:
        AssertionError: The server failed, or told what somebody else has asked.
    """
    path, content = hostile_request(random.Random(seed))
    response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code in STATUSES, (seed, path, response.text)
    assert "Gesthaven" not in response.text, seed
    if response.headers["content-type"].startswith("application/json"):
        body = response.json()
        assert ("error" in body) == (response.status_code >= 400), seed
    else:
        assert '"server_error"' not in response.text.replace("deadline_exceeded", ""), seed
    return response.status_code


def test_malformed_requests_are_refused_and_do_no_harm(target: httpx.Client) -> None:
    def ask_in_private() -> str:
        body = {"messages": [{"role": "user", "content": SECRET}], "documents": [SECRET, *FLAGS], "max_tokens": 2}
        return target.post("/v1/chat/completions", json=body).text

    with ThreadPoolExecutor(4) as pool:
        private = [pool.submit(ask_in_private) for _ in range(4)]
        statuses = list(pool.map(lambda seed: check_refusal(seed, target), SEEDS))
        assert len({json.loads(each.result())["choices"][0]["message"]["content"] for each in private}) == 1
    assert statuses.count(400) > len(SEEDS) / 3
    assert 200 in statuses
    reply = target.post("/v1/chat/completions", json=good_request()).json()
    assert reply["choices"][0]["message"]["content"] == "white"


def good_request() -> dict[str, object]:
    return {"messages": [{"role": "user", "content": QUESTION}], "documents": FLAGS, "max_tokens": 8}


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/rerank HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/rerank HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999999\r\n\r\n{}",
        b"POST /v1/rerank HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n{}",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /v1/models/%00%ff%2e%2e HTTP/1.1\r\nHost: a\r\nX-Request-Id: a\tb\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ],
)
def test_what_is_hardly_http_does_no_harm(sent: bytes, target: httpx.Client) -> None:
    with socket.create_connection((target.base_url.host, target.base_url.port)) as raw:
        raw.settimeout(5)
        raw.sendall(sent)
        received = raw.recv(1000)
    assert not received.startswith(b"HTTP/1.1 5")
    assert target.get("/health").status_code == 200


def test_clients_that_leave_in_the_middle_of_a_request_do_no_harm(target: httpx.Client) -> None:
    content = json.dumps(good_request()).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    for sent in (head[:20], head, head + content[:10], head + content):
        with socket.create_connection((target.base_url.host, target.base_url.port)) as raw:
            raw.sendall(sent)
    assert target.post("/v1/chat/completions", json=good_request()).status_code == 200


LONG = {"type": "string", "minLength": 180}


def required(parts: dict[str, object], **more: object) -> dict[str, object]:
    return {"type": "object", "properties": parts, "required": list(parts), **more}


def chained(length: int) -> dict[str, object]:
    """Return a schema whose texts double with each of its definitions."""
    links = {f"d{n}": required({side: {"$ref": f"#/$defs/d{n + 1}"} for side in "ab"}) for n in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string", "minLength": 1}}}


MANY = required({f"text{number}": LONG for number in range(20)})


@pytest.mark.parametrize(
    "schema",
    [
        MANY,
        required({f"{number}": {"$ref": "#/$defs/a~1b"} for number in range(20)}, **{"$defs": {"a/b": LONG}}),
        {"type": "array", "prefixItems": [LONG] * 8, "minItems": 8},
        {"anyOf": [MANY, {"type": "object", "allOf": [MANY]}]},
        required({f"{number}": {"type": "string", "pattern": "^(a{20}){9}$"} for number in range(8)}),
        chained(12),
        chained(700),
        {"type": "string", "pattern": "a{" + "9" * 5000 + "}"},
        {"$ref": "https://example.org/schema.json"},
        required({"a": {"$ref": "other.json#/a"}}),
        {"type": []},
        {"type": "object", "properties": {"a": {"pattern": 3}}},
        {"type": "array", "minItems": 10**6},
        {"type": "string", "minLength": 10**6},
        {"type": "string", "pattern": "a{5000}"},
        {"type": "string", "pattern": "((a{20}){20}){20}"},
        {"type": "array", "minItems": 20, "items": {"type": "array", "minItems": 20}},
        {"enum": ["a" * 40_000]},
    ],
)
def test_schemas_that_would_take_minutes_or_mean_nothing_are_refused(
    schema: dict[str, object], target: httpx.Client
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    start = monotonic()
    response = target.post("/v1/chat/completions", json=good_request() | {"response_format": form})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_schema")
    assert monotonic() - start < 2


def test_tools_are_refused_for_what_their_parameters_require_together(target: httpx.Client) -> None:
    parts = required({f"text{number}": LONG for number in range(3)})
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": parts}} for n in range(2)]
    response = target.post("/v1/chat/completions", json=good_request() | {"tools": tools, "tool_choice": "required"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_schema")
    check_tools(tools[:1])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"text{number}": LONG for number in range(20)}},
        required({f"{number}": {"anyOf": [LONG, {"type": "null"}]} for number in range(20)}),
        required({f"{number}": {"type": ["string", "null"], "minLength": 180} for number in range(20)}),
        required({f"{number}": {"type": "string", "minLength": 50} for number in range(20)}),
        required({f"{number}": {"type": "string", "pattern": r"^\d{3}-\d{4}$"} for number in range(60)}),
        {"$ref": "#/$defs/tree", "$defs": {"tree": required({"text": LONG, "next": {"$ref": "#/$defs/tree"}})}},
    ],
)
def test_schemas_that_require_little_are_allowed(schema: dict[str, object]) -> None:
    check_schema(schema)
