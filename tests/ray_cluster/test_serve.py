"""Replicas on Ray Serve: the answers of one process, from whichever replica has read the documents."""

import asyncio
import json
import os
import random
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import httpx
import pytest

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on loopback
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # of 5: a machine that is busy starts the proxy later
}
pytest.importorskip("ray.serve")

import ray
from ray import serve
from ray.util import list_named_actors

from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.server import Settings
from invariant_rag.server.engines.building import build_engine, build_reranker
from invariant_rag.server.ray_app import RayEngine, deployment_of
from invariant_rag.server.settings import EngineConfig, Scale
from tests.server.conftest import CHAT, FLAGS, QUESTION, bearer, client_of, leaving, metric, served, stable, wait_until
from tests.server.conftest import body as chat

REPLICAS = 3
SETTINGS = Settings(timeout=60, max_prompt_tokens=1200, keys={"key-of-ada": "ada", "key-of-ivo": "ivo"})
SCALE = Scale(REPLICAS, replica_cpus=0.5)
RERANKER = str(EMBEDDED["monot5"])
SETS, ASKED = 12, 3
LEAVING_SECONDS = 5
TALK = {"messages": [{"role": "user", "content": QUESTION}]}
CHOICE, RANKED = {"question": QUESTION, "options": ["white", "green"]}, {"query": QUESTION, "documents": FLAGS}
ADA, IVO = bearer("key-of-ada"), bearer("key-of-ivo")


@pytest.fixture(scope="module")
def config(tiny_folder):
    """A model whose answers never end by themselves."""
    return EngineConfig(str(tiny_folder), "small", cache_gb=0.1, together=4)


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster on this machine, and the address of Ray Serve in it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def http(cluster, config, tmp_path_factory):
    """`serve run` with three replicas in the cluster, as a client of it."""
    folder = tmp_path_factory.mktemp("run")
    keys = folder / "keys"
    keys.write_text("".join(f"{tenant} {key}\n" for key, tenant in SETTINGS.keys.items()), encoding="utf-8")
    given = {"model": config.model, "name": "small", "cache_gb": config.cache_gb, "keys": keys}
    given |= {"together": config.together, "replicas": REPLICAS, "replica_cpus": 0.5, "replica_gpus": 0}
    given |= {"reranker": RERANKER, "timeout": SETTINGS.timeout, "max_prompt_tokens": SETTINGS.max_prompt_tokens}
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "invariant_rag.server:app", "--name", "run"]
    command += [f"{name}={value}" for name, value in given.items()]
    found = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}  # the cluster
    with (
        served(command, folder / "log", cluster, env=found),
        httpx.Client(base_url=cluster, timeout=90, headers=ADA) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def alone(config):
    """The same server with the engine in its process."""
    with client_of(build_engine(config, SETTINGS), SETTINGS, build_reranker(RERANKER)) as client:
        client.headers.update(ADA)
        yield client


def body(documents=FLAGS, **more):
    return chat(model="small", documents=documents, **{"max_tokens": 8, **more})


def shuffled(number, seed):
    """Return one of many sets, in an order that a seed chooses."""
    documents = [*FLAGS, f"The gate of Ostra has {number} towers."]
    return random.Random(seed).sample(documents, len(documents))


def busy():
    """Return the replicas that are answering."""
    names = [each["name"] for each in list_named_actors(all_namespaces=True) if "#replicas#" in each["name"]]
    actors = [ray.get_actor(name, namespace="serve") for name in names]
    return [actor for actor in actors if ray.get(actor.get_num_ongoing_requests.remote())]


def chunks(lines):
    return (json.loads(line[6:]) for line in lines if line.startswith("data: ") and line != "data: [DONE]")


def test_a_reply_whole_or_streamed_is_that_of_one_process(http, alone):
    for path, sent in (
        (CHAT, body(logprobs=True)),
        (CHAT, body(n=2, temperature=0.8, seed=3)),
        (CHAT, body(response_format={"type": "json_object"})),
        ("/v1/completions", {"prompt": QUESTION, "documents": FLAGS, "max_tokens": 8}),
        ("/tokenize", {**TALK, "documents": FLAGS}),
        ("/v1/judge", CHOICE),
        ("/v1/rerank", RANKED),
        (CHAT, body(["word " * 600])),
        (CHAT, body(invariant={"method": "no-such"})),
        (CHAT, body(stop=["x"], response_format={"type": "json_object"})),
    ):
        replies = [each.post(path, json=sent) for each in (http, alone)]
        assert replies[0].status_code == replies[1].status_code, sent
        assert stable(replies[0].json()) == stable(replies[1].json()), sent
    assert http.post(CHAT, json=body(), headers=bearer("wrong")).status_code == 401
    named = http.post(CHAT, json=body(), headers={"x-request-id": "mine"})
    assert set(named.headers.get_list("x-request-id", split_commas=True)) == {"mine"}
    asked = body(stream=True, stream_options={"include_usage": True})
    found = [list(map(stable, chunks(each.post(CHAT, json=asked).text.splitlines()))) for each in (http, alone)]
    assert len(found[0]) > 2
    assert found[0] == found[1]


def test_equal_sets_in_any_order_meet_the_replica_that_has_read_them_for_the_same_tenant(http, alone):
    seeds = count()

    def hits(**more):
        sent = [body(shuffled(number, next(seeds)), max_tokens=1) for number in range(SETS)]
        replies = [http.post(CHAT, json=each, **more).json() for each in sent]
        return [each["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for each in replies]

    assert [hits() for _ in range(ASKED)] == [[asked > 0] * SETS for asked in range(ASKED)]
    assert [hits(headers=IVO), hits(headers=IVO)] == [[False] * SETS, [True] * SETS]
    for number in range(SETS):
        answers = [stable(each.post(CHAT, json=body(shuffled(number, 0))).json()) for each in (http, alone)]
        assert answers[0] == answers[1]


def test_a_client_that_leaves_frees_the_replica_and_nothing_waits_for_one(cluster, http):
    with http.stream("POST", CHAT, json=body(max_tokens=3000, stream=True)) as response:
        next(chunks(response.iter_lines()))
    wait_until(lambda: not busy(), 5)  # long before the answer would have ended
    with pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json=body(max_tokens=3000), timeout=1)
    wait_until(lambda: not busy(), 5)

    class Slow:
        """A replica whose answers take longer than anybody waits for them."""

        async def describe(self):
            own = {"methods": frozenset({"rotor"}), "orderings": {"rotor": frozenset({"lexical"})}}
            return {"name": "slow", "toy": True, "context_window": 4096, "method": "rotor", **own}

        async def call(self, _method, *_arguments):
            await asyncio.sleep(4 * LEAVING_SECONDS)
            yield None

    deployment = serve.deployment(Slow).options(name="replicas")
    engine, reranker = RayEngine(serve.run(deployment.bind(), name="slow", route_prefix=None), 4), build_reranker(None)
    vars(reranker).update(sort_keys=engine.sort_keys)  # as in `Ingress`
    with client_of(engine, Settings(timeout=60), reranker) as client:
        for path, sent in (("/tokenize", TALK), (CHAT, TALK), ("/v1/judge", CHOICE), ("/v1/rerank", RANKED)):
            with leaving(client, path, sent):
                wait_until(busy, 60)
            wait_until(lambda: metric(client, "active_requests") == 0 and not busy(), LEAVING_SECONDS)
    serve.delete("slow")


def test_a_replica_that_dies_loses_no_request_and_ends_a_stream_with_an_error(http, alone):
    expected = stable(alone.post(CHAT, json=body(max_tokens=400)).json())
    with ThreadPoolExecutor(3) as pool:
        with http.stream("POST", CHAT, json=body(max_tokens=3000, stream=True)) as response:
            pieces = chunks(response.iter_lines())
            next(pieces)
            replies = [pool.submit(http.post, CHAT, json=body(max_tokens=400)) for _ in range(3)]
            wait_until(lambda: http.get("/ready").json()["active"] == 4, 30)
            (answering,) = busy()
            ray.kill(answering)
            *_, last = pieces
        assert [stable(each.result().json()) for each in replies] == [expected] * 3
    assert last["error"]["code"] == "replica_lost"
    logs = (Path(ray.nodes()[0]["ObjectStoreSocketName"]).parents[1] / "logs").rglob("*")
    logged = b"".join(each.read_bytes() for each in logs if each.is_file())
    assert b'"replica lost"' in logged
    assert not any(secret.encode() in logged for secret in (FLAGS[0], "key-of-ada"))


def test_a_new_configuration_is_rolled_out_without_losing_a_request(cluster, config):
    def deploy(config):
        return serve.run(deployment_of(config, SETTINGS, SCALE), name="other", route_prefix=None)

    with client_of(RayEngine(deploy(config), 4), SETTINGS) as http, ThreadPoolExecutor(5) as pool:
        http.headers.update(ADA)
        updating = pool.submit(deploy, replace(config, ordering="lexical-reversed"))
        replies = []
        while not updating.done():
            bodies = [body(shuffled(SETS + each, 0), max_tokens=50) for each in range(4)]
            replies += pool.map(lambda each: http.post(CHAT, json=each), bodies)
        assert {each.status_code for each in replies} == {200}
        assert {each.json()["invariant"]["ordering"] for each in replies} == {"lexical", "lexical-reversed"}
