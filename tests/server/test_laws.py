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
from invariant_rag.server import InProcess, Settings, job
from invariant_rag.server.application import router
from invariant_rag.words import split_words
from tests.server.conftest import CHAT, client_of, leaving, metric, wait_until

HEALTH_SECONDS = 0.2
END_SECONDS = 1.0
STAY_SECONDS = DEADLINE_SECONDS = 0.5
TEXT, TOKENS, RANK, RANK_2, JUDGE = "/v1/completions", "/tokenize", "/v1/rerank", "/v2/rerank", "/v1/judge"
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "When does the ferry leave?"}]}
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {**TALK, "max_tokens": 2},
    TEXT: {"prompt": "The ferry", "max_tokens": 2},
    TOKENS: TALK,
    RANK: {"query": "ferry", "documents": ["a"]},
    RANK_2: {"query": "ferry", "documents": ["a"]},
    JUDGE: {"question": "Which?", "answers": ["a", "b"]},
}
PATTERN = {"type": "string", "pattern": "^([a-z]?){400}(a|b|[c-z]{1,90}){80}$"}
FERRY = "The ferry leaves at noon. "


def tools(count: int, properties: int) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {f"property{each}": {"type": "string"} for each in range(properties)}}
    return [{"type": "function", "function": {"name": f"tool{each}", "parameters": schema}} for each in range(count)]


def schema(part: Any) -> dict[str, Any]:
    whole = {"type": "object", "properties": {"a": part}}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": whole}}


def call(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


TALKS, WITH_DOCUMENTS = (CHAT, TOKENS), (CHAT, TEXT, TOKENS, RANK)
HOSTILE: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "unknown fields": (tuple(ROUTES), {f"field{each}": each for each in range(180_000)}),
    "lists": (tuple(ROUTES), {"metadata": {"a": [[]] * 900_000}}),
    "nested": (TALKS, {"chat_template_kwargs": {"a": 0}}),  # see body_of
    "tools of many properties": (TALKS, {"tools": tools(110, 700)}),
    "many tools": (TALKS, {"tools": tools(30_000, 0)}),
    "wrong documents": (WITH_DOCUMENTS, {"documents": [1] * 1_000_000}),
    "empty documents": (WITH_DOCUMENTS, {"documents": [{}] * 900_000}),
    "documents": (WITH_DOCUMENTS, {"documents": ["a"] * 700_000}),
    "a long text": (WITH_DOCUMENTS, {"documents": [FERRY * 140_000]}),
    "a long title": (WITH_DOCUMENTS, {"documents": [{"text": "a", "title": FERRY * 140_000}]}),
    "long texts": ((*WITH_DOCUMENTS, RANK_2), {"documents": [FERRY * 1000] * 140}),
    "wrong messages": (TALKS, {"messages": [[]] * 900_000}),
    "a long question": (TALKS, {"messages": [{"role": "user", "content": "ferry " * 600_000}]}),
    "a text of lines": (TALKS, {"messages": [{"role": "user", "content": "a\n\nb " * 500_000}]}),
    "arguments": (TALKS, {"messages": [*TALK["messages"], call(json.dumps({str(n): n for n in range(200_000)}))]}),
    "stops": ((CHAT, TEXT), {"stop": ["a"] * 700_000}),
    "bias": ((CHAT, TEXT), {"logit_bias": {str(each): 1.5 for each in range(250_000)}}),
    "prompts": ((TEXT, TOKENS), {"prompt": ["a"] * 700_000}),
    "token ids": ((TEXT,), {"prompt": [1] * 1_300_000}),
    "a long query": ((RANK, RANK_2), {"query": "ferry " * 600_000}),
    "answers": ((JUDGE,), {"answers": ["a"] * 700_000, "options": ["b"]}),
    "long answers": ((JUDGE,), {"answers": ["ferry " * 6000] * 100, "criteria": {"ferry" * 9: "ferry " * 40_000}}),
    "a judge's long question": ((JUDGE,), {"question": "ferry " * 600_000}),
    "a slow schema": ((CHAT,), {"response_format": schema(PATTERN)}),
    "a schema that counts": ((CHAT,), {"response_format": schema({"type": "array", "minItems": 10**6})}),
}


def body_of(path: str, name: str) -> bytes:
    content = json.dumps({**ROUTES[path], **HOSTILE[name][1]}).encode()
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
        http.post(TOKENS, json=TALK)  # a worker starts
        yield http


def test_every_route_that_takes_a_body_is_among_these() -> None:
    paths = {route.path for route in router.routes if isinstance(route, APIRoute) and "POST" in route.methods}
    assert paths == set(ROUTES)


@pytest.mark.parametrize("path", ROUTES)
def test_health_is_answered_at_once_while_a_route_reads_hostile_bodies(path: str, target: httpx.Client) -> None:
    late = [name for name, (paths, _) in HOSTILE.items() if path in paths]
    for _ in range(4):  # others compute on this machine, too
        late = [name for name in late if slowest_health(target, path, body_of(path, name)) > HEALTH_SECONDS]
    assert not late


def slowest_health(http: httpx.Client, path: str, body: bytes) -> float:
    """Return the longest time that /health took, asked every 10 ms while the server has a body."""
    slowest = 0.0
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=http.base_url, timeout=90) as probe:
        probe.get("/health")
        sent = pool.submit(http.post, path, content=body, headers={"content-type": "application/json"})
        while not sent.done():
            start = time.perf_counter()
            assert probe.get("/health").status_code == 200
            slowest = max(slowest, time.perf_counter() - start)
            time.sleep(0.01)
    assert sent.result().status_code in {200, 400, 413}, sent.result().text
    return slowest


def test_a_body_is_parsed_where_the_work_can_be_stopped(target: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, body = threading.active_count(), body_of(CHAT, "lists")
    with monkeypatch.context() as patch:
        patch.setattr(job, "_PARSING_SECONDS", 0.001)
        response = target.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert (response.status_code, "parsed within 0.001 seconds" in response.text) == (413, True)
    computed = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - computed < 0.1
    assert threading.active_count() <= threads + 1
    assert target.post(CHAT, json=ROUTES[CHAT]).status_code == 200


@pytest.mark.parametrize("work", ["tokenized", "split for citations"])
def test_other_threads_run_while_a_long_text_is(work: str, embedded: InvariantModel) -> None:
    text = FERRY * (30_000 if work == "tokenized" else 200_000)
    working: Callable[[], Any] = lambda: split_words(text)  # noqa: E731
    if work == "tokenized":
        literals = literals_of(embedded.tokenizer)
        working = lambda: literals.encode_literal([text])  # noqa: E731
    longest = 0.0
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(working)
        begun = last = time.perf_counter()
        while not done.done():
            time.sleep(0.005)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
    assert done.result()
    assert longest < (last - begun) / 3


LONG = "The ferry to Ostra leaves at noon, and the mill of Brenn grinds barley. "
TALKING = {**TALK, "max_tokens": 3000, "temperature": 2.0, "seed": 1}
TEXTS = {"prompt": ["The ferry", "The mill"], "max_tokens": 3000, "temperature": 2.0, "n": 2}
RANKED = {"query": "ferry", "documents": [f"{each} {LONG * 55}" for each in range(900)]}
ABANDONED: dict[str, tuple[str, dict[str, Any]]] = {
    CHAT: (CHAT, TALKING),
    f"{CHAT}, streamed": (CHAT, {**TALKING, "stream": True}),
    TEXT: (TEXT, TEXTS),
    f"{TEXT}, streamed": (TEXT, {**TEXTS, "stream": True}),
    TOKENS: (TOKENS, {"messages": [{"role": "user", "content": LONG * 3000}]}),
    RANK: (RANK, RANKED),
    RANK_2: (RANK_2, RANKED),
    JUDGE: (JUDGE, {"question": "Which?", "answers": ["a", "b"], "explain": True, "max_tokens": 3000}),
}


@pytest.mark.parametrize("name", ABANDONED)
def test_nothing_runs_on_when_its_client_has_left(name: str, target: httpx.Client) -> None:
    path, content = ABANDONED[name]
    target.post(path, json=ROUTES[path])  # what is loaded at first is loaded
    with leaving(target, path, content):
        time.sleep(STAY_SECONDS)
    check_nothing_runs(target)


@pytest.mark.parametrize("path", ROUTES)
def test_nothing_runs_on_when_its_deadline_has_passed(path: str, hasty: httpx.Client) -> None:
    start = time.monotonic()
    response = hasty.post(path, json=ABANDONED[path][1])
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
