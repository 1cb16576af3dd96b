"""Two laws of every route: the event loop is free while hostile bodies are parsed, and nothing outlives its client."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.orderings import MonoT5
from invariant_rag.prompts.tokenization import literals_of
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.application import router
from invariant_rag.words import split_words
from tests.server.conftest import client_of, leaving, metric, wait_until

HEALTH_SECONDS = 0.2
END_SECONDS = STAY_SECONDS = 1.0
DEADLINE_SECONDS = 0.5
PATTERN = {"type": "string", "pattern": "^([a-z]?){400}(a|b|[c-z]{1,90}){80}$"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "When does the ferry leave?"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 2},
    "/v1/completions": {"prompt": "The ferry", "max_tokens": 2},
    "/tokenize": CHAT,
    "/v1/rerank": {"query": "ferry", "documents": ["a"]},
    "/v2/rerank": {"query": "ferry", "documents": ["a"]},
    "/v1/judge": {"question": "Which?", "answers": ["a", "b"]},
}


def tool(name: str, properties: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {f"property{each}": {"type": "string"} for each in range(properties)}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def schema(part: Any) -> dict[str, Any]:
    whole = {"type": "object", "properties": {"a": part}}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": whole}}


def call(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


HOSTILE: dict[str, dict[str, Any]] = {
    "tools of many properties": {"tools": [tool(f"tool{each}", 700) for each in range(110)]},
    "many tools": {"tools": [tool(str(each), 0) for each in range(30_000)]},
    "wrong documents": {"documents": [1] * 1_000_000},
    "empty documents": {"documents": [{}] * 900_000},
    "documents": {"documents": ["a"] * 700_000},
    "wrong messages": {"messages": [[]] * 900_000},
    "unknown fields": {f"field{each}": each for each in range(180_000)},
    "nested": {"chat_template_kwargs": {"a": 0}},  # see body_of
    "lists": {"metadata": {"a": [[]] * 900_000}},
    "stops": {"stop": ["a"] * 700_000},
    "bias": {"logit_bias": {str(each): 1.5 for each in range(250_000)}},
    "prompts": {"prompt": ["a"] * 700_000},
    "token ids": {"prompt": [1] * 1_300_000},
    "answers": {"answers": ["a"] * 700_000, "options": ["b"]},
    "a long query": {"query": "ferry " * 600_000},
    "a long question": {"question": "ferry " * 600_000, "messages": [{"role": "user", "content": "ferry " * 30_000}]},
    "a long text": {"documents": ["The ferry leaves at noon. " * 140_000]},
    "a text of lines": {"messages": [{"role": "user", "content": "a\n\nb " * 500_000}]},
    "a long title": {"documents": [{"text": "a", "title": "The ferry leaves at noon. " * 140_000}]},
    "long texts": {"documents": ["The ferry leaves at noon. " * 1000] * 140},
    "arguments of calls": {
        "messages": [*CHAT["messages"], call(json.dumps({str(each): each for each in range(200_000)}))]
    },
    "long answers": {"answers": ["ferry " * 6000] * 100, "criteria": {"ferry" * 9: "ferry " * 40_000}},
    "a slow schema": {"response_format": schema(PATTERN)},
    "a schema that counts": {"response_format": schema({"type": "array", "minItems": 10**6, "maxItems": 10**7})},
}


def body_of(path: str, name: str) -> bytes:
    content = json.dumps({**ROUTES[path], **HOSTILE[name]}).encode()
    if name == "nested":
        content = content.replace(b'{"a": 0}', b'{"a":' * 600_000 + b"0" + b"}" * 600_000)
    assert len(content) <= Settings.max_body_bytes
    return content


@pytest.fixture(scope="module")
def target(model: InvariantModel, monot5: MonoT5) -> Iterator[httpx.Client]:
    """A server of a model whose answers never end by themselves."""
    with client_of(InProcess(model, caches={"": KeyValueCache()}), Settings(timeout=60), monot5) as http:
        yield http


@pytest.fixture(scope="module")
def hasty(model: InvariantModel, monot5: MonoT5) -> Iterator[httpx.Client]:
    """A server whose requests have little time."""
    with client_of(InProcess(model), Settings(timeout=DEADLINE_SECONDS), monot5) as http:
        http.post("/tokenize", json=CHAT)  # a worker starts
        yield http


def test_every_route_that_takes_a_body_is_among_these() -> None:
    paths = {route.path for route in router.routes if isinstance(route, APIRoute) and "POST" in route.methods}
    assert paths == set(ROUTES)


@pytest.mark.parametrize("path", ROUTES)
def test_health_is_answered_at_once_while_a_route_reads_hostile_bodies(path: str, target: httpx.Client) -> None:
    late = [name for name in HOSTILE if slowest_health(target, path, body_of(path, name)) > HEALTH_SECONDS]
    for _ in range(3):  # others compute on this machine, too
        late = [name for name in late if slowest_health(target, path, body_of(path, name)) > HEALTH_SECONDS]
    assert not late


def slowest_health(http: httpx.Client, path: str, body: bytes) -> float:
    """Return the longest time that /health took, asked every 10 ms while the server has a body."""
    statuses: list[int] = []

    def send() -> None:
        headers = {"content-type": "application/json"}
        statuses.append(http.post(path, content=body, headers=headers).status_code)

    sender = threading.Thread(target=send)
    slowest = 0.0
    with httpx.Client(base_url=http.base_url, timeout=90) as probe:
        probe.get("/health")
        sender.start()
        while sender.is_alive():
            start = time.perf_counter()
            assert probe.get("/health").status_code == 200
            slowest = max(slowest, time.perf_counter() - start)
            time.sleep(0.01)
    assert statuses[0] in {200, 400, 413}, statuses
    return slowest


def check_others_run_during(work: Callable[[], Any]) -> None:
    longest = 0.0
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        begun = last = time.perf_counter()
        while not working.done():
            time.sleep(0.005)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
    assert working.result()
    assert longest < (last - begun) / 3


def test_other_threads_run_while_a_long_text_is_tokenized(embedded: InvariantModel) -> None:
    literals, text = literals_of(embedded.tokenizer), "The ferry leaves at noon. " * 100_000
    check_others_run_during(lambda: literals.encode_literal([text]))


def test_other_threads_run_while_a_long_text_is_split_for_citations() -> None:
    check_others_run_during(lambda: split_words("The ferry leaves at noon. " * 600_000))


LONG = "The ferry to Ostra leaves at noon, and the mill of Brenn grinds barley. "
ABANDONED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 3000, "temperature": 2.0, "seed": 1},
    "/v1/completions": {"prompt": ["The ferry", "The mill"], "max_tokens": 3000, "temperature": 2.0, "n": 2},
    "/tokenize": {"messages": [{"role": "user", "content": LONG * 3000}]},
    "/v1/rerank": {"query": "ferry", "documents": [f"{each} {LONG * 55}" for each in range(900)]},
    "/v2/rerank": {"query": "ferry", "documents": [f"{each} {LONG * 55}" for each in range(900)]},
    "/v1/judge": {"question": "Which?", "answers": ["a", "b"], "explain": True, "max_tokens": 3000},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_nothing_runs_on_when_its_client_has_left(path: str, stream: bool, target: httpx.Client) -> None:
    more = {"stream": True} if stream and "completions" in path else {}
    content = {**ABANDONED[path], **more}
    target.post(path, json=ROUTES[path])  # what is loaded at first is loaded
    with leaving(target, path, content):
        time.sleep(STAY_SECONDS)
    check_nothing_runs(target)


@pytest.mark.parametrize("path", ROUTES)
def test_nothing_runs_on_when_its_deadline_has_passed(path: str, hasty: httpx.Client) -> None:
    start = time.monotonic()
    response = hasty.post(path, json=ABANDONED[path])
    assert response.status_code == 504 or time.monotonic() - start < DEADLINE_SECONDS
    check_nothing_runs(hasty)


def check_nothing_runs(http: httpx.Client) -> None:
    """Check that places are free soon, and that nobody computes then."""
    begun = time.monotonic()
    wait_until(lambda: metric(http, "active_requests") == 0, END_SECONDS)
    time.sleep(max(begun + END_SECONDS - time.monotonic(), 0))
    computed = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - computed < 0.2
