"""Hostile requests: none makes the server fail, none learns of another's, and the server still answers."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

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


def form(schema: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def tool(name: str, **parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def calls_with(values: list[str]) -> list[dict[str, object]]:
    function = {"name": "f", "arguments": json.dumps({"a": values})}
    return [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}]


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "a schema elsewhere": (form({"$ref": "https://example.org/schema.json"}), "invalid_schema"),
    "a part elsewhere": (form({"type": "object", "properties": {"a": {"$ref": "b.json#/a"}}}), "invalid_schema"),
    "no type": (form({"type": []}), "invalid_schema"),
    "no pattern": (form({"type": "object", "properties": {"a": {"pattern": 3}}}), "invalid_schema"),
    "a long schema": (form({"enum": ["a" * 70_000]}), "invalid_schema"),
    "long tools": ({"tools": [tool("f", description="a" * 70_000)]}, "invalid_tool"),
    "many tools": ({"tools": [tool(f"f{number}") for number in range(129)]}, "invalid_tool"),
    "many documents": ({"documents": ["a"] * 1001}, "invalid_request"),
    "many arguments": ({"messages": [{"role": "user", "content": "a"}, *calls_with([""] * 9_999)]}, "too_large"),
    "many values": ({"chat_template_kwargs": {"a": [""] * 100_001}}, "too_large"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_too_much_or_means_nothing_is_refused(name: str, target: httpx.Client) -> None:
    more, code = REFUSED[name]
    error = target.post("/v1/chat/completions", json=good_request() | more).json()["error"]
    assert error["code"] == code
    assert len(error["message"]) < 500


def test_of_many_errors_ten_are_listed(target: httpx.Client) -> None:
    body = good_request() | {f"field{number}": number for number in range(1000)}
    message = target.post("/v1/chat/completions", json=body).json()["error"]["message"]
    assert message.count("unknown field") == 10
    assert message.endswith("; and 990 more")


def test_two_lengths_of_one_body_end_the_connection(target: httpx.Client) -> None:
    head = b"POST /v1/rerank HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((target.base_url.host, target.base_url.port)) as raw:
        raw.settimeout(5)
        raw.sendall(head + b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = b"".join(iter(lambda: raw.recv(65536), b""))  # to the end of the connection
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("is_proxy", [False, True])
def test_idle_connections_lock_nobody_out(is_proxy: bool, embedded: InvariantModel) -> None:
    proxies = frozenset({"127.0.0.1"} if is_proxy else ())
    settings = Settings(max_connections=8, trusted_proxies=proxies)
    with ExitStack() as stack:
        url = httpx.URL(stack.enter_context(serving(InProcess(embedded), settings)))
        idle = [stack.enter_context(socket.create_connection((url.host, url.port))) for _ in range(40)]
        for _ in range(3):
            assert httpx.get(url.join("/health"), timeout=2).status_code == 200
        idle[0].settimeout(1)
        if is_proxy:  # whose connections are those of many
            with pytest.raises(TimeoutError):
                idle[0].recv(1)
        else:
            assert idle[0].recv(1) == b""  # the oldest one is closed
