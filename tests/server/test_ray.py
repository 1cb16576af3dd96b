"""Replicas on Ray Serve: the answers of one process, from whichever replica has read the documents."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve")

import ray
from ray import serve
from ray.util import list_named_actors

from invariant_rag.orderings import MonoT5
from invariant_rag.server import Settings
from invariant_rag.server.engines.building import EngineConfig, build_engine
from invariant_rag.server.engines.ray import RayEngine
from invariant_rag.server.scaling import Scale, deployment_of, running_replicas
from tests.server.conftest import FLAGS, QUESTION, serving

pytestmark = pytest.mark.xdist_group("ray")  # one cluster for all of them

REPLICAS = 3
CONFIG = EngineConfig(name="small", cache_gb=0.1, together=4)
SETTINGS = Settings(timeout=60, max_prompt_tokens=600, keys={"key-of-ada": "ada", "key-of-ivo": "ivo"})
SCALE = Scale(REPLICAS, replica_cpus=0.5)
POWER_OF_TWO = "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"
CHAT = "/v1/chat/completions"
SETS, ASKED = 12, 3
LONG = "Count the flags of Ostra, Brenn and Gesthaven, and tell which one is the oldest. "


@pytest.fixture(scope="module")
def engine() -> Iterator[RayEngine]:
    with running_replicas(CONFIG, SETTINGS, SCALE) as (engine, _):
        yield engine


@contextmanager
def client_of(engine: Any, reranker: Any = None) -> Iterator[httpx.Client]:
    with (
        serving(engine, SETTINGS, reranker) as url,
        httpx.Client(base_url=url, timeout=90, headers={"authorization": "Bearer key-of-ada"}) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def http(engine: RayEngine) -> Iterator[httpx.Client]:
    from invariant_rag.server.engines.ray import RemoteRelevance

    with client_of(engine, RemoteRelevance(engine, MonoT5())) as client:
        yield client


@pytest.fixture(scope="module")
def alone() -> Iterator[httpx.Client]:
    """The same server with the engine in its process."""
    with client_of(build_engine(CONFIG, SETTINGS)) as client:
        yield client


def body(documents: Any = FLAGS, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": "small", "messages": messages, "documents": documents, "max_tokens": 8, **more}


def shuffled(number: int, seed: int) -> list[str]:
    """Return one of many sets, in an order that a seed chooses."""
    documents = [*FLAGS, f"The gate of Ostra has {number} towers."]
    return random.Random(seed).sample(documents, len(documents))


def without_ids(reply: Any) -> Any:
    """Return a reply without what differs from request to request."""
    if isinstance(reply, dict):
        changing = {"id", "created", "prompt_tokens_details"}
        return {name: without_ids(value) for name, value in reply.items() if name not in changing}
    return [without_ids(each) for each in reply] if isinstance(reply, list) else reply


def hit_rate(http: httpx.Client) -> float:
    """Return the share of requests with a set that was read before, each set asked several times in random orders."""
    seeds, hits = count(), 0
    for _ in range(ASKED):
        for number in range(SETS):
            reply = http.post(CHAT, json=body(shuffled(number, next(seeds)), max_tokens=1)).json()
            hits += reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    return hits / (SETS * ASKED)


def replicas() -> dict[str, Any]:
    """Return the actors of all replicas that are alive."""
    names = [each["name"] for each in list_named_actors(all_namespaces=True) if each["name"].startswith("SERVE_REPLICA")]
    return {name: ray.get_actor(name, namespace="serve") for name in names}


def busy() -> list[Any]:
    """Return the replicas that are answering."""
    return [actor for actor in replicas().values() if ray.get(actor.get_num_ongoing_requests.remote())]


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]")


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        (CHAT, body(logprobs=True)),
        (CHAT, body(n=2, temperature=0.8, seed=3)),
        (CHAT, body(response_format={"type": "json_object"})),
        ("/v1/completions", {"prompt": QUESTION, "documents": FLAGS, "max_tokens": 8}),
        ("/tokenize", {"messages": [{"role": "user", "content": QUESTION}], "documents": FLAGS}),
        ("/v1/judge", {"question": QUESTION, "options": ["white", "green"]}),
        ("/v1/rerank", {"query": QUESTION, "documents": FLAGS}),
        (CHAT, body(["word " * 600])),
        (CHAT, body(invariant={"method": "no-such"})),
        (CHAT, body(stop=["x"], response_format={"type": "json_object"})),
    ],
)
def test_a_reply_is_that_of_one_process(
    http: httpx.Client, alone: httpx.Client, path: str, request_body: dict[str, Any]
) -> None:
    replies = [each.post(path, json=request_body) for each in (http, alone)]
    assert replies[0].status_code == replies[1].status_code
    assert without_ids(replies[0].json()) == without_ids(replies[1].json())


def test_a_stream_is_that_of_one_process(http: httpx.Client, alone: httpx.Client) -> None:
    found = []
    for each in (http, alone):
        with each.stream("POST", CHAT, json=body(stream=True, stream_options={"include_usage": True})) as response:
            found.append([without_ids(chunk) for chunk in chunks(response.iter_lines())])
    assert len(found[0]) > 2
    assert found[0] == found[1]


def test_every_replica_gives_the_same_answers_and_equal_sets_meet_the_one_that_read_them(
    http: httpx.Client, alone: httpx.Client
) -> None:
    for number in range(SETS):
        answers = [without_ids(each.post(CHAT, json=body(shuffled(number, 0))).json()) for each in (http, alone)]
        assert answers[0] == answers[1]
    assert hit_rate(http) == 1
    totals = [ray.get(each.get_metadata.remote()) for each in replicas().values()]
    assert len(totals) == REPLICAS


def test_a_tenant_learns_nothing_of_what_another_has_asked(http: httpx.Client) -> None:
    documents = [f"{text} Twice." for text in FLAGS]

    def cached(key: str) -> int:
        reply = http.post(CHAT, json=body(documents), headers={"authorization": f"Bearer {key}"}).json()
        tokens: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert cached("key-of-ada") == 0
    assert cached("key-of-ivo") == 0
    assert cached("key-of-ada") > 0
    assert http.post(CHAT, json=body(), headers={"authorization": "Bearer wrong"}).status_code == 401


def test_a_client_that_leaves_frees_the_replica(http: httpx.Client) -> None:
    with http.stream("POST", CHAT, json=body(max_tokens=400, stream=True)) as response:
        next(chunks(response.iter_lines()))
        assert busy()
    left = time.monotonic()
    wait_until(lambda: not busy())
    stopped = time.monotonic() - left
    start = time.monotonic()
    http.post(CHAT, json=body(max_tokens=400))
    assert stopped < (time.monotonic() - start) / 2


def test_readiness_counts_the_replicas(http: httpx.Client) -> None:
    assert http.get("/ready").json()["replicas"] == REPLICAS
