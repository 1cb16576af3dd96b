"""Two tenants of one server, and requests of different lengths: who gets a place, and whose turn it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack
from statistics import median
from threading import Event
from typing import Any

import httpx
import pytest

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.admission import FairQueue, Shares
from tests.server.conftest import FLAGS, QUESTION, serving

CHAT = "/v1/chat/completions"
TENANTS = ("greedy", "modest")
TIMES_AS_LATE = 3


@pytest.fixture(scope="module")
def shared(model: InvariantModel) -> Iterator[httpx.Client]:
    """A server with two tenants, and a model whose answers never end by themselves."""
    caches = {tenant: KeyValueCache(namespace=tenant) for tenant in TENANTS}
    engine, settings = InProcess(model, caches=caches), Settings(keys={tenant: tenant for tenant in TENANTS})
    with serving(engine, settings) as url, httpx.Client(base_url=url, timeout=120) as http:
        yield http


def first_token(http: httpx.Client, tenant: str, **more: Any) -> float:
    """Return the seconds until the first text of an answer."""
    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "documents": FLAGS, "stream": True, "max_tokens": 40, **more}
    start = time.perf_counter()
    with http.stream("POST", CHAT, json=body, headers={"Authorization": f"Bearer {tenant}"}) as response:
        response.raise_for_status()
        next(line for line in response.iter_lines() if '"content":' in line and '"role"' not in line)
        return time.perf_counter() - start


@pytest.mark.parametrize("more", [{}, {"temperature": 1.5, "seed": 1}], ids=["greedy", "sampled"])
def test_a_flood_of_one_tenant_does_not_keep_another_from_its_first_token(
    more: dict[str, Any], shared: httpx.Client
) -> None:
    alone = median(spaced_first_token(shared, **more) for _ in range(5))
    stop = Event()

    def flood() -> None:
        while not stop.is_set():
            messages = [{"role": "user", "content": QUESTION}]
            body = {"messages": messages, "documents": FLAGS, "max_tokens": 100, **more}
            if shared.post(CHAT, json=body, headers={"Authorization": "Bearer greedy"}).status_code == 429:
                stop.wait(1)

    threads = [threading.Thread(target=flood) for _ in range(80)]
    for each in threads:
        each.start()
    time.sleep(2)
    late = median(spaced_first_token(shared, **more) for _ in range(5))
    stop.set()
    for each in threads:
        each.join()
    assert late < TIMES_AS_LATE * alone, (late, alone)


def spaced_first_token(http: httpx.Client, **more: Any) -> float:
    """Ask after a while: whoever asks again at once shares the model with the flood, half and half."""
    time.sleep(0.5)
    return first_token(http, "modest", **more)


def test_a_part_of_the_places_is_kept_for_tenants_who_are_not_there() -> None:
    shares = Shares(12, 2)
    taken = 0
    while shares.has_room("greedy"):
        shares.move("greedy", 1)
        taken += 1
    assert taken == 9
    for _ in range(3):
        assert shares.has_room("modest")
        shares.move("modest", 1)
    assert not shares.has_room("modest")
    shares.move("greedy", -1)
    assert shares.has_room("greedy")
    assert shares.has_room("modest")


def test_turns_go_round_and_short_requests_overtake_long_ones_that_came_shortly_before() -> None:
    queue, done = FairQueue(1, 2), []
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
            while queue.waiting < number:
                time.sleep(0.001)
    assert done == ["other", "short", "long", "longer"]


def test_who_leaves_while_waiting_keeps_no_turn() -> None:
    queue, left = FairQueue(1, 1), Event()
    left.set()
    with ExitStack() as stack:
        stack.enter_context(queue.turn("", 0.0, Event()))
        with pytest.raises(CancelledError), queue.turn("", 0.0, left):
            pass
    with queue.turn("", 0.0, Event()):
        assert queue.waiting == 0
