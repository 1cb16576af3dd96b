"""Keys, tenants, limits, deadlines and turns; what operators see: metrics, traces, lines of JSON, the shutdown."""

from __future__ import annotations

import json
import logging
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import wraps
from io import StringIO
from math import inf
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from transformers import StoppingCriteria

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.generation.streaming import TextStream
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.admission import FairQueue, Shares
from invariant_rag.server.engines.upstream import Upstream
from invariant_rag.server.logs import JsonLines, LogLimit
from tests.server.conftest import CHAT, FLAGS, bearer, body, client_of, leaving, metric, serving, wait_until
from tests.server.scripted import Answer, completion, scripted_api

ADA, IVO, OPERATOR = bearer("key-of-ada"), bearer("key-of-ivo"), bearer("key-of-operator")
KEYS = {"key-of-ada": "ada", "key-of-ivo": "ivo"}
LONG = body(max_tokens=3000)  # the answers of this model never end by themselves
TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "x-request-id": "mine-7"}


@pytest.fixture(scope="module")
def limited(model: InvariantModel) -> Iterator[httpx.Client]:
    """A server with two tenants and narrow limits."""
    caches = {tenant: KeyValueCache(namespace=tenant) for tenant in KEYS.values()}
    engine = InProcess(model, caches=caches, max_prompt_tokens=600)
    narrow: dict[str, Any] = {"max_body_bytes": 20_000, "max_requests": 3, "body_timeout": 1.0}
    with client_of(engine, Settings(keys=KEYS, operator_key="key-of-operator", **narrow)) as http:
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


def test_a_tenant_learns_nothing_of_what_another_has_asked_nor_a_worker_a_key(limited: httpx.Client) -> None:
    def cached(headers: dict[str, str]) -> int:
        asked = body(documents=[f"{text} Twice." for text in FLAGS], max_tokens=4)
        usage = limited.post(CHAT, json=asked, headers=headers).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(ADA), cached(IVO)] == [0, 0]
    assert cached(ADA) > 0
    sent = Settings(keys=KEYS, operator_key="key-of-operator").without_keys()  # what the process gets
    assert b"key-of" not in pickle.dumps(sent)


LONGER = "at most 600 tokens"


@pytest.mark.parametrize(
    ("path", "content", "told"),
    [
        (CHAT, json.dumps(body(documents=["word " * 5000])).encode(), "20000 bytes"),
        (CHAT, [b" " * 9000] * 3, "20000 bytes"),
        (CHAT, json.dumps(body(documents=["word " * 500])).encode(), LONGER),
        *(
            ("/v1/judge", json.dumps({"question": "?", "answers": ["word " * 500, "b"], "by": by}).encode(), LONGER)
            for by in ("letters", "texts")
        ),
    ],
)
def test_bodies_and_prompts_that_are_too_long_are_refused(
    path: str, content: Any, told: str, limited: httpx.Client
) -> None:
    given = content if isinstance(content, bytes) else iter(content)
    response = limited.post(path, content=given, headers={**ADA, "content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large")
    assert told in response.text


def test_a_body_that_comes_too_slowly_is_refused_and_a_head_ends_the_connection(limited: httpx.Client) -> None:
    def slowly() -> Iterator[bytes]:
        yield b'{"messages": '
        time.sleep(1.6)
        yield b"[]}"

    assert limited.post(CHAT, content=slowly(), headers=ADA).status_code == 408
    with socket.create_connection((limited.base_url.host, limited.base_url.port)) as slow:
        slow.settimeout(5)
        for piece in (b"POST / HTTP/1.1\r\n", b"Host: a\r\n", b"X: b\r\n"):
            slow.sendall(piece)
            time.sleep(0.1)
        assert slow.recv(100) == b""


def test_a_request_too_many_is_told_when_to_come_back_and_another_tenant_is_answered(limited: httpx.Client) -> None:
    key = "key-of-ada"
    with leaving(limited, CHAT, LONG, key), leaving(limited, CHAT, LONG, key, beside=1):
        refused = limited.post(CHAT, json=LONG, headers=ADA)
        assert (refused.status_code, 1 <= int(refused.headers["retry-after"]) <= 60) == (429, True)
        assert metric(limited, "rejected_total", reason="queue") == 1
        assert limited.get("/ready").status_code == 200  # a full queue is no reason to be taken out of service
        assert limited.post(CHAT, json=body(max_tokens=2), headers=IVO).status_code == 200  # a place is kept for others
    wait_until(lambda: metric(limited, "active_requests") == 0)


def test_requests_are_named_and_logged_without_their_contents_unless_these_are_asked_for(
    limited: httpx.Client, embedded: InvariantModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "invariant_rag.server"):
        good = limited.post(CHAT, json=body(max_tokens=4), headers={**ADA, "x-request-id": "mine-1"})
        bad = limited.post(CHAT, json=body(secret="barley"), headers={**ADA, "x-request-id": "no no"})
        wait_until(lambda: sum(each.getMessage() == "request" for each in caplog.records) >= 2)
    assert (good.headers["x-request-id"], good.json()["id"]) == ("mine-1", "chatcmpl-mine-1")
    assert bad.headers["x-request-id"] not in {"", "no no"}
    lines = [json.loads(JsonLines().format(each)) for each in caplog.records if each.name.startswith("invariant")]
    found = {line["request_id"]: line for line in lines}
    assert found["mine-1"]["status"] == 200
    assert found["mine-1"]["prompt_tokens"] > 0
    assert found[bad.headers["x-request-id"]]["error"] == "InvalidRequest"
    assert not any(word in json.dumps(lines) for word in ("barley", "Ostra", "key-of-ada", "secret"))
    with client_of(InProcess(embedded), Settings(log_contents=True)) as http, caplog.at_level(logging.INFO):
        http.post(CHAT, json=body())
    assert any("barley" in JsonLines().format(record) for record in caplog.records)


HISTOGRAMS = ("time_to_first_token", "inter_token_latency", "request_queue_time", "e2e_request_latency")


def test_metrics_are_for_the_operator_and_have_the_names_that_vllm_has(limited: httpx.Client) -> None:
    limited.post(CHAT, json=body(stream=True, max_tokens=60), headers=ADA)
    for key in (ADA, IVO, bearer("key")):
        response = limited.get("/metrics", headers=key)
        assert response.status_code == 401
        assert "INVARIANT_RAG_OPERATOR_KEY" in response.json()["error"]["hint"]
    assert limited.post(CHAT, json=body(), headers=OPERATOR).status_code == 401
    counters = ("prompt_tokens_total", "generation_tokens_total", "prompt_tokens_cached_total", "cache_misses_total")
    for name in (*(f"{each}_seconds_count" for each in HISTOGRAMS), *counters):
        assert metric(limited, name) > 0, name


def test_names_of_request_and_trace_and_what_an_engine_has_are_passed_on() -> None:
    more = {"frequency_penalty": 0.5, "presence_penalty": -1.0, "logit_bias": {"7": 3.0}, "top_logprobs": 2}
    top = [{"token": "white", "logprob": -0.1, "bytes": None}, {"token": "red", "logprob": -2.5, "bytes": None}]
    answer = completion()
    answer["choices"][0]["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    with scripted_api() as api, client_of(Upstream(api.url, "far")) as http:
        api.plan(Answer(body=answer))
        response = http.post(CHAT, json=body(logprobs=True, **more), headers=TRACE)
        assert "invariant_rag_cache_hits" not in http.get("/metrics").text  # there is no cache here: 0 would be a lie
    assert response.headers["x-request-id"] == "mine-7"
    assert TRACE.items() <= api.headers[-1].items()
    assert more.items() <= api.bodies[-1].items()
    assert response.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == top


def test_spans_belong_to_the_trace_of_the_client(embedded: InvariantModel) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with serving(InProcess(embedded)) as url:
        httpx.post(f"{url}{CHAT}", json=body(), headers=TRACE, timeout=30)
    spans: list[ReadableSpan] = [each for each in exporter.get_finished_spans() if "invariant_rag" in each.name]
    assert {each.name for each in spans} == {"invariant_rag.parse", "invariant_rag.answer"}
    assert {f"{each.context.trace_id:032x}" for each in spans} == {TRACE["traceparent"].split("-")[1]}
    assert all(each.attributes and each.attributes["gen_ai.request.id"] == "mine-7" for each in spans)


def test_every_line_is_json_and_what_comes_again_and_again_is_counted() -> None:
    stream, limit = StringIO(), LogLimit()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    handler.addFilter(limit)
    logger = logging.getLogger("invariant_rag.test_limits")
    logger.propagate, logger.handlers = False, [handler]
    clock = iter([0.0] * 279 + [60.0])
    limit.now = lambda: next(clock)
    for _ in range(280):
        logger.warning("the disk is\nfull")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (len(lines), lines[-1]["left_out"]) == (21, 259)


@pytest.mark.slow
def test_the_command_finishes_what_runs_before_it_ends(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    url, log, found = f"http://127.0.0.1:{port}", tmp_path / "log", list[str]()
    command = [sys.executable, "-c", "from invariant_rag.cli import app; app()", "serve", "--port", port]

    def read() -> None:
        asked = body(stream=True, temperature=2.0, seed=1, max_tokens=150)
        with httpx.stream("POST", f"{url}{CHAT}", json=asked) as response:
            found.extend(response.iter_lines())

    def is_up() -> bool:
        assert server.poll() is None, "it ended"
        try:
            return httpx.get(f"{url}/health").is_success
        except httpx.ConnectError:
            return False

    with log.open("wb") as stderr, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr) as server:
        try:
            wait_until(is_up, 90)
            reader = threading.Thread(target=read)
            reader.start()
            wait_until(lambda: found or "active_requests 1.0" in httpx.get(f"{url}/metrics").text)
            server.send_signal(signal.SIGTERM)
            reader.join(30)
            assert "data: [DONE]" in found
            assert server.wait(30) in {0, -signal.SIGTERM}  # uvicorn passes the signal on when it has ended
        finally:
            server.kill()
    assert all(isinstance(json.loads(line), dict) for line in log.read_text().splitlines() if line.startswith("{"))


TENANTS = ("greedy", "modest")
GREEDY, MODEST = map(bearer, TENANTS)
SHARED: Any = {"keys": {tenant: tenant for tenant in TENANTS}, "operator_key": "key-of-operator"}
TIMES_AS_LATE, ASKED, FLOOD_TOKENS = 3, 5, 100
HALT_SECONDS = 30.0  # that a request may take to the model while nothing else computes


class Watched(MicroBatcher):
    """A batcher that counts the forward passes until each answer to the modest tenant has a token.

    Passes halt from when such a request is sent until it is here. So the counts are those of any machine, however busy;
    and a request that waits for a pass of others before it gets here is never here, which counts as infinity.
    """

    def __init__(self, modest: KeyValueCache) -> None:
        super().__init__()
        self._modest, self.passes, self.late = modest, 0, list[float]()
        self.here = Event()
        self.here.set()

    def count(self) -> None:
        if not self.here.wait(HALT_SECONDS):
            self.late.append(inf)
            self.here.set()
        self.passes += 1

    def stream(self, lm: InvariantModel, prompt: Any, options: Any = None, **more: Any) -> TextStream:
        if lm.cache is not self._modest:
            return super().stream(lm, prompt, options, **more)
        found = super().stream(lm, prompt, {**options, "stopping_criteria": [FirstToken(self)]}, **more)
        self.here.set()
        return found


class FirstToken(StoppingCriteria):
    """Notes how many passes there were until the first token, in the thread that holds the model."""

    def __init__(self, watched: Watched) -> None:
        self._watched, self._begun, self._came = watched, watched.passes, False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        if not self._came:
            self._watched.late.append(self._watched.passes - self._begun)
        self._came = True
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("more", [{}, {"temperature": 1.5, "seed": 1}], ids=["greedy", "sampled"])
def test_a_flood_of_one_tenant_does_not_keep_another_from_its_first_token(
    more: dict[str, Any], model: InvariantModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's answers never end by themselves. Lateness is counted in forward passes, of whomever they are."""
    engine = InProcess(model, caches={tenant: KeyValueCache(namespace=tenant) for tenant in TENANTS})
    watched = engine.batcher = Watched(engine.caches["modest"])
    stop, forward = Event(), type(model.model).forward

    @wraps(forward)
    def counted(module: Any, *given: Any, **options: Any) -> Any:
        watched.count()
        return forward(module, *given, **options)

    monkeypatch.setattr(type(model.model), "forward", counted)  # with a hook, nothing would be cached

    def lateness(http: httpx.Client, passes: int) -> list[float]:
        """Ask again and again, each time after so many passes: who asks at once shares the model half and half."""
        watched.late.clear()
        for number in range(1, ASKED + 1):
            begun = watched.passes
            wait_until(lambda: watched.passes >= begun + passes, 60)  # noqa: B023
            watched.here.clear()
            sent = body(stream=True, max_tokens=40, **more)
            assert http.post(CHAT, json=sent, headers=MODEST).status_code == 200
            assert (len(watched.late), inf in watched.late) == (number, False)
        return list(watched.late)

    def flood(http: httpx.Client) -> None:
        while not stop.is_set():
            if http.post(CHAT, json=body(max_tokens=FLOOD_TOKENS, **more), headers=GREEDY).status_code == 429:
                stop.wait(1)

    with client_of(engine, Settings(**SHARED)) as http, ThreadPoolExecutor(80) as pool:
        _, *alone = lateness(http, 0)  # the first one reads the documents
        flooding = [pool.submit(flood, http) for _ in range(80)]
        try:
            wait_until(lambda: metric(http, "active_requests") > 2 * engine.together, 60)
            late = lateness(http, 2 * FLOOD_TOKENS)  # by then, the batch that the last one has interrupted is done
        finally:
            stop.set()
        for each in flooding:
            each.result()
    assert max(late) < TIMES_AS_LATE * min(alone), (late, alone)


def test_a_part_of_the_places_is_kept_for_tenants_who_are_not_there() -> None:
    shares = Shares(12, 2)
    for tenant, places in (("greedy", 9), ("modest", 3)):
        assert all(shares.take(tenant) for _ in range(places))
        assert not shares.take(tenant)
    for tenant in ("greedy", "modest"):
        shares.taken["greedy"] -= 1
        assert shares.take(tenant)


def test_turns_go_round_short_requests_overtake_long_ones_and_who_leaves_keeps_none() -> None:
    queue, done, left = FairQueue(1, 2), list[str](), Event()
    waiting = [
        ("greedy", 60.0, "long"),
        ("greedy", 1.0, "short"),
        ("greedy", 61.0, "longer"),
        ("modest", 90.0, "other"),
    ]

    def wait(tenant: str, seconds: float, name: str) -> None:
        with queue.turn(tenant, seconds, Event()):
            done.append(name)

    with ThreadPoolExecutor(4) as pool, queue.turn("greedy", 0.0, Event()):
        for number, each in enumerate(waiting, 1):
            pool.submit(wait, *each)
            wait_until(lambda: queue.waiting == number)  # noqa: B023
        left.set()
        with pytest.raises(CancelledError), queue.turn("modest", 0.0, left):
            pass
    assert done == ["other", "short", "long", "longer"]
    with queue.turn("", 0.0, Event()):
        assert queue.waiting == 0
