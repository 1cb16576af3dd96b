"""What operators see: metrics by their usual names, traces, lines of JSON, and whether the model can answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from io import StringIO

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.engines.upstream import Upstream
from invariant_rag.server.logs import JsonLines, RateLimit
from tests.server.conftest import CHAT, bearer, body, client_of, metric, serving
from tests.server.scripted import Answer, ScriptedAPI, completion, scripted_api

TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "x-request-id": "mine-7"}


@pytest.fixture(scope="module")
def http(model: InvariantModel) -> Iterator[httpx.Client]:
    """A server of a model whose answers never end by themselves."""
    settings = Settings(keys={"key-of-ada": "ada", "key-of-ivo": "ivo"}, operator_key="key-of-operator")
    engine = InProcess(model, caches={each: KeyValueCache(namespace=each) for each in ("ada", "ivo")})
    with client_of(engine, settings) as client:
        yield client


def test_metrics_are_for_the_operator_and_have_the_names_that_vllm_has(http: httpx.Client) -> None:
    http.post(CHAT, json=body(stream=True, max_tokens=60), headers=bearer("key-of-ada"))
    for key in ("key-of-ada", "key-of-ivo", "key"):
        response = http.get("/metrics", headers=bearer(key))
        assert response.status_code == 401
        assert "INVARIANT_RAG_OPERATOR_KEY" in response.json()["error"]["hint"]
    assert http.post(CHAT, json=body(), headers=bearer("key-of-operator")).status_code == 401
    for name in ("time_to_first_token", "inter_token_latency", "request_queue_time", "e2e_request_latency"):
        assert metric(http, f"{name}_seconds_count") > 0, name
    assert metric(http, "cache_misses_total") > 0


@pytest.fixture
def api() -> Iterator[ScriptedAPI]:
    with scripted_api() as found:
        yield found


def test_names_of_request_and_trace_and_fields_of_the_engine_are_passed_on(api: ScriptedAPI) -> None:
    api.plan(Answer(body=completion()))
    more = {"frequency_penalty": 0.5, "presence_penalty": -1.0, "logit_bias": {"7": 3.0}}
    with serving(Upstream(api.url, "far")) as url:
        response = httpx.post(f"{url}{CHAT}", json=body(**more), headers=TRACE, timeout=30)
        page = httpx.get(f"{url}/metrics").text
    assert response.headers["x-request-id"] == "mine-7"
    assert TRACE.items() <= api.headers[-1].items()
    assert more.items() <= api.bodies[-1].items()
    assert "invariant_rag_cache_hits" not in page  # there is no cache here: 0 would be a lie


def test_the_likeliest_tokens_come_from_an_engine_that_has_them(api: ScriptedAPI) -> None:
    top = [{"token": "white", "logprob": -0.1, "bytes": None}, {"token": "red", "logprob": -2.5, "bytes": None}]
    answer = completion()
    answer["choices"][0]["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    api.plan(Answer(body=answer))
    with serving(Upstream(api.url, "far")) as url:
        asked = body(logprobs=True, top_logprobs=2)
        reply = httpx.post(f"{url}{CHAT}", json=asked, timeout=30).json()
    assert api.bodies[-1]["top_logprobs"] == 2
    assert reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == top


def test_spans_belong_to_the_trace_of_the_client(embedded: InvariantModel) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with serving(InProcess(embedded)) as url:
        httpx.post(f"{url}{CHAT}", json=body(), headers=TRACE, timeout=30)
    spans: list[ReadableSpan] = [
        each for each in exporter.get_finished_spans() if each.name.startswith("invariant_rag.")
    ]
    assert {each.name for each in spans} == {"invariant_rag.parse", "invariant_rag.answer"}
    assert {f"{each.context.trace_id:032x}" for each in spans} == {TRACE["traceparent"].split("-")[1]}
    assert all(each.attributes and each.attributes["request.id"] == "mine-7" for each in spans)


def test_a_full_queue_is_no_reason_to_be_taken_out_of_service(model: InvariantModel) -> None:
    long = body(stream=True, max_tokens=3000)  # the answers of this model never end by themselves
    with serving(InProcess(model), Settings(max_requests=1)) as url, httpx.stream("POST", f"{url}{CHAT}", json=long):
        assert httpx.post(f"{url}{CHAT}", json=body()).status_code == 429
        assert httpx.get(f"{url}/ready").status_code == 200


def test_every_line_is_json_and_what_comes_again_and_again_is_counted() -> None:
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    limit = RateLimit()
    handler.addFilter(limit)
    logger = logging.getLogger("invariant_rag.test_operators")
    logger.propagate, logger.handlers = False, [handler]
    clock = iter([0.0] * 279 + [60.0])
    limit.now = lambda: next(clock)
    for _ in range(280):
        logger.warning("the disk is\nfull")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == 21
    assert lines[-1]["left_out"] == 259
