"""Replicas on Ray Serve: the answers of one process, from whichever replica has read the documents."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # the second: on loopback
pytest.importorskip("ray.serve")

import ray
from ray import serve
from ray.util import list_named_actors

from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.server import Settings
from invariant_rag.server.engines.building import build_engine, build_reranker
from invariant_rag.server.engines.ray import RayEngine
from invariant_rag.server.ray_app import deployment_of
from invariant_rag.server.settings import EngineConfig, Scale
from tests.server.conftest import CHAT, FLAGS, QUESTION, bearer, serving, wait_until

REPLICAS = 3
SETTINGS = Settings(timeout=60, max_prompt_tokens=1200, keys={"key-of-ada": "ada", "key-of-ivo": "ivo"})
SCALE = Scale(REPLICAS, replica_cpus=0.5)
RERANKER = str(EMBEDDED["monot5"])
POWER_OF_TWO = "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"
SETS, ASKED = 12, 3


@pytest.fixture(scope="module")
def config(tiny_folder: Path) -> EngineConfig:
    """A model whose answers never end by themselves."""
    return EngineConfig(str(tiny_folder), "small", cache_gb=0.1, together=4)


@pytest.fixture(scope="module")
def cluster() -> Iterator[int]:
    """A Ray cluster on this machine, and the port of Ray Serve in it."""
    port = free_port()
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("".join(f"{tenant} {key}\n" for key, tenant in SETTINGS.keys.items()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def server(
    cluster: int, config: EngineConfig, keys: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """`invariant-rag serve --ray` with three replicas in the cluster."""
    port, log = free_port(), tmp_path_factory.mktemp("log") / "stderr"
    options = ["--ray", "--replicas", str(REPLICAS), "--port", str(port), "--keys", str(keys), "--reranker", RERANKER]
    options += ["--served-name", "small", "--together", str(config.together), "--cache-gb", str(config.cache_gb)]
    options += ["--max-prompt-tokens", str(SETTINGS.max_prompt_tokens), "--timeout", str(SETTINGS.timeout)]
    command = [sys.executable, "-c", "from invariant_rag.cli import app; app()", "serve", str(config.model), *options]
    url = f"http://127.0.0.1:{port}"
    with (
        running(command, log) as process,
        httpx.Client(base_url=url, timeout=90, headers=bearer("key-of-ada")) as client,
    ):
        wait_until(lambda: is_up(client, process), 90)
        yield Server(process, client, log)


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in the cluster; it is stopped however the block ends, and killed if that takes half a minute."""
    with log.open("w") as stderr, subprocess.Popen(command, env=environment(), stderr=stderr) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    client: httpx.Client
    log: Path


@pytest.fixture
def http(server: Server) -> httpx.Client:
    return server.client


@pytest.fixture(scope="module")
def alone(config: EngineConfig) -> Iterator[httpx.Client]:
    """The same server with the engine in its process."""
    with client_of(build_engine(config, SETTINGS), build_reranker(RERANKER)) as client:
        yield client


@contextmanager
def client_of(engine: Any, reranker: Any = None) -> Iterator[httpx.Client]:
    with (
        serving(engine, SETTINGS, reranker) as url,
        httpx.Client(base_url=url, timeout=90, headers=bearer("key-of-ada")) as client,
    ):
        yield client


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def environment() -> dict[str, str]:
    """Return the variables of a process that finds the cluster."""
    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def is_up(client: httpx.Client, process: subprocess.Popen[Any]) -> bool:
    assert process.poll() is None, "it ended"
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


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
    """Return the share of requests whose set was read before, each set asked several times in random orders."""
    seeds, hits = count(), 0
    for _ in range(ASKED):
        for number in range(SETS):
            reply = http.post(CHAT, json=body(shuffled(number, next(seeds)), max_tokens=1)).json()
            hits += reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    return hits / (SETS * ASKED)


def replicas() -> dict[str, Any]:
    """Return the actors of all replicas that are alive."""
    names = [
        each["name"] for each in list_named_actors(all_namespaces=True) if each["name"].startswith("SERVE_REPLICA")
    ]
    return {name: ray.get_actor(name, namespace="serve") for name in names}


def busy() -> list[Any]:
    """Return the replicas that are answering."""
    return [actor for actor in replicas().values() if ray.get(actor.get_num_ongoing_requests.remote())]


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


def test_equal_sets_in_any_order_meet_the_replica_that_has_read_them(http: httpx.Client, alone: httpx.Client) -> None:
    assert hit_rate(http) == (ASKED - 1) / ASKED
    for number in range(SETS):
        answers = [without_ids(each.post(CHAT, json=body(shuffled(number, 0))).json()) for each in (http, alone)]
        assert answers[0] == answers[1]


def test_a_tenant_learns_nothing_of_what_another_has_asked(http: httpx.Client) -> None:
    documents = [f"{text} Twice." for text in FLAGS]

    def cached(key: str) -> int:
        reply = http.post(CHAT, json=body(documents), headers=bearer(key)).json()
        tokens: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert cached("key-of-ada") == 0
    assert cached("key-of-ivo") == 0
    assert cached("key-of-ada") > 0
    assert http.post(CHAT, json=body(), headers=bearer("wrong")).status_code == 401


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_replica(stream: bool, http: httpx.Client) -> None:
    def leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            http.post(CHAT, json=body(max_tokens=3000), timeout=1)

    if stream:
        with http.stream("POST", CHAT, json=body(max_tokens=3000, stream=True)) as response:
            next(chunks(response.iter_lines()))
    else:
        leave()
    wait_until(lambda: not busy(), 5)  # long before the answer would have ended


def test_a_replica_that_dies_loses_no_request_and_ends_a_stream_with_an_error(
    server: Server, alone: httpx.Client
) -> None:
    http = server.client
    expected = without_ids(alone.post(CHAT, json=body(max_tokens=400)).json())
    with ThreadPoolExecutor(3) as pool:
        with http.stream("POST", CHAT, json=body(max_tokens=3000, stream=True)) as response:
            pieces = chunks(response.iter_lines())
            next(pieces)
            replies = [pool.submit(http.post, CHAT, json=body(max_tokens=400)) for _ in range(3)]
            wait_until(lambda: http.get("/ready").json()["active"] == 4, 30)
            (answering,) = busy()
            ray.kill(answering)
            *_, last = pieces
        assert [without_ids(each.result().json()) for each in replies] == [expected] * 3
    assert last["error"]["code"] == "replica_lost"
    assert server.log.read_text(encoding="utf-8").count('"replica lost"') >= 1


def test_a_new_configuration_is_rolled_out_without_losing_a_request(http: httpx.Client, config: EngineConfig) -> None:
    (name,) = serve.status().applications
    application = deployment_of(replace(config, ordering="lexical-reversed"), SETTINGS, SCALE, router=POWER_OF_TWO)
    with ThreadPoolExecutor(5) as pool:
        updating = pool.submit(serve.run, application, name=name, route_prefix=None)
        replies = []
        while not updating.done():
            asked = [
                pool.submit(http.post, CHAT, json=body(shuffled(SETS + each, 0), max_tokens=50)) for each in range(4)
            ]
            replies += [each.result() for each in asked]
        assert {each.status_code for each in replies} == {200}
        assert {each.json()["invariant"]["ordering"] for each in replies} == {"lexical", "lexical-reversed"}
        engine = RayEngine(updating.result(), 4)
    with client_of(engine) as by_load:
        assert hit_rate(by_load) < 0.6  # each set meets a replica by chance: 0.3 is expected, and 0.67 by set


def test_serve_run_serves_the_application(
    cluster: int, config: EngineConfig, keys: Path, alone: httpx.Client, tmp_path: Path
) -> None:
    arguments = [f"model={config.model}", "name=small", "cache_gb=0.1", "replica_cpus=0.5", "replica_gpus=0"]
    arguments += [f"max_prompt_tokens={SETTINGS.max_prompt_tokens}", f"reranker={RERANKER}", f"keys={keys}"]
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "invariant_rag.server:app", *arguments]
    url = f"http://127.0.0.1:{cluster}"
    with (
        running([*command, "--name", "run"], tmp_path / "stderr") as process,
        httpx.Client(base_url=url, timeout=60, headers=bearer("key-of-ada")) as client,
    ):
        wait_until(lambda: is_up(client, process), 90)
        for request_body in (body(), body(["word " * 600]), body(unknown=1)):
            replies = [each.post(CHAT, json=request_body) for each in (client, alone)]
            assert replies[0].status_code == replies[1].status_code
            assert without_ids(replies[0].json()) == without_ids(replies[1].json())
        named = client.post(CHAT, json=body(), headers={"x-request-id": "mine"})
        assert set(named.headers.get_list("x-request-id", split_commas=True)) == {"mine"}
        assert client.post(CHAT, json=body(), headers=bearer("wrong")).status_code == 401
        with client.stream("POST", CHAT, json=body(max_tokens=3000, stream=True)) as response:
            next(chunks(response.iter_lines()))
        wait_until(lambda: not busy(), 10)


def test_a_server_that_is_stopped_finishes_what_runs(server: Server, alone: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.client.post, CHAT, json=body(max_tokens=600))
        wait_until(lambda: server.client.get("/ready").json()["active"], 30)
        server.process.terminate()
        assert asked.result().status_code == 200
    server.process.wait(30)
    assert not busy()
    logged = server.log.read_text(encoding="utf-8")
    assert "Traceback" not in logged
    assert FLAGS[0] not in logged


def test_a_cluster_of_ones_own_listens_on_loopback_alone() -> None:
    program = (
        "from invariant_rag.cli.serve import scale_of\n"
        "scale = scale_of({'replicas': 5, 'max_replicas': None, 'replica_gpus': None})\n"
        "from invariant_rag.server.ray_app import connect; connect(scale)\n"
        "import ray; print(ray.util.get_node_ip_address(), ray.cluster_resources()['CPU'])"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True, check=True)
    address, cpus = done.stdout.split()
    assert address == "127.0.0.1"
    assert float(cpus) >= 6
