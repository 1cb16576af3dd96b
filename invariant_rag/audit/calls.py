"""Calls of a system: to a server with the chat completions of OpenAI, tried again, in threads, awaited in one loop."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import AuditFailed

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

KEY_VARIABLE = "OPENAI_API_KEY"  # of the environment, with the key of the server, if it wants one
SECONDS = 120.0  # that the server may take
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0  # seconds before the second try, and at most, unless an error names more
HOPELESS = 10  # calls that fail, without a single answer, before an audit stops
LONGEST_ERROR = 300  # characters of an error that are kept: a server may answer with a page
_WRONG_INPUT = "Call it once. If its input is wrong, say what it takes: to_input=lambda question, segments: ..."

Progress = Callable[..., AbstractContextManager[Callable[[], None]]]
"""Opens a display for a label, a number of steps and the number of those done before; yields what tells of a step."""


def no_progress(*_: Any, **__: Any) -> AbstractContextManager[Callable[[], None]]:
    """Show nothing."""
    return nullcontext(lambda: None)


@dataclass(frozen=True)
class SystemReply:
    """An answer with its prompt and completion tokens, if they are known. A function may return one, or a string."""

    text: str
    tokens: int | None = None


class ServerError(Exception):
    """A request that the server did not answer. It may be sent again, after `retry_after` seconds."""

    retry_after = 0.0


@dataclass(frozen=True)
class Endpoint:
    """Chat completions of a server: of OpenAI, vLLM, llama.cpp, Ollama, `invariant-rag` or any other.

    Attributes:
        url: Address up to the version, such as `http://127.0.0.1:8000/v1`.
        model: Name of the model; None: the first that the server lists.
        parameters: Other fields of a request.
    """

    url: str
    model: str | None = None
    parameters: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})

    @cached_property
    def _client(self) -> httpx.Client:
        import httpx

        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(KEY_VARIABLE)) else {}
        client = httpx.Client(base_url=self.url.rstrip("/"), headers=headers, timeout=SECONDS)
        weakref.finalize(self, client.close)  # its connections are kept between calls
        return client

    @cached_property
    def served(self) -> str:
        """Name of the model that is asked."""
        if self.model is not None:
            return self.model
        try:
            return str(self._send("GET", "/models")["data"][0]["id"])
        except (ServerError, LookupError, TypeError) as error:
            hint = "Is it running? If it lists none, name one: --model, or Endpoint(url, model)."
            raise AuditFailed(f"{self.url} lists no model: {error}", hint=hint) from error

    @cached_property
    def toy(self) -> bool:
        """Whether the server says that the embedded toy model answers. One that lists no models says nothing."""
        with suppress(ServerError, AuditFailed, LookupError, TypeError, AttributeError):
            cards = self._send("GET", "/models")["data"]
            return any(each["id"] == self.served and each.get("toy") is True for each in cards)
        return False

    def complete(self, text: str) -> SystemReply:
        """Send one message of a user; raise `ServerError` without an answer, `AuditFailed` for a wrong key or model."""
        body = {"model": self.served, "messages": [{"role": "user", "content": text}], **self.parameters}
        completion = self._send("POST", "/chat/completions", body)
        try:
            text, usage = completion["choices"][0]["message"]["content"] or "", completion.get("usage") or {}
        except (LookupError, TypeError, AttributeError) as error:
            raise ServerError(f"{self.url}: expected a chat completion, got {str(completion)[:200]!r}") from error
        return SystemReply(text, usage.get("total_tokens"))

    def _send(self, verb: str, path: str, body: dict[str, Any] | None = None) -> Any:
        import httpx

        try:
            response = self._client.request(verb, path, json=body)
        except httpx.HTTPError as error:
            late = f"no answer within {SECONDS:g} seconds" if isinstance(error, httpx.TimeoutException) else ""
            why = re.sub(r"\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
            raise ServerError(late or f"the server cannot be reached: {why}") from error
        described = f"{self.url}: {response.status_code}: {response.text[:200]}"
        if response.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND}:
            raise AuditFailed(
                described, hint=f"Look at the address (up to /v1), the key in {KEY_VARIABLE}, and the model (--model)."
            )
        if response.is_error:
            failed = ServerError(described)
            with suppress(KeyError, ValueError):  # it may name a date, or nothing
                failed.retry_after = float(response.headers["Retry-After"])
            raise failed
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(f"expected JSON: {described}") from error


def is_url(value: Any) -> bool:
    """Return whether a value is the address of a server."""
    return isinstance(value, str) and value.startswith(("http://", "https://"))


@dataclass(frozen=True)
class CallResult:
    """What came of one call: no text if every try failed; seconds with all tries, and the error of each that failed."""

    key: str
    text: str | None
    tokens: int | None = None
    seconds: float = 0.0
    errors: tuple[str, ...] = ()


Job = tuple[str, Callable[[], SystemReply]]  # a call: its key, and the function that makes it


def call(key: str, function: Callable[[], SystemReply], retries: int = 3) -> CallResult:
    """Call a function until it returns, at most `retries` times more. An error is an outcome, but for `AuditFailed`."""
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

    errors, pause = list[str](), [0.0]

    def failed(state: RetryCallState) -> None:
        error = None if state.outcome is None else state.outcome.exception()
        errors.append(f"{type(error).__name__}: {error}"[:LONGEST_ERROR])
        pause[0] = getattr(error, "retry_after", 0.0)

    def once() -> SystemReply:
        try:
            return function()
        except SystemExit as error:
            code = "" if error.code is None else repr(error.code)
            raise RuntimeError(f"the system called sys.exit({code}); expected an answer or an error") from error

    started, growing = perf_counter(), wait_exponential(FIRST_PAUSE, LONGEST_PAUSE)
    reply = Retrying(
        stop=stop_after_attempt(retries + 1),
        wait=lambda state: max(growing(state), pause[0]),
        retry=retry_if_exception(lambda error: isinstance(error, Exception) and not isinstance(error, AuditFailed)),
        after=failed,
        retry_error_callback=lambda _: None,
    )(once)
    text, tokens = (None, None) if reply is None else (reply.text, reply.tokens)
    return CallResult(key, text, tokens, perf_counter() - started, tuple(errors))


def make_calls(
    calls: Sequence[Job], on_answer: Callable[[CallResult], Any], *, retries: int, workers: int, answered: bool = False
) -> None:
    """Make calls by key in threads, and pass on one answer at a time. Stop where nothing is ever `answered`."""
    stopped, lock, failed = threading.Event(), threading.Lock(), 0

    def make(each: Job) -> None:
        nonlocal answered, failed
        if stopped.is_set():
            return
        try:
            answer = call(*each, retries)
            with lock:
                on_answer(answer)
                answered, failed = answered or answer.text is not None, failed + (answer.text is None)
                if failed >= min(HOPELESS, len(calls)) and not answered:
                    raise AuditFailed(f"every call failed: {answer.errors[-1]}", hint=_WRONG_INPUT)
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            list(pool.map(make, calls))
        finally:  # one has raised, somebody interrupts, or all are made
            stopped.set()


def settle(value: Any) -> Any:
    """Return a value; await an awaitable, in one event loop for all: clients that keep connections belong to a loop."""
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
