"""Keys, tenants, limits, deadlines, clients that leave, logs and shutdown."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.logs import JsonLines
from tests.server.conftest import CHAT, FLAGS, QUESTION, bearer, body, client_of, metric, wait_until

KEYS = {"key-of-ada": "ada", "key-of-ivo": "ivo"}


@pytest.fixture(scope="module")
def limited(model: InvariantModel) -> Iterator[httpx.Client]:
    """A server with two tenants and narrow limits, and a model whose answers never end by themselves."""
    caches = {tenant: KeyValueCache(namespace=tenant) for tenant in KEYS.values()}
    engine = InProcess(model, caches=caches, max_prompt_tokens=600)
    settings = Settings(
        keys=KEYS, operator_key="key-of-operator", max_body_bytes=20_000, max_requests=3, timeout=1.5, body_timeout=0.4
    )
    with client_of(engine, settings) as http:
        yield http


@pytest.mark.parametrize(
    "headers", [{}, bearer("key-of-ad"), bearer("key-of-ada2"), {"Authorization": "Basic key-of-ada"}]
)
def test_without_a_valid_key_nothing_is_answered(headers: dict[str, str], limited: httpx.Client) -> None:
    for path in (CHAT, "/v1/completions", "/tokenize"):
        response = limited.post(path, json=body(), headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert limited.get("/metrics", headers=headers).status_code == 401
    assert limited.get("/health", headers=headers).status_code == 200


def test_a_tenant_learns_nothing_of_what_another_has_asked(limited: httpx.Client) -> None:
    documents = [f"{text} Twice." for text in FLAGS]

    def cached(key: str) -> int:
        reply = limited.post(CHAT, json=body(documents=documents, max_tokens=4), headers=bearer(key)).json()
        tokens: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert cached("key-of-ada") == 0
    assert cached("key-of-ivo") == 0
    assert cached("key-of-ada") > 0


def test_bodies_and_prompts_that_are_too_long_are_refused(limited: httpx.Client) -> None:
    for content in (json.dumps(body(documents=["word " * 5000])).encode(), iter([b" " * 9000] * 3)):
        response = limited.post(CHAT, content=content, headers=bearer("key-of-ada"))
        assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large")
    response = limited.post(CHAT, json=body(documents=["word " * 500]), headers=bearer("key-of-ada"))
    assert response.status_code == 413
    assert "at most 600 tokens" in response.json()["error"]["message"]
    for by in ("letters", "texts"):
        judged = {"question": QUESTION, "answers": ["word " * 500, "b"], "by": by}
        response = limited.post("/v1/judge", json=judged, headers=bearer("key-of-ada"))
        assert response.status_code == 413
        assert "at most 600 tokens" in response.json()["error"]["message"]


def test_a_body_that_comes_too_slowly_is_refused(limited: httpx.Client) -> None:
    def slowly() -> Iterator[bytes]:
        yield b'{"messages": '
        time.sleep(0.8)
        yield b"[]}"

    assert limited.post(CHAT, content=slowly(), headers=bearer("key-of-ada")).status_code == 408


def test_a_head_that_comes_too_slowly_ends_the_connection(limited: httpx.Client) -> None:
    url = limited.base_url
    with socket.create_connection((url.host, url.port)) as slow:
        slow.settimeout(5)
        for piece in (b"POST / HTTP/1.1\r\n", b"Host: a\r\n", b"X: b\r\n"):
            slow.sendall(piece)
            time.sleep(0.1)
        assert slow.recv(100) == b""


def long_answer(**more: Any) -> dict[str, Any]:
    """Return a request whose answer takes many seconds."""
    return body(max_tokens=3000, **more)


def test_an_answer_that_takes_too_long_is_given_up(limited: httpx.Client) -> None:
    response = limited.post(CHAT, json=long_answer(), headers=bearer("key-of-ada"))
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    with limited.stream("POST", CHAT, json=long_answer(stream=True), headers=bearer("key-of-ada")) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert response.status_code == 200
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


def test_a_request_too_many_is_told_when_to_come_back(limited: httpx.Client) -> None:
    wait_until(lambda: metric(limited, "active_requests") == 0)
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(limited.post, CHAT, json=long_answer(), headers=bearer("key-of-ada")) for _ in range(6)]
        statuses = sorted(call.result().status_code for call in calls)
    refused = [call.result() for call in calls if call.result().status_code == 429]
    assert statuses.count(429) == 4
    assert all(1 <= int(each.headers["retry-after"]) <= 60 for each in refused)
    assert metric(limited, "rejected_total", reason="queue") >= 4


def test_requests_are_named_and_logged_without_their_contents_unless_these_are_asked_for(
    limited: httpx.Client, embedded: InvariantModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "invariant_rag.server"):
        good = limited.post(CHAT, json=body(max_tokens=4), headers={**bearer("key-of-ada"), "x-request-id": "mine-1"})
        bad = limited.post(CHAT, json=body(secret="barley"), headers={**bearer("key-of-ada"), "x-request-id": "no no"})
        time.sleep(0.1)
    assert good.headers["x-request-id"] == "mine-1"
    assert good.json()["id"] == "chatcmpl-mine-1"
    assert bad.headers["x-request-id"] not in {"", "no no"}
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records if record.name.startswith("invariant")]
    found = {line["request_id"]: line for line in lines}
    assert found["mine-1"]["status"] == 200
    assert found["mine-1"]["prompt_tokens"] > 0
    assert found[bad.headers["x-request-id"]]["error"] == "InvalidRequest"
    written = json.dumps(lines)
    assert not any(word in written for word in ("barley", "Ostra", "key-of-ada", "secret"))
    with client_of(InProcess(embedded), Settings(log_contents=True)) as http, caplog.at_level(logging.INFO):
        http.post(CHAT, json=body())
    assert any("barley" in JsonLines().format(record) for record in caplog.records)


@pytest.mark.slow
def test_the_command_finishes_what_runs_before_it_ends(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = "from invariant_rag.cli import app; app()"
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        server = subprocess.Popen(
            [sys.executable, "-c", command, "serve", "--port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, server)
        found: list[str] = []

        def read() -> None:
            with httpx.stream(
                "POST", f"{url}{CHAT}", json=body(stream=True, temperature=2.0, seed=1, max_tokens=150)
            ) as r:
                found.extend(r.iter_lines())

        reader = threading.Thread(target=read)
        reader.start()
        while not found and "active_requests 1.0" not in httpx.get(f"{url}/metrics").text:
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        reader.join(30)
        assert "data: [DONE]" in found
        assert server.wait(30) in {0, -signal.SIGTERM}  # uvicorn passes the signal on when it has ended
        assert all(isinstance(json.loads(line), dict) for line in log.read_text().splitlines() if line.startswith("{"))
    finally:
        server.kill()
        server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and server.poll() is None:
        try:
            httpx.get(f"{url}/health")
        except httpx.ConnectError:
            time.sleep(0.1)
        else:
            return
    pytest.fail("the server did not start")
