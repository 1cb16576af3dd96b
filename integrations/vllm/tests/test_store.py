"""Where keys and values lie: the options of the connector, and a prefill worker whose store fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import InvalidChoice

from tests.documents import documents
from tests.servers import RedisServer
from vllm_invariant_rag import EntryUnusable, Prefilled, PrefillWorker, UnsupportedServer
from vllm_invariant_rag.store import open_cache, place_of


def prefill(worker: PrefillWorker, lm: InvariantModel, seed: int) -> Prefilled:
    return worker.prefill(lm, lm.prepare_to_generate(lm.chat_prompt("What is told?", documents(3, seed)), 4))


def test_a_password_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", "open-sesame")
    options = {"redis_url": "rediss://user:${REDIS_PASSWORD}@cache:6379/1"}
    assert place_of(options) == (None, "rediss://user:open-sesame@cache:6379/1")
    assert place_of({"folder": "/entries/$name"}) == ("/entries/$name", None)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, UnsupportedServer),
        ({"redis_url": None}, UnsupportedServer),
        ({"redis_url": "redis://$"}, UnsupportedServer),
        ({"redis_url": "cache:6379"}, InvalidChoice),
        ({"folder": "/tmp/entries", "memory_bytes": "much"}, UnsupportedServer),
        ({"folder": "/tmp/entries", "memory_bytes": -1}, UnsupportedServer),
    ],
)
def test_options_that_make_no_sense_stop_vllm_at_its_start(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"redis_url|memory_bytes"):
        open_cache(options)


def test_a_worker_needs_one_place(lm: InvariantModel, tmp_path: Path) -> None:
    with pytest.raises(InvalidChoice, match="got neither"):
        PrefillWorker(lm)
    with pytest.raises(InvalidChoice, match="got both"):
        PrefillWorker(lm, tmp_path, redis_url="redis://127.0.0.1")
    worker = PrefillWorker(lm, tmp_path)
    for tenant in ("\ud800", 3):
        with pytest.raises(InvalidChoice, match="tenant"):
            worker.with_tenant(tenant)  # type: ignore[arg-type]


def test_a_folder_without_room_for_an_entry_is_named(lm: InvariantModel, tmp_path: Path) -> None:
    with pytest.raises(InvalidChoice, match="max_disk_bytes"):
        PrefillWorker(lm, tmp_path, max_disk_bytes=0)
    with pytest.raises(EntryUnusable, match=r"write \d{5,} bytes") as refused:
        prefill(PrefillWorker(lm, tmp_path, max_disk_bytes=1000), lm, 1)
    assert "max_disk_bytes" in refused.value.hint


def test_workers_share_what_is_in_redis_and_say_when_it_takes_nothing(lm: InvariantModel, redis: RedisServer) -> None:
    one, two = (PrefillWorker(lm, redis_url=redis.url) for _ in range(2))
    assert prefill(one, lm, 1).cached_tokens == 0 < prefill(two, lm, 1).cached_tokens
    redis.stop()
    for seed in (1, 2):
        with pytest.raises(EntryUnusable, match="Redis took none"):
            prefill(one, lm, seed)
    assert one.cache.stats().disk_errors >= 2
    redis.start()
    assert [prefill(one, lm, seed).cached_tokens > 0 for seed in (1, 2)] == [True, True], "they are in its memory"
    assert prefill(two, lm, 2).cached_tokens > 0
