"""Patience with a system: retries with growing pauses, timeouts, and answers that are awaited."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from invariant_rag.errors import AuditFailed

T = TypeVar("T")

LONGEST_PAUSE = 30.0
"""Seconds of the longest pause before another try, unless an error names a longer one."""


@dataclass(frozen=True)
class Patience:
    """How often and how long a call is tried.

    Attributes:
        retries: Tries after the first one.
        timeout: Seconds after which a try counts as failed; None: never. A thread cannot be stopped: what it does goes
            on, and its answer is dropped.
        pause: Seconds before the second try. Each pause is twice as long as the one before.
    """

    retries: int = 3
    timeout: float | None = None
    pause: float = 0.25

    def call(
        self,
        function: Callable[[], T],
        is_hopeless: Callable[[Exception], bool],
        on_failure: Callable[[Exception], object] = lambda _: None,
    ) -> T:
        """Call a function until it returns.

        Args:
            function: The function.
            is_hopeless: Whether an error need not be tried again.
            on_failure: Called with the error of each try that failed.

        Raises:
            Exception: The error of the last try. An `AuditFailed` is no error of a call, and is not tried again.
        """
        for attempt in range(self.retries + 1):
            try:
                return _try(function, self.timeout)
            except AuditFailed:
                raise
            except Exception as error:
                on_failure(error)
                if attempt == self.retries or is_hopeless(error):
                    raise
                asked = getattr(error, "retry_after", None)  # seconds that a server asks for
                time.sleep(max(asked or 0.0, min(LONGEST_PAUSE, self.pause * 2**attempt)))
        raise AssertionError("unreachable: the last try returns or raises")


def _try(function: Callable[[], T], timeout: float | None) -> T:
    """Return what a function returns.

    Raises:
        RuntimeError: It would end the process: an audit goes on, and reports it like any other failure.
        Exception: What it raised, or a TimeoutError.
    """
    try:
        return function() if timeout is None else _within(timeout, function)
    except SystemExit as error:
        raise RuntimeError(
            f"the system called sys.exit({'' if error.code is None else repr(error.code)}); expected an answer or an "
            "error"
        ) from error


def _within(seconds: float, function: Callable[[], T]) -> T:
    """Return what a function returns within so many seconds.

    Raises:
        TimeoutError: It has not returned.
        Exception: What it raised.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # a thread of a pool would keep the process from ending
    try:
        return done.result(seconds)
    except TimeoutError:
        if done.done():
            raise  # the function's own
        raise TimeoutError(
            f"no answer within {seconds:g} seconds, the timeout of one try; for slow answers raise timeout (--timeout) "
            "or lower workers (--workers)"
        ) from None


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


_starting = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    with _starting:
        return _started_loop()


@cache
def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="audit-event-loop").start()
    return loop
