"""Call a system: retries with growing pauses, timeouts, awaited answers, threads."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from threading import Event, Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.systems import Reply
from invariant_rag.errors import AuditFailed

if TYPE_CHECKING:
    from tenacity import RetryCallState

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
"""Seconds before the second try, twice as many before each further one, and at most, unless an error names more."""

HOPELESS = 10
"""Calls that fail, without a single answer, before an audit stops."""

LONGEST_ERROR = 300
"""Characters of an error that are kept: a server may answer with a page."""


@dataclass(frozen=True)
class Answer:
    """What came of one call.

    Attributes:
        key: Which call it was.
        text: The answer; None if every try failed.
        tokens: Its tokens, if they are known.
        seconds: How long the call took, retries included.
        errors: Class and message of the error of each try that failed.
    """

    key: str
    text: str | None
    tokens: int | None = None
    seconds: float = 0.0
    errors: tuple[str, ...] = ()


def call(key: str, function: Callable[[], Reply], retries: int = 3, timeout: float | None = None) -> Answer:
    """Call a function until it returns, or as often as it may be tried.

    Args:
        key: Key of the answer.
        function: The function.
        retries: Tries after the first one.
        timeout: Seconds after which a try counts as failed; None: never. A thread cannot be stopped: what it does goes
            on, and its answer is dropped.
    """
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

    def error_of(state: RetryCallState) -> BaseException | None:
        return None if state.outcome is None else state.outcome.exception()

    def failed(state: RetryCallState) -> None:
        error = error_of(state)
        errors.append(f"{type(error).__name__}: {error}"[:LONGEST_ERROR])

    errors: list[str] = []
    started, growing = perf_counter(), wait_exponential(FIRST_PAUSE, LONGEST_PAUSE)
    trying = Retrying(
        stop=stop_after_attempt(retries + 1),
        wait=lambda state: max(growing(state), getattr(error_of(state), "retry_after", None) or 0.0),
        retry=retry_if_exception(lambda error: isinstance(error, Exception) and not isinstance(error, AuditFailed)),
        after=failed,
        retry_error_callback=lambda _: None,  # an error is an outcome
    )
    reply = trying(_try, function, timeout)
    text, tokens = (None, None) if reply is None else (reply.text, reply.tokens)
    return Answer(key, text, tokens, perf_counter() - started, tuple(errors))


def make_calls(
    calls: Sequence[tuple[str, Callable[[], Reply]]],
    on_answer: Callable[[Answer], object],
    *,
    retries: int,
    timeout: float | None,
    workers: int,
    answers_before: bool = False,
) -> None:
    """Make calls in threads, and stop where nothing is ever answered.

    Args:
        calls: Key and function of each call.
        on_answer: Called with each answer, one at a time.
        retries: See `call`.
        timeout: See `call`.
        workers: Number of threads.
        answers_before: Whether the system has answered before.
    """
    stopped, lock = Event(), Lock()
    answered, failed = int(answers_before), 0

    def make(key: str, function: Callable[[], Reply]) -> None:
        nonlocal answered, failed
        if stopped.is_set():
            return
        try:
            answer = call(key, function, retries, timeout)
            with lock:
                on_answer(answer)
                answered, failed = answered + (answer.text is not None), failed + (answer.text is None)
                if failed >= min(HOPELESS, len(calls)) and not answered:
                    raise AuditFailed(
                        f"every call failed: {answer.errors[-1]}",
                        hint="Call it once by itself. If it is given the wrong input, say what it is called with: "
                        "to_input=lambda question, segments: ...",
                    )
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            for _ in pool.map(lambda each: make(*each), calls):
                pass
        except BaseException:  # one has raised, or somebody interrupts
            stopped.set()
            raise


def settle(value: Any) -> Any:
    """Return a value; of an awaitable, what it is awaited for.

    All are awaited in one event loop, in a thread of its own: clients that keep connections belong to a loop.
    """
    if not inspect.isawaitable(value):
        return value

    async def awaited() -> tuple[Any, BaseException | None]:
        try:
            return await value, None
        except (KeyboardInterrupt, SystemExit) as error:  # raised in the loop, they would end it, and no call return
            return None, error

    result, error = asyncio.run_coroutine_threadsafe(awaited(), _event_loop()).result()
    if error is not None:
        raise error
    return result


_starting = Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    with _starting:
        return _started_loop()


@cache
def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="audit-event-loop").start()
    return loop


def _try(function: Callable[[], Reply], timeout: float | None) -> Reply:
    """Return what a function returns in time; one that would end the process raises instead, and the audit goes on."""
    done: Future[Reply] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            done.set_exception(error)

    try:
        if timeout is None:
            return function()
        threading.Thread(target=run, daemon=True).start()  # a thread of a pool would keep the process from ending
        return done.result(timeout)
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        raise RuntimeError(f"the system called sys.exit({code}); expected an answer or an error") from error
    except TimeoutError:
        if timeout is None or done.done():
            raise  # the function's own
        raise TimeoutError(
            f"no answer within {timeout:g} seconds, the timeout of one try; for slow answers raise timeout (--timeout) "
            "or lower workers (--workers)"
        ) from None
