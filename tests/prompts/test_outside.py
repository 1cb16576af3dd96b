"""What a run retrieved for no model is known in its context alone, until the next retrieval, or a model gets it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context

import pytest

from invariant_rag.prompts import Retrieval, RunRetrievals, begin_outside, forget_outside, outside_retrievals
from invariant_rag.segments import Segment

FERRIES = Retrieval((Segment("The ferry leaves at noon."), Segment("It carries salt.")), "When?")
MILLS = Retrieval((Segment("The mill grinds barley."),), "What?")


def texts() -> list[list[str]]:
    return [[each.text for each in one.segments] for one in outside_retrievals()]


def retrieve(*found: Retrieval, asks: bool = False, failed: bool = False) -> None:
    """Run a root run that retrieves, and that may ask a model or fail."""
    runs = RunRetrievals()
    begin_outside()
    runs.start("root", query="When?")
    for each in found:
        runs.add("root", each)
    if asks:
        runs.of("root")
    runs.end("root", failed=failed)


def known_after(*steps: Callable[[], object]) -> list[list[str]]:
    def take() -> list[list[str]]:
        for step in steps:
            step()
        return texts()

    return Context().run(take)


FERRY_TEXTS = [each.text for each in FERRIES.segments]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], []),
        ([lambda: retrieve(FERRIES)], [FERRY_TEXTS]),
        ([lambda: retrieve(FERRIES), lambda: retrieve(MILLS)], [["The mill grinds barley."]]),
        ([lambda: retrieve(FERRIES), retrieve], [FERRY_TEXTS]),  # a run that retrieved nothing
        ([lambda: retrieve(FERRIES), lambda: retrieve(MILLS, failed=True)], [FERRY_TEXTS]),
        ([lambda: retrieve(FERRIES), lambda: retrieve(MILLS, asks=True)], []),
        ([lambda: retrieve(FERRIES), lambda: forget_outside([" ".join(FERRY_TEXTS)])], []),
        ([lambda: retrieve(FERRIES), lambda: forget_outside(FERRY_TEXTS[:1])], [FERRY_TEXTS]),
        ([lambda: retrieve(FERRIES), lambda: copy_context().run(forget_outside, FERRY_TEXTS)], []),
    ],
)
def test_the_last_retrieval_for_no_model_is_known(steps: list[Callable[[], object]], expected: list[list[str]]) -> None:
    assert known_after(*steps) == expected


def test_it_is_a_reason_to_warn_and_no_set() -> None:
    (found,) = Context().run(lambda: (retrieve(FERRIES), outside_retrievals())[1])
    assert (found.is_set, found.one_by_one, found.query) == (False, True, "When?")


def test_other_threads_and_tasks_know_nothing_of_it() -> None:
    def in_threads() -> tuple[list[list[str]], list[list[str]]]:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(retrieve, MILLS).result()
            before = texts()
            retrieve(FERRIES)
            return before, pool.submit(texts).result()

    async def in_tasks() -> list[list[list[str]]]:
        begin_outside()

        async def tenant(*found: Retrieval) -> list[list[str]]:
            retrieve(*found)
            await asyncio.sleep(0.01)
            return texts()

        return [*await asyncio.gather(tenant(FERRIES), tenant(MILLS), tenant()), texts()]

    assert Context().run(in_threads) == ([], [["The mill grinds barley."]])
    assert Context().run(asyncio.run, in_tasks()) == [[FERRY_TEXTS], [["The mill grinds barley."]], [], []]
