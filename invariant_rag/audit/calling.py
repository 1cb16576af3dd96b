"""Call a system: retries with growing pauses, awaited answers, threads."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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

Progress = Callable[..., AbstractContextManager[Callable[[], None]]]
"""Opens a display for a label, a number of steps and the number of those done before; yields what tells of a step."""


def no_progress(*_: Any, **__: Any) -> AbstractContextManager[Callable[[], None]]:
    """Show nothing."""
    return nullcontext(lambda: None)


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


def call(key: str, function: Callable[[], Reply], retries: int = 3) -> Answer:
    """Call a function until it returns, at most `retries` times more. An error is an outcome, but for `AuditFailed`."""
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

    def error_of(state: RetryCallState) -> BaseException | None:
        return None if state.outcome is None else state.outcome.exception()

    def failed(state: RetryCallState) -> None:
        error = error_of(state)
        errors.append(f"{type(error).__name__}: {error}"[:LONGEST_ERROR])

    def once() -> Reply:
        try:
            return function()
        except SystemExit as error:
            code = "" if error.code is None else repr(error.code)
            raise RuntimeError(f"the system called sys.exit({code}); expected an answer or an error") from error

    errors: list[str] = []
    started, growing = perf_counter(), wait_exponential(FIRST_PAUSE, LONGEST_PAUSE)
    trying = Retrying(
        stop=stop_after_attempt(retries + 1),
        wait=lambda state: max(growing(state), getattr(error_of(state), "retry_after", None) or 0.0),
        retry=retry_if_exception(lambda error: isinstance(error, Exception) and not isinstance(error, AuditFailed)),
        after=failed,
        retry_error_callback=lambda _: None,
    )
    reply = trying(once)
    text, tokens = (None, None) if reply is None else (reply.text, reply.tokens)
    return Answer(key, text, tokens, perf_counter() - started, tuple(errors))


def make_calls(
    calls: Sequence[tuple[str, Callable[[], Reply]]],
    on_answer: Callable[[Answer], object],
    *,
    retries: int,
    workers: int,
    answered: bool = False,
) -> None:
    """Make calls, each with its key, in threads; stop where nothing is ever answered, if nothing was `answered` before.

    `on_answer` is called with one answer at a time.
    """
    stopped, lock = threading.Event(), threading.Lock()
    failed = 0

    def make(key: str, function: Callable[[], Reply]) -> None:
        nonlocal answered, failed
        if stopped.is_set():
            return
        try:
            answer = call(key, function, retries)
            with lock:
                on_answer(answer)
                answered, failed = answered or answer.text is not None, failed + (answer.text is None)
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

    with _starting:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[0].run_forever, daemon=True, name="audit-event-loop").start()
    result, error = asyncio.run_coroutine_threadsafe(awaited(), _loops[0]).result()
    if error is not None:
        raise error
    return result


_starting = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []
