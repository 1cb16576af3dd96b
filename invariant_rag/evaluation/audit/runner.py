"""Make the calls of an audit in threads or in Ray actors, and store every answer at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from threading import Event
from time import perf_counter

from invariant_rag.errors import AuditFailed
from invariant_rag.evaluation.audit.answer_store import AnswerStore, StoredAnswer
from invariant_rag.evaluation.audit.call_plan import Call
from invariant_rag.evaluation.audit.remedies import AskFunction
from invariant_rag.evaluation.ray_map import ray_map


def make_call(call: Call, askers: Mapping[str, AskFunction]) -> StoredAnswer:
    """Call the system, and return its answer.

    Raises:
        AuditFailed: The call failed.
    """
    segments = call.spec.listed(call.question)
    start = perf_counter()
    try:
        reply = askers[call.spec.asker](call.question, segments, call.spec.salt)
    except AuditFailed:
        raise
    except Exception as error:
        raise AuditFailed(
            f"{call.spec.asker} failed on question {call.question.id!r}: {type(error).__name__}: {error}",
            hint="Its segments began with hashes. If it parses their texts, audit it with tags=False (--no-tags)."
            if call.spec.tags
            else None,
        ) from error
    seconds = perf_counter() - start
    return StoredAnswer(call.key, call.spec.asker, call.question.id, call.spec.order, reply.text, reply.tokens, seconds)


def make_calls(
    calls: Sequence[Call],
    askers: Mapping[str, AskFunction],
    store: AnswerStore,
    *,
    workers: int,
    on_answer: Callable[[], object],
) -> None:
    """Make calls in `workers` threads of this process, and store the answers.

    Raises:
        AuditFailed: A call failed. Running calls are finished and stored, no other is started.
    """
    failed = Event()

    def make(call: Call) -> None:
        if failed.is_set():
            return
        try:
            store.add(make_call(call, askers))
        except AuditFailed:
            failed.set()
            raise
        on_answer()

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(make, call) for call in calls]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    for future in futures:
        if not future.cancelled():
            future.result()


def make_calls_with_ray(
    calls: Sequence[Call],
    askers: Mapping[str, AskFunction],
    store: AnswerStore,
    *,
    actors: int,
    on_answer: Callable[[], object],
) -> None:
    """Make calls in Ray actors, each with a pickled copy of the systems, and store the answers.

    Raises:
        AuditFailed: A call failed.
        ActorsLost: A call lost its actor again and again.
        ExtraRequired: Ray is not installed.
    """
    for answer in ray_map(lambda: partial(make_call, askers=askers), calls, actors):
        store.add(answer)
        on_answer()
