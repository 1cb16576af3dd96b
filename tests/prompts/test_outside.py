"""What a run retrieved for no model is known in its context alone, until the next retrieval, or a model gets it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context

import pytest

from invariant_rag.prompts import Retrieval, RunRetrievals, begin_outside, forget_outside, outside_retrievals
from invariant_rag.segments import Segment

FERRY_TEXTS = ["The ferry leaves at noon.", "It carries salt."]
MILL_TEXTS = ["The mill grinds barley."]
FERRIES = Retrieval(tuple(map(Segment, FERRY_TEXTS)), "When?")
MILLS = Retrieval(tuple(map(Segment, MILL_TEXTS)), "What?")


def texts():
    return [[each.text for each in one.segments] for one in outside_retrievals()]


def retrieve(*found, asks=False, failed=False):
    """Run a root run that retrieves, and that may ask a model or fail."""
    runs = RunRetrievals()
    begin_outside()
    runs.start("root", query="When?")
    for each in found:
        runs.add("root", each)
    if asks:
        runs.of("root")
    runs.end("root", failed=failed)


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        (lambda: None, [FERRY_TEXTS]),
        (lambda: retrieve(MILLS), [MILL_TEXTS]),
        (retrieve, [FERRY_TEXTS]),  # a run that retrieved nothing
        (lambda: retrieve(MILLS, failed=True), [FERRY_TEXTS]),
        (lambda: retrieve(MILLS, asks=True), []),
        (lambda: forget_outside([" ".join(FERRY_TEXTS)]), []),
        (lambda: forget_outside(FERRY_TEXTS[:1]), [FERRY_TEXTS]),
        (lambda: copy_context().run(forget_outside, FERRY_TEXTS), []),
    ],
)
def test_the_last_retrieval_for_no_model_is_known_to_warn_and_is_no_set(then, expected):
    def known():
        assert texts() == []
        retrieve(FERRIES)
        (found,) = outside_retrievals()
        assert (found.is_set, found.one_by_one, found.query) == (False, True, "When?")
        then()
        return texts()

    assert Context().run(known) == expected


def test_other_threads_and_tasks_know_nothing_of_it():
    def in_threads():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(retrieve, MILLS).result()
            before = texts()
            retrieve(FERRIES)
            return before, pool.submit(texts).result()

    async def in_tasks():
        begin_outside()

        async def tenant(*found):
            retrieve(*found)
            await asyncio.sleep(0.01)
            return texts()

        return [*await asyncio.gather(tenant(FERRIES), tenant(MILLS), tenant()), texts()]

    assert Context().run(in_threads) == ([], [MILL_TEXTS])
    assert Context().run(asyncio.run, in_tasks()) == [[FERRY_TEXTS], [MILL_TEXTS], [], []]
