"""Keys, tenants, limits, deadlines, turns; what operators see: metrics, traces, logs, the shutdown, docs/examples."""

import json
import logging
import pickle
import re
import shlex
import signal
import sys
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack
from functools import wraps
from math import inf
from pathlib import Path
from socket import create_connection
from threading import Event

import httpx
import pytest
import torch
import yaml
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from typer.main import get_command

from invariant_rag import KeyValueCache, server
from invariant_rag.cli import app as command_line
from invariant_rag.errors import InvalidChoice
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.admission import FairQueue, Shares
from invariant_rag.server.engines.building import build_engine
from invariant_rag.server.middleware import OPEN
from invariant_rag.server.settings import EngineConfig
from invariant_rag.server.telemetry import JsonLines, LogLimit
from tests.server.conftest import CHAT, FLAGS, bearer, body, client_of, exchanged, leaving, metric, served, wait_until

KEY = "key-of-operator"
ADA, IVO = bearer("key-of-ada"), bearer("key-of-ivo")
KEYS = {"key-of-ada": "ada", "key-of-ivo": "ivo"}
TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "x-request-id": "mine-7"}
LONG = body(max_tokens=3000)  # the answers of this model never end by themselves


@pytest.fixture(scope="module")
def limited(tiny_folder, tmp_path_factory):
    """A server with narrow limits, and two tenants whose caches share a folder."""
    narrow = {"max_body_bytes": 20_000, "max_requests": 3, "body_timeout": 1.0, "max_prompt_tokens": 600}
    settings = Settings(keys=KEYS, operator_key=KEY, max_new_tokens=3000, **narrow)
    config = EngineConfig(model=str(tiny_folder), cache_folder=tmp_path_factory.mktemp("cache"))
    with client_of(build_engine(config, settings), settings) as http:
        yield http


def test_without_a_valid_key_nothing_is_answered(limited):
    for headers in ({}, bearer("key-of-ad"), bearer("key-of-ada2"), {"Authorization": "Basic key-of-ada"}):
        for path in (CHAT, "/v1/completions", "/tokenize"):
            response = limited.post(path, json=body(), headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key"), headers
            assert response.headers["www-authenticate"] == "Bearer"
        paths = ("/", "/lab/lab.js", "/health", "/v1/models", "/metrics", "/lab", "/none", "/lab/%2e%2e/v1/models")
        found = [limited.get(path, headers=headers).status_code for path in paths]
        assert found == [200, 200, 200, 401, 401, 401, 401, 404]


def test_a_tenant_learns_nothing_of_what_another_has_asked_nor_a_worker_a_key(limited):
    documents = [f"{text} Twice." for text in FLAGS]

    def cached(headers, order):
        reply = limited.post(CHAT, json=body(documents=documents[::order], max_tokens=4), headers=headers).json()
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(ADA, 1), cached(IVO, 1)] == [0, 0]
    assert cached(ADA, -1) > 40
    sent = Settings(keys=KEYS, operator_key=KEY).without_keys()  # what the process gets
    assert b"key-of" not in pickle.dumps(sent)


def test_what_is_too_long_or_comes_too_slowly_is_refused_and_a_slow_head_ends_the_connection(limited):
    def slowly():
        yield b'{"messages": '
        time.sleep(1.6)
        yield b"[]}"

    judged = {"question": "?", "answers": ["word " * 500, "b"]}
    for path, given, status, code, told in (
        (CHAT, {"json": body(documents=["word " * 5000])}, 413, "too_large", "20000 bytes"),
        (CHAT, {"content": iter([b" " * 9000] * 3)}, 413, "too_large", "20000 bytes"),
        (CHAT, {"json": body(documents=["word " * 500])}, 413, "too_large", "at most 600 tokens"),
        (CHAT, {"json": body(max_tokens=3001)}, 400, "invalid_request", "expected at most 3000"),
        ("/v1/judge", {"json": {**judged, "by": "letters"}}, 413, "too_large", "at most 600 tokens"),
        ("/v1/judge", {"json": {**judged, "by": "texts"}}, 413, "too_large", "at most 600 tokens"),
        (CHAT, {"content": slowly()}, 408, "slow_request", "within 1 s"),
    ):
        response = limited.post(path, headers={**ADA, "content-type": "application/json"}, **given)
        assert (response.status_code, response.json()["error"]["code"], told in response.text) == (status, code, True)
    for head in (b"", b"POST / HTTP/1.1\r\nHost: a\r\nX: b\r\n"):
        assert exchanged(limited, head) == b""


def test_a_request_too_many_is_told_when_to_come_back_and_another_tenant_is_answered(limited):
    key = "key-of-ada"
    with leaving(limited, CHAT, LONG, key), leaving(limited, CHAT, LONG, key, beside=1):
        refused = limited.post(CHAT, json=LONG, headers=ADA)
        assert (refused.status_code, 1 <= int(refused.headers["retry-after"]) <= 60) == (429, True)
        assert metric(limited, "rejected_total", reason="queue") == 1
        assert limited.get("/ready").status_code == 200  # a full queue is no reason to be taken out of service
        assert limited.post(CHAT, json=body(max_tokens=2), headers=IVO).status_code == 200  # a place is kept for others
    wait_until(lambda: metric(limited, "active_requests") == 0)


def test_requests_are_named_and_logged_without_their_contents_unless_these_are_asked_for(limited, embedded, caplog):
    with caplog.at_level(logging.INFO, "invariant_rag.server"):
        good = limited.post(CHAT, json=body(max_tokens=4), headers={**ADA, "x-request-id": "mine-1"})
        bad = limited.post(CHAT, json=body(secret="barley"), headers={**ADA, "x-request-id": "no no"})
        wait_until(lambda: caplog.messages.count("request") >= 2)
    assert (good.headers["x-request-id"], good.json()["id"]) == ("mine-1", "chatcmpl-mine-1")
    assert bad.headers["x-request-id"] not in {"", "no no"}
    lines = [json.loads(JsonLines().format(each)) for each in caplog.records if each.name.startswith("invariant")]
    found = {line["request_id"]: line for line in lines}
    assert (found["mine-1"]["status"], found["mine-1"]["prompt_tokens"] > 0) == (200, True)
    assert found[bad.headers["x-request-id"]]["error"] == "InvalidRequest"
    assert not any(word in json.dumps(lines) for word in ("barley", "Ostra", "key-of-ada", "secret"))
    with client_of(InProcess(embedded), Settings(log_contents=True)) as http, caplog.at_level(logging.INFO):
        http.post(CHAT, json=body())
    assert any("barley" in JsonLines().format(record) for record in caplog.records)


def test_metrics_are_for_the_operator_and_have_the_names_that_vllm_has(limited):
    limited.post(CHAT, json=body(stream=True, max_tokens=60), headers=ADA)
    for key in (ADA, IVO, bearer("key")):
        response = limited.get("/metrics", headers=key)
        assert response.status_code == 401
        assert "INVARIANT_RAG_OPERATOR_KEY" in response.json()["error"]["hint"]
    assert limited.post(CHAT, json=body(), headers=bearer(KEY)).status_code == 401
    seconds = ("time_to_first_token", "inter_token_latency", "request_queue_time", "e2e_request_latency")
    counters = ("prompt_tokens", "generation_tokens", "prompt_tokens_cached", "cache_misses")
    for name in (*(f"{each}_seconds_count" for each in seconds), *(f"{each}_total" for each in counters)):
        assert metric(limited, name) > 0, name


def test_spans_belong_to_the_trace_of_the_client(embedded):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with client_of(InProcess(embedded)) as http:
        http.post(CHAT, json=body(), headers=TRACE)
    spans = [each for each in exporter.get_finished_spans() if "invariant_rag" in each.name]
    assert {each.name for each in spans} == {"invariant_rag.parse", "invariant_rag.answer"}
    assert {f"{each.context.trace_id:032x}" for each in spans} == {TRACE["traceparent"].split("-")[1]}
    assert all(each.attributes and each.attributes["gen_ai.request.id"] == "mine-7" for each in spans)


def test_every_line_is_json_and_what_comes_again_and_again_is_counted():
    limit, clock = LogLimit(), iter([0.0] * 279 + [60.0])
    limit.now = lambda: next(clock)
    records = [logging.makeLogRecord({"msg": "the disk is\nfull"}) for _ in range(280)]
    lines = [JsonLines().format(each) for each in records if limit.filter(each)]
    assert "\n" not in "".join(lines)
    assert (len(lines), json.loads(lines[-1])["left_out"]) == (21, 259)


RANKING = b"POST /v1/rerank HTTP/1.1\r\nHost: a\r\n"
TWO_LENGTHS = b" HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"


def test_what_is_hardly_http_or_has_two_lengths_is_refused_once_and_who_leaves_in_the_middle_does_no_harm(http):
    hidden = TWO_LENGTHS + b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
    for sent, status in (
        (b"\x00" * 100, 400),
        (b"GARBAGE\r\n\r\n", 400),
        (RANKING + b"Content-Length: 9999999999\r\n\r\n{}", 413),
        (RANKING + b"Content-Length: -1\r\n\r\n{}", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100_000, 431),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"GET /v1/models/%00%ff%2e%2e HTTP/1.1\r\nHost: a\r\nX-Request-Id: a\tb\r\nConnection: close\r\n\r\n", 404),
        *((start + hidden, 400) for start in (b"POST /v1/rerank", b"GET /health", b"OPTIONS /v1/models")),
    ):
        head, _, content = exchanged(http, sent).partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode()), sent[:99]
        assert json.loads(content)["error"]["type"] == "invalid_request_error"  # and no second answer behind it
        assert http.get("/health").status_code == 200
    content = json.dumps(body(max_tokens=8)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    for sent in (head[:20], head, head + content[:10], head + content):
        with create_connection((http.base_url.host, http.base_url.port)) as raw:
            raw.sendall(sent)
    assert http.post(CHAT, json=body(max_tokens=8)).status_code == 200


@pytest.mark.parametrize("is_proxy", [False, True])
def test_idle_connections_lock_nobody_out(is_proxy, embedded):
    settings = Settings(max_connections=8, trusted_proxies=frozenset({"127.0.0.1"} if is_proxy else ()))
    with client_of(InProcess(embedded), settings) as http, ExitStack() as stack:
        address = http.base_url.host, http.base_url.port
        idle = [stack.enter_context(create_connection(address)) for _ in range(40)]
        for _ in range(3):
            assert httpx.get(http.base_url.join("/health"), timeout=10).status_code == 200
        idle[0].settimeout(1 if is_proxy else 10)
        if is_proxy:  # whose connections are those of many
            with pytest.raises(TimeoutError):
                idle[0].recv(1)
        else:
            assert idle[0].recv(1) == b""  # the oldest one is closed


@pytest.mark.slow
def test_the_command_finishes_what_runs_before_it_ends(tmp_path):
    command = [sys.executable, "-c", "from invariant_rag.cli import app; app()", "serve"]
    asked = body(stream=True, temperature=2.0, seed=1, max_tokens=150)
    with served(command, tmp_path / "log") as (url, process), ThreadPoolExecutor(1) as pool:
        reading = pool.submit(httpx.post, f"{url}{CHAT}", json=asked, timeout=30)
        wait_until(lambda: reading.done() or "active_requests 1.0" in httpx.get(f"{url}/metrics").text)
        process.send_signal(signal.SIGTERM)
        assert "data: [DONE]" in reading.result().text
        assert process.wait(30) in {0, -signal.SIGTERM}  # uvicorn passes the signal on when it has ended
    lines = (tmp_path / "log").read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines if line.startswith("{"))


TIMES_AS_LATE, ASKED, FLOOD_TOKENS = 3, 5, 100
HALT_SECONDS = 30.0  # that a request may take to the model while nothing else computes


class Watched(MicroBatcher):
    """A batcher that counts the forward passes until each answer to the modest tenant has a token."""

    def __init__(self, modest):
        super().__init__()
        self._modest, self.passes, self.late, self.here = modest, 0, [], Event()
        self.here.set()

    def stream(self, lm, prompt, options=None, **more):
        if lm.cache is not self._modest:
            return super().stream(lm, prompt, options, **more)
        begun = [self.passes]  # until the first token came

        def note_first_token(input_ids, scores, **_):  # in the thread that holds the model
            if begun:
                self.late.append(self.passes - begun.pop())
            return torch.zeros(len(input_ids), dtype=torch.bool)

        found = super().stream(lm, prompt, {**options, "stopping_criteria": [note_first_token]}, **more)
        self.here.set()
        return found


@pytest.mark.parametrize("more", [{}, {"temperature": 1.5, "seed": 1}], ids=["greedy", "sampled"])
def test_a_flood_of_one_tenant_does_not_keep_another_from_its_first_token(more, model, monkeypatch):
    """The model's answers never end by themselves. Lateness is counted in forward passes, of whomever they are.

    Passes halt from when the modest tenant sends a request until it is here. So the counts are those of any machine,
    however busy; and a request that waits for a pass of others before it gets here is never here: that is infinity.
    """
    tenants = {tenant: KeyValueCache(namespace=tenant) for tenant in ("greedy", "modest")}
    engine = InProcess(model, caches=tenants)
    settings = Settings(keys={each: each for each in tenants}, operator_key=KEY)
    watched = engine.batcher = Watched(tenants["modest"])
    stop, forward = Event(), type(model.model).forward

    @wraps(forward)
    def counted(module, *given, **options):
        if not watched.here.wait(HALT_SECONDS):
            watched.late.append(inf)
            watched.here.set()
        watched.passes += 1
        return forward(module, *given, **options)

    monkeypatch.setattr(type(model.model), "forward", counted)  # with a hook, nothing would be cached

    def lateness(http, passes):
        """Ask again and again, each time after so many passes: who asks at once shares the model half and half."""
        watched.late.clear()
        for number in range(1, ASKED + 1):
            begun = watched.passes
            wait_until(lambda: watched.passes >= begun + passes, 60)  # noqa: B023
            watched.here.clear()
            sent = body(stream=True, max_tokens=40, **more)
            assert http.post(CHAT, json=sent, headers=bearer("modest")).status_code == 200
            assert (len(watched.late), inf in watched.late) == (number, False)
        return list(watched.late)

    def flood(http):
        while not stop.is_set():
            if http.post(CHAT, json=body(max_tokens=FLOOD_TOKENS, **more), headers=bearer("greedy")).status_code == 429:
                stop.wait(1)

    with client_of(engine, settings) as http, ThreadPoolExecutor(80) as pool:
        _, *alone = lateness(http, 0)  # the first one reads the documents
        flooding = pool.map(flood, [http] * 80)
        try:
            wait_until(lambda: metric(http, "active_requests") > 2 * engine.together, 60)
            late = lateness(http, 2 * FLOOD_TOKENS)  # by then, the batch that the last one has interrupted is done
        finally:
            stop.set()
        assert not any(flooding)
    assert max(late) < TIMES_AS_LATE * min(alone), (late, alone)


def test_a_part_of_the_places_is_kept_for_tenants_who_are_not_there():
    shares = Shares(12, 2)
    for tenant, places in (("greedy", 9), ("modest", 3)):
        assert all(shares.take(tenant) for _ in range(places))
        assert not shares.take(tenant)
    for tenant in ("greedy", "modest"):
        shares.taken["greedy"] -= 1
        assert shares.take(tenant)


def test_turns_go_round_short_requests_overtake_long_ones_and_who_leaves_keeps_none():
    queue, done, left = FairQueue(1, 2), [], Event()
    greedy = [("greedy", 60.0, "long"), ("greedy", 1.0, "short"), ("greedy", 61.0, "longer")]

    def wait(tenant, seconds, name):
        with queue.turn(tenant, seconds, Event()):
            done.append(name)

    with ThreadPoolExecutor(4) as pool, queue.turn("greedy", 0.0, Event()):
        for number, each in enumerate([*greedy, ("modest", 90.0, "other")], 1):
            pool.submit(wait, *each)
            wait_until(lambda: queue.waiting == number)  # noqa: B023
        left.set()
        with pytest.raises(CancelledError), queue.turn("modest", 0.0, left):
            pass
    assert done == ["other", "short", "long", "longer"]
    with queue.turn("", 0.0, Event()):
        assert queue.waiting == 0


def test_the_next_turn_is_of_the_tenant_who_has_the_fewest_also_where_another_waits_since_an_earlier_turn():
    queue, done = FairQueue(4, 2), []

    def wait(tenant):
        with queue.turn(tenant, 0.0, Event()):
            done.append(tenant)

    with ThreadPoolExecutor(2) as pool, ExitStack() as running:
        for tenant in ("greedy", "greedy", "modest"):
            running.enter_context(queue.turn(tenant, 0.0, Event()))
        with queue.turn("modest", 0.0, Event()):
            for number, tenant in enumerate(("greedy", "modest"), 1):
                pool.submit(wait, tenant)
                wait_until(lambda: queue.waiting == number)  # noqa: B023
        wait_until(lambda: len(done) == 2)
    assert done == ["modest", "greedy"]


# --- docs/examples: what they start is what the command line and Ray Serve accept ---

EXAMPLES = {each.name: each.read_text("utf-8") for each in (Path(__file__).parents[2] / "docs/examples").iterdir()}


def objects(name):
    """Return the objects in a file, by their kind: there is one of each, so all are checked. Images have versions."""
    listed = list(yaml.safe_load_all(EXAMPLES[name]))
    found = {each.get("kind"): each for each in listed}
    assert len(found) == len(listed)
    images = re.findall(r"image: (\S+)", EXAMPLES[name])
    assert images
    assert all(re.fullmatch(r"[a-z/-]+:\d[\w.-]+", image) for image in images), images
    return found


def options_of(script):
    """Return the options that a script gives to `invariant-rag serve`, by the parser of the command line."""
    (arguments,) = re.findall(r"exec invariant-rag serve (.*)$", script)
    return get_command(command_line).commands["serve"].make_context("serve", shlex.split(arguments)).params


def test_compose_starts_a_server_at_the_port_that_it_publishes():
    assert sorted(EXAMPLES) == ["compose.yaml", "kubernetes.yaml", "rayservice.yaml"], "these are checked here"
    compose = objects("compose.yaml")[None]["services"]["invariant-rag"]
    options = options_of(compose["command"][0].replace("$$", "$"))
    assert options["host"] == "0.0.0.0"
    assert compose["ports"] == [f"127.0.0.1:{options['port']}:{options['port']}"]
    assert f"127.0.0.1:{options['port']}/ready" in compose["healthcheck"]["test"][-1]
    assert float(compose["stop_grace_period"].removesuffix("s")) > options["timeout"]
    assert {"MODEL", "INVARIANT_RAG_API_KEY"} == compose["environment"].keys()


def test_the_pod_starts_a_server_that_its_probes_reach_and_its_service_selects():
    found = objects("kubernetes.yaml")
    deployment, service = found["Deployment"]["spec"], found["Service"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    options = options_of(container["args"][0])
    (port,) = container["ports"]
    assert (options["host"], options["port"]) == ("0.0.0.0", port["containerPort"])
    assert pod["terminationGracePeriodSeconds"] > options["timeout"]
    probes = [container[f"{each}Probe"]["httpGet"] for each in ("startup", "readiness", "liveness")]
    assert {each["path"] for each in probes} <= OPEN
    assert {each["port"] for each in probes} == {port["name"]} == {each["targetPort"] for each in service["ports"]}
    mounts = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "keys"]
    assert mounts == [str(options["keys"].parent)]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels
    claimed = [each["persistentVolumeClaim"] for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert claimed == [{"claimName": found["PersistentVolumeClaim"]["metadata"]["name"]}]


def test_ray_serve_accepts_the_configuration_and_the_cluster_has_room_and_the_same_keys(tmp_path, monkeypatch):
    from ray.serve import schema

    spec, keys = objects("rayservice.yaml")["RayService"]["spec"], tmp_path / "keys"
    (application,) = schema.ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"])).applications
    assert application.import_path == "invariant_rag.server:app"
    given = application.args
    keys.write_text("ada key-of-ada\n", encoding="utf-8")
    monkeypatch.delenv("INVARIANT_RAG_API_KEY", raising=False)
    assert type(server.app({**given, "keys": str(keys)})).__name__ == "Application"
    for wrong in ({"replica_gpu": 1}, {"together": "many"}, {"ingresses": 0}, {"replica_gpus": None}):
        with pytest.raises(InvalidChoice):
            server.app({**given, "keys": str(keys), **wrong})
    cluster = spec["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    mount = {"name": "keys", "mountPath": str(Path(given["keys"]).parent), "readOnly": True}
    for pod in (each["template"]["spec"] for each in (cluster["headGroupSpec"], workers)):
        (container,) = pod["containers"]
        assert container["image"].startswith(f"rayproject/ray:{cluster['rayVersion']}-")
        assert mount in container["volumeMounts"]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    assert workers["maxReplicas"] * limits["nvidia.com/gpu"] >= given["max_replicas"] * given["replica_gpus"]
    assert int(requests["cpu"]) >= given["replica_cpus"] + 1  # a replica, and perhaps an ingress
    assert pod["terminationGracePeriodSeconds"] > given["timeout"]
