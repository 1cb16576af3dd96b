"""Entries in a real Redis: bound to their keys, intact or not served, and a dead server costs no answer."""

from __future__ import annotations

import copy
import itertools
import logging
import multiprocessing
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import redis
import torch
from transformers import PreTrainedModel

from invariant_rag import InvariantModel
from invariant_rag.errors import ExtraRequired, InvalidChoice, UnusableStore
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.generation.kv_cache_files import stem_of, to_bytes
from invariant_rag.testing import random_prompt, tiny_model
from tests.generation.test_kv_cache_files import entry

pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")


class Server:
    """A Redis server on a port of its own; `stop` and `start` restart it."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        port = () if "--tls-port" in options else ("--port", str(self.port))
        self._options = [*port, *(str(self.port) if each == "PORT" else each for each in options)]
        self._folder = folder
        self.url = f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        fixed = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        self._process = subprocess.Popen(["redis-server", *fixed, *self._options], stdout=subprocess.DEVNULL)
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.01)
            else:
                return
        raise RuntimeError("redis-server did not start")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def client(self) -> Any:
        return redis.Redis(port=self.port)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    running.client.flushall()
    return running


def opened(server: Server, namespace: str = "") -> KeyValueCache:
    """A cache without memory: what it finds comes from Redis."""
    return KeyValueCache(0, redis_url=server.url, namespace=namespace)


def name_of(server: Server) -> bytes:
    """The one key that the server has."""
    (name,) = server.client.keys()
    return bytes(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_entry_is_what_was_stored(dtype: torch.dtype, server: Server) -> None:
    stored = [(torch.randn(2, 5, 3).to(dtype), torch.randn(2, 5, 4).to(dtype)) for _ in range(11)]
    assert not opened(server).is_stored("x")
    opened(server).put("x", stored)
    cache = opened(server)
    assert cache.is_stored("x")
    found = cache.get("x")
    assert found is not None
    for pair, expected in zip(found, stored, strict=True):
        assert all(map(torch.equal, pair, expected))
    assert (cache.stats().hits, cache.stats().disk_hits, cache.stats().disk_errors) == (1, 1, 0)


def test_an_entry_of_several_pieces_is_joined(server: Server) -> None:
    stored = [(torch.randn(1, 2**20, 10), torch.randn(1, 2**20, 10))]  # 80 MiB
    opened(server).put("x", stored)
    assert server.client.hlen(name_of(server)) == 2
    found = opened(server).get("x")
    assert found is not None
    assert all(map(torch.equal, found[0], stored[0]))
    server.client.hdel(name_of(server), "1")
    cache = opened(server)
    assert cache.get("x") is None
    assert cache.stats().damaged == 1


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "another's", "fields"])
def test_a_damaged_entry_is_a_miss_and_is_removed(damage: str, server: Server) -> None:
    opened(server).put("x", entry(10))
    name = name_of(server)
    content = server.client.hget(name, "0")
    damaged: dict[str, dict[str, bytes]] = {
        "cut": {"0": content[:-5]},
        "flip": {"0": content[:-1] + bytes([content[-1] ^ 1])},
        "empty": {"0": b""},
        "another's": {"0": to_bytes(entry(10), stem_of("y"))},
        "fields": {"0": content, "more": b"bytes"},
    }
    server.client.hset(name, mapping=damaged[damage])
    cache = opened(server)
    assert cache.get("x") is None
    assert (cache.stats().damaged, cache.stats().misses) == (1, 1)
    assert server.client.keys() == []


def test_what_is_no_hash_is_an_error_of_the_store(server: Server) -> None:
    cache = opened(server)
    cache.put("x", entry(10))
    name = name_of(server)
    server.client.set(name, b"somebody else's")
    assert cache.get("x") is None
    assert cache.stats().disk_errors == 1
    assert server.client.get(name) == b"somebody else's"


def test_entries_of_one_namespace_are_not_served_to_another_and_clearing_touches_nothing_else(server: Server) -> None:
    names = ["", "a", "b", "('x', 'a')", "*", "\ud800"]
    server.client.set("theirs", "kept")
    for name in names:
        assert opened(server, name).get("x") is None
        opened(server, name).put("x", entry(10))
    opened(server, "*").clear()
    assert [opened(server, each).get("x") is not None for each in names] == [each != "*" for each in names]
    assert server.client.get("theirs") == b"kept"


def _write_for_ever(url: str, start: int) -> None:
    cache = KeyValueCache(0, redis_url=url)
    for number in itertools.cycle([*range(start, 40), *range(start)]):
        cache.put(str(number), [(torch.full((2, 4000, 8), float(number)), torch.zeros(2, 4000, 8))])


def test_writers_that_are_killed_leave_intact_entries_and_what_expires(server: Server) -> None:
    draw, processes = random.Random(0), multiprocessing.get_context("fork")
    for _ in range(10):
        writers = [processes.Process(target=_write_for_ever, args=(server.url, start)) for start in (0, 7)]
        for writer in writers:
            writer.start()
        time.sleep(draw.uniform(0.02, 0.08))
        for writer in writers:
            writer.kill()
            writer.join()
    cache = opened(server)
    found = {number: cache.get(str(number)) for number in range(40)}
    assert any(found.values())
    for number, served in found.items():
        assert served is None or torch.equal(served[0][0], torch.full((2, 4000, 8), float(number)))
    assert (cache.stats().damaged, cache.stats().disk_errors) == (0, 0)
    for name in server.client.scan_iter():
        unfinished, seconds = bytes(name).startswith(b"invariant-rag:unfinished"), server.client.ttl(name)
        assert 0 < seconds <= 600 if unfinished else seconds == -1


def test_a_server_that_goes_costs_no_answer_and_is_used_again_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Server(tmp_path) as server:
        cache = opened(server)
        cache.put("x", entry(10))
        server.stop()
        assert cache.get("x") is None
        cache.put("x", entry(10))
        assert not cache.is_stored("x")
        assert cache.stats().disk_errors == 2
        with pytest.raises(UnusableStore, match="cannot clear redis://127"):
            cache.clear()
        server.start()
        assert cache.get("x") is None
        cache.put("x", entry(10))
        assert opened(server).get("x") is not None
        assert cache.stats().disk_errors == 2
    assert "cannot read" in caplog.text


def test_a_model_answers_without_its_server_and_warm_as_cold(tmp_path: Path) -> None:
    plain = InvariantModel(tiny_model("llama", eos_token_id=None), ordering="lexical")
    prompt = random_prompt(random.Random(0), (3, 5, 1, 4), prefix=4, suffix=3)
    with Server(tmp_path) as server:
        cold = plain.with_cache(opened(server)).logits(prompt)
        other: PreTrainedModel = tiny_model("llama", eos_token_id=None)
        warm = InvariantModel(other, ordering="lexical", cache=opened(server))
        assert torch.equal(warm.logits(prompt.shuffled(random.Random(2))), cold)
        assert warm.cache is not None
        assert warm.cache.stats().disk_hits == 1
    assert torch.equal(warm.logits(prompt), cold)
    assert warm.cache.stats().disk_errors == 2


def test_a_server_that_does_not_answer_delays_one_call_and_not_each() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        cache = KeyValueCache(redis_url=f"redis://127.0.0.1:{deaf.getsockname()[1]}?socket_timeout=0.5")
        began = time.monotonic()
        for _ in range(20):
            cache.put("x", entry(10))
            assert not cache.is_stored("y")
            assert cache.get("y") is None
        assert time.monotonic() - began < 5
    assert cache.stats().disk_errors == 40
    assert cache.get("x") is not None


def test_a_password_opens_and_is_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Server(tmp_path, "--requirepass", "open-sesame") as server:
        right = f"redis://:open-sesame@127.0.0.1:{server.port}/1"
        KeyValueCache(redis_url=right).put("x", entry(10))
        assert KeyValueCache(redis_url=right).get("x") is not None
        for wrong in (server.url, right.replace("sesame", "barley")):
            cache = KeyValueCache(0, redis_url=wrong)
            assert cache.get("x") is None
            assert cache.stats().disk_errors == 1
            with pytest.raises(UnusableStore) as refused:
                cache.clear()
            assert "barley" not in str(refused.value) + caplog.text
    assert f"redis://127.0.0.1:{server.port}/1" in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_connections_are_encrypted_by_the_url(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*request.split(), *names], check=True, capture_output=True)
    options = f"--port 0 --tls-port PORT --tls-auth-clients no --tls-cert-file {certificate} --tls-key-file {key}"
    with Server(tmp_path, *options.split()) as server:
        url = f"rediss://127.0.0.1:{server.port}"
        trusting = KeyValueCache(0, redis_url=f"{url}?ssl_ca_certs={certificate}")
        trusting.put("x", entry(10))
        assert trusting.get("x") is not None
        distrusting = KeyValueCache(0, redis_url=url)
        assert distrusting.get("x") is None
        assert distrusting.stats().disk_errors == 1


def test_a_full_server_evicts_whole_entries_or_refuses(tmp_path: Path) -> None:
    big = [(torch.zeros(1, 2**18, 1), torch.zeros(1, 2**18, 1))]  # 2 MiB
    for policy in ("allkeys-lru", "noeviction"):
        with Server(tmp_path, "--maxmemory", "16mb", "--maxmemory-policy", policy) as server:
            cache = opened(server)
            for number in range(20):
                cache.put(str(number), big)
            found = [cache.get(str(number)) is not None for number in range(20)]
            assert 2 <= sum(found) < 10
            assert found[19] == (policy == "allkeys-lru")
            assert cache.stats().damaged == 0
            assert (cache.stats().disk_errors > 0) == (policy == "noeviction")


@pytest.mark.parametrize("url", ["", "cache:6379", "http://cache", "redis://cache:port", "redis://cache?fast=yes"])
def test_an_address_that_is_none_of_redis_is_refused(url: str) -> None:
    with pytest.raises(InvalidChoice, match="redis_url"):
        KeyValueCache(redis_url=url)


def test_odd_arguments_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidChoice, match="expected a str"):
        KeyValueCache(redis_url=6379)  # type: ignore[arg-type]
    with pytest.raises(InvalidChoice, match="got both"):
        KeyValueCache(folder=tmp_path, redis_url="redis://cache")
    with pytest.raises(InvalidChoice) as refused:
        KeyValueCache(redis_url="redis://:open-sesame@cache:port")
    assert "sesame" not in str(refused.value)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ExtraRequired, match=r"invariant-rag\[redis\]"):
        KeyValueCache(redis_url="redis://cache")


def test_a_copy_starts_empty_with_the_same_server(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    cache = KeyValueCache(redis_url=server.url, namespace="a")
    cache.put("x", entry(10))
    copied = copy.deepcopy(cache)
    assert copied.stats().entries == 0
    assert copied.get("x") is not None
    assert caplog.text == ""
