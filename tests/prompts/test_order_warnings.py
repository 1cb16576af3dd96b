"""A warning stands at the line of the user's code, once per line."""

from __future__ import annotations

import asyncio
import linecache
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from invariant_rag.errors import InvariantRAGError, OrderWarning
from invariant_rag.prompts import Finding, report

FOUND = [Finding("separate", "two segments stand apart.")]

FRAMEWORK = """
import asyncio
from concurrent.futures import ThreadPoolExecutor
from invariant_rag.prompts import report

def invoke(findings):
    report(findings)

def batch(findings):
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(invoke, [findings]))

async def ainvoke(findings):
    await asyncio.sleep(0)
    report(findings)

async def ainvoke_in_a_thread(findings):
    await asyncio.get_running_loop().run_in_executor(None, invoke, findings)

async def ainvoke_in_a_task(findings):
    await asyncio.gather(ainvoke(findings))

def stream(findings):
    yield "a"
    report(findings)

async def astream(findings):
    yield "a"
    report(findings)
"""
"""A module of a framework: the user's code calls it, and it calls `report`."""

framework: dict[str, Any] = {"__name__": "langchain_core.language_models"}
exec(compile(FRAMEWORK, "langchain_core/language_models.py", "exec"), framework)


def call() -> None:
    framework["invoke"](FOUND)  # warns


def call_batch() -> None:
    framework["batch"](FOUND)  # warns


def call_stream() -> None:
    for _ in framework["stream"](FOUND):  # warns
        pass


def call_async() -> None:
    async def user() -> None:
        await framework["ainvoke"](FOUND)  # warns

    asyncio.run(user())


def call_async_stream() -> None:
    async def user() -> None:
        async for _ in framework["astream"](FOUND):  # warns
            pass

    asyncio.run(user())


def call_in_a_pool() -> None:
    def user(_: int) -> None:
        framework["invoke"](FOUND)  # warns

    with ThreadPoolExecutor(1) as pool:
        list(pool.map(user, [0]))


def call_of_a_pool() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(framework["invoke"], FOUND).result()  # warns


def call_async_in_a_thread() -> None:
    async def user() -> None:
        await framework["ainvoke_in_a_thread"](FOUND)  # warns

    asyncio.run(user())  # warns


def call_async_in_a_task() -> None:
    async def user() -> None:
        await framework["ainvoke_in_a_task"](FOUND)

    asyncio.run(user())  # warns


CALLS: list[Callable[[], None]] = [
    call,
    call_batch,
    call_stream,
    call_async,
    call_async_stream,
    call_in_a_pool,
    call_of_a_pool,
    call_async_in_a_thread,
    call_async_in_a_task,
]


@pytest.fixture(autouse=True)
def _no_line_has_warned() -> None:
    globals().pop("__warningregistry__", None)


@pytest.mark.parametrize("user", CALLS)
def test_the_warning_stands_at_the_users_line(user: Callable[[], None]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        user()
    [warning] = caught
    assert warning.category is OrderWarning
    assert warning.filename == __file__
    assert linecache.getline(__file__, warning.lineno).endswith("# warns\n")


def test_a_line_warns_once_and_every_line_warns() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        for _ in range(3):
            framework["invoke"](FOUND)
            framework["invoke"](FOUND)
            framework["batch"](FOUND)
    assert len({warning.lineno for warning in caught}) == len(caught) == 3


def test_strict_raises_the_first_finding() -> None:
    with pytest.raises(OrderWarning, match="stand apart") as caught:
        report([*FOUND, Finding("marks", "marks are left.")], strict=True)
    assert isinstance(caught.value, InvariantRAGError)
    report([], strict=True)


def test_a_warning_can_be_made_an_error_or_be_silenced_by_its_class() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", OrderWarning)
        with pytest.raises(OrderWarning):
            report(FOUND)
        warnings.simplefilter("ignore", OrderWarning)
        report(FOUND)


def test_every_finding_warns() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report([*FOUND, Finding("marks", "marks are left.")])
    assert len(caught) == 2
    assert {warning.filename for warning in caught} == {__file__}
