"""Hostile requests to a server of the embedded model, as many as there is time for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import httpx
import pytest

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.orderings import MonoT5
from invariant_rag.server import InProcess, Settings
from tests.server.conftest import serving
from tests.server.hostile import check_refusal


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    engine = InProcess(InvariantModel.from_pretrained(), "small", caches={"": KeyValueCache()})
    settings = Settings(max_new_tokens=32, timeout=30)
    with serving(engine, settings, MonoT5(EMBEDDED["monot5"])) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


def test_no_request_makes_the_server_fail(server: httpx.Client, rounds: Callable[[], Iterator[random.Random]]) -> None:
    for source in rounds():
        check_refusal(source.randrange(1 << 32), server)
