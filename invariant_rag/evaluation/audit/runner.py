"""Make the calls of an audit in threads or in Ray actors, and store every answer at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from threading import Event, Lock
from time import perf_counter

from invariant_rag.errors import AuditFailed
from invariant_rag.evaluation.audit.answer_store import AnswerStore, StoredAnswer
from invariant_rag.evaluation.audit.call_plan import Call
from invariant_rag.evaluation.audit.patience import Patience
from invariant_rag.evaluation.audit.remedies import AskFunction
from invariant_rag.evaluation.ray_map import ray_map

HOPELESS = 10
"""Calls of one kind that fail, without a single answer, before an audit stops."""

LONGEST_ERROR = 300
"""Characters of an error that are kept: a server may answer with a page."""


@dataclass(frozen=True)
class FailedCall:
    """A call that had no answer, whatever the patience.

    Attributes:
        call: The call.
        errors: Class and message of the error of each try.
    """

    call: Call
    errors: tuple[str, ...]

    @property
    def error(self) -> str:
        """Class and message of the error of the last try."""
        return self.errors[-1]


def make_call(
    call: Call, askers: Mapping[str, AskFunction], patience: Patience, known_failures: Sequence[str] = ()
) -> StoredAnswer | FailedCall:
    """Call the system, and return its answer, or the errors of all tries.

    Args:
        call: The call.
        askers: Functions by name.
        patience: Retries and timeout.
        known_failures: Errors of other calls about this question, which no retry has cured.

    Raises:
        AuditFailed: The system is none that can be audited.
    """
    segments = call.spec.listed(call.question)
    asker = askers[call.spec.asker]
    start = perf_counter()
    errors: list[str] = []
    try:
        reply = patience.call(
            lambda: asker(call.question, segments, call.spec.salt),
            lambda error: _named(error) in known_failures,
            lambda error: errors.append(_named(error)),
        )
    except AuditFailed:
        raise
    except Exception:  # noqa: BLE001 - a system may raise anything; the share of errors is reported
        return FailedCall(call, tuple(errors))
    return StoredAnswer(
        key=call.key,
        asker=call.spec.asker,
        question=call.question.id,
        order=call.spec.order,
        text=reply.text,
        tokens=reply.tokens,
        seconds=perf_counter() - start,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        errors=tuple(errors),
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST_ERROR]


class CallLog:
    """Stores answers, notes failed calls, and gives up on a system that never answers. Thread-safe.

    Args:
        store: Where answers go.
        on_answer: Called after each call.
    """

    def __init__(self, store: AnswerStore, on_answer: Callable[[], object]) -> None:
        self.failed: list[FailedCall] = []
        self._store, self._on_answer, self._lock = store, on_answer, Lock()
        self._answered: Counter[tuple[str, bool]] = Counter()
        self._failed: Counter[tuple[str, bool]] = Counter()

    def failures_of(self, question: str) -> list[str]:
        """Return the errors of calls about a question."""
        with self._lock:
            return [each.error for each in self.failed if each.call.question.id == question]

    def add(self, call: Call, result: StoredAnswer | FailedCall) -> None:
        """Store an answer, or note a failure.

        Raises:
            AuditFailed: Calls of this kind, with or without hashes before the segments, have failed and never had an
                answer.
        """
        kind = call.spec.asker, bool(call.spec.tags)
        if isinstance(result, StoredAnswer):
            self._store.add(result)
        with self._lock:
            if isinstance(result, StoredAnswer):
                self._answered[kind] += 1
            else:
                self._failed[kind] += 1
                self.failed.append(result)
                if self._failed[kind] >= HOPELESS and not self._answered[kind]:
                    raise hopeless(self.failed, call.spec.tags != "")
        self._on_answer()


def hopeless(failed: Sequence[FailedCall], tagged: bool = False) -> AuditFailed:
    """Return the error for a system that answers nothing."""
    last = failed[-1]
    return AuditFailed(
        f"{last.call.spec.asker} failed on question {last.call.question.id!r}, and on every other call like it: "
        f"{last.error}",
        hint="Its segments began with hashes. If it parses their texts, audit it with tags=False (--no-tags)."
        if tagged
        else None,
    )


def make_calls(
    calls: Sequence[Call],
    askers: Mapping[str, AskFunction],
    log: CallLog,
    *,
    workers: int,
    patience: Patience,
) -> None:
    """Make calls in `workers` threads of this process.

    Raises:
        AuditFailed: The system is none that can be audited, or never answers. Running calls are finished, no other is
            started.
    """
    stopped = Event()

    def make(call: Call) -> None:
        if stopped.is_set():
            return
        try:
            log.add(call, make_call(call, askers, patience, log.failures_of(call.question.id)))
        except BaseException:
            stopped.set()
            raise

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
    log: CallLog,
    *,
    actors: int,
    patience: Patience,
) -> None:
    """Make calls in Ray actors, each with a pickled copy of the systems.

    Raises:
        AuditFailed: The system is none that can be audited, or never answers.
        ActorsLost: A call lost its actor again and again.
        ExtraRequired: Ray is not installed.
    """
    by_key = {call.key: call for call in calls}
    for result in ray_map(lambda: partial(make_call, askers=askers, patience=patience), calls, actors):
        log.add(by_key[result.key] if isinstance(result, StoredAnswer) else result.call, result)
