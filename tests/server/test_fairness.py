"""Two tenants of one server, and requests of different lengths: who gets a place, and whose turn it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import wraps
from statistics import median
from threading import Event
from typing import Any

import httpx
import pytest

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.generation.streaming import TextStream
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.admission import FairQueue, Shares
from invariant_rag.server.engines.base import Call, Emit, EngineReply
from tests.server.conftest import CHAT, bearer, body, client_of, metric, wait_until

TENANTS = ("greedy", "modest")
GREEDY, MODEST = map(bearer, TENANTS)
KEYS: Any = {"keys": {tenant: tenant for tenant in TENANTS}, "operator_key": "key-of-operator"}
TIMES_AS_LATE, ASKED = 3, 5


class Watched(MicroBatcher):
    """A batcher that counts forward passes. They halt while a request of the modest tenant is on its way to it."""

    def __init__(self, modest: KeyValueCache) -> None:
        super().__init__()
        self._modest, self.passes, self.begun, self.arrived = modest, 0, 0, Event()
        self.arrived.set()

    def count(self) -> None:
        self.arrived.wait(10)
        self.passes += 1

    def stream(self, lm: InvariantModel, *given: Any, **options: Any) -> TextStream:
        found = super().stream(lm, *given, **options)
        if lm.cache is self._modest:
            self.begun = self.passes
            self.arrived.set()
        return found


class Watching(InProcess):
    """An engine that counts the passes until the first text of each answer to the modest tenant."""

    def __init__(self, lm: InvariantModel) -> None:
        super().__init__(lm, caches={tenant: KeyValueCache(namespace=tenant) for tenant in TENANTS})
        self.watched = self.batcher = Watched(self.caches["modest"])
        self.late: list[int] = []

    def answer_all(self, calls: Sequence[Call], emit: Emit, abandoned: Event) -> list[EngineReply]:
        told = calls[0].choices.tenant != "modest"

        def emit_counted(index: int, delta: AnswerDelta) -> None:
            nonlocal told
            if not told:
                self.late.append(self.watched.passes - self.watched.begun)
            told = True
            emit(index, delta)

        return super().answer_all(calls, emit_counted, abandoned)


@pytest.mark.parametrize("more", [{}, {"temperature": 1.5, "seed": 1}], ids=["greedy", "sampled"])
def test_a_flood_of_one_tenant_does_not_keep_another_from_its_first_token(
    more: dict[str, Any], model: InvariantModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's answers never end by themselves. Lateness is counted in forward passes, of whomever they are."""
    engine, stop, forward = Watching(model), Event(), type(model.model).forward

    @wraps(forward)
    def counted(module: Any, *given: Any, **options: Any) -> Any:
        engine.watched.count()
        return forward(module, *given, **options)

    monkeypatch.setattr(type(model.model), "forward", counted)  # with a hook, nothing would be cached

    def lateness(http: httpx.Client) -> float:
        engine.late.clear()
        for _ in range(ASKED):
            time.sleep(0.5)  # whoever asks again at once shares the model with the flood, half and half
            engine.watched.arrived.clear()
            sent = body(stream=True, max_tokens=40, **more)
            assert http.post(CHAT, json=sent, headers=MODEST).status_code == 200
        assert len(engine.late) == ASKED
        return median(engine.late)

    def flood(http: httpx.Client) -> None:
        while not stop.is_set():
            if http.post(CHAT, json=body(max_tokens=100, **more), headers=GREEDY).status_code == 429:
                stop.wait(1)

    with client_of(engine, Settings(**KEYS)) as http, ThreadPoolExecutor(80) as pool:
        alone = lateness(http)
        flooding = [pool.submit(flood, http) for _ in range(80)]
        try:
            wait_until(lambda: metric(http, "active_requests") > 2 * engine.together)
            late = lateness(http)
        finally:
            stop.set()
        for each in flooding:
            each.result()
    assert late < TIMES_AS_LATE * alone, (late, alone)


def test_a_part_of_the_places_is_kept_for_tenants_who_are_not_there() -> None:
    shares = Shares(12, 2)
    for tenant, places in (("greedy", 9), ("modest", 3)):
        assert all(shares.take(tenant) for _ in range(places))
        assert not shares.take(tenant)
    shares.give_back("greedy")
    assert shares.take("greedy")
    shares.give_back("greedy")
    assert shares.take("modest")


def test_over_http_one_tenant_does_not_get_all_places(model: InvariantModel) -> None:
    long = body(max_tokens=3000)
    settings = Settings(**KEYS, max_requests=4, timeout=3)
    with client_of(InProcess(model), settings) as http, ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            pool.submit(http.post, CHAT, json=long, headers=GREEDY)
        wait_until(lambda: metric(http, "active_requests") == 3)
        refused = http.post(CHAT, json=long, headers=GREEDY)
        assert (refused.status_code, "Retry-After" in refused.headers) == (429, True)
        assert http.post(CHAT, json=body(max_tokens=2), headers=MODEST).status_code == 200


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
