"""One request: parsed by a worker, answered in a thread, with a deadline, until its client leaves.

The event loop only passes bytes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any, TypeAlias

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from invariant_rag.server.errors import (
    ClientLeft,
    DeadlineExceeded,
    InvalidRequest,
    TooLarge,
    error_body,
    status_of,
)
from invariant_rag.server.json_text import encode
from invariant_rag.server.middleware import log_fault
from invariant_rag.server.parsing import Parsed
from invariant_rag.server.state import State, noted_of, passed_on, state_of, tenant_of

_JSON = ("application/json", "+json")


@dataclass(frozen=True)
class Job:
    """A request that was parsed, for the function that answers it in a thread.

    Attributes:
        state: What the routes share.
        parsed: The request.
        id: Its name.
        tenant: Whose it is.
        headers: What an engine behind this server gets of its head.
        put: Takes a chunk of a stream. A request is answered with a stream if there is one.
        abandoned: Once set, nobody waits for the answer any more.
        noted: What the log says of the request.
        begun: When it came, in seconds of `time.monotonic`.
    """

    state: State
    parsed: Parsed
    id: str
    tenant: str
    headers: Mapping[str, str]
    put: Callable[[Any], None]
    abandoned: Event
    noted: MutableMapping[str, Any]
    begun: float

    @contextmanager
    def turn(self, seconds: float) -> Iterator[None]:
        """Wait for the turn of a request that takes about so many seconds, and have it during the block.

        Raises:
            CancelledError: It was abandoned.
        """
        start = time.monotonic()
        with self.state.admission.answering.turn(self.tenant, seconds, self.abandoned):
            self.state.metrics.queue_seconds.observe(time.monotonic() - start)
            with self.state.tracing.span("answer", self.headers):
                yield


Answer: TypeAlias = Callable[[Job], Any]
"""Answers a request in a thread: puts the chunks of a stream, or returns a body."""


async def respond(request: Request, route: str, answer: Answer) -> Response:
    """Answer a request.

    Args:
        request: The request.
        route: As for `parsing.parse`.
        answer: Answers it.

    Raises:
        Busy: There is no place for it.
        ClientLeft: The client has closed the connection.
        DeadlineExceeded: It takes too long.
        InvalidRequest: Its content is not said to be JSON. (A page elsewhere could send a browser with another type.)
        InvariantRAGError: As the answer raises it.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind.endswith(_JSON):
        raise InvalidRequest("expected the header `content-type: application/json`")
    running = _Running(request, route, await request.body(), answer)
    first = await running.first()
    if first is None:
        return Response(running.body, media_type="application/json")
    return EventSourceResponse(running.events(first))


class _Running:
    """A request while it runs.

    Its place is given back when the thread ends: a client that leaves does not make room for work that still runs.
    """

    def __init__(self, request: Request, route: str, body: bytes, answer: Answer) -> None:
        state, tenant = state_of(request), tenant_of(request)
        state.admission.enter(tenant)
        loop = asyncio.get_running_loop()
        self._request, self._timeout = request, state.settings.timeout
        self._noted = noted = noted_of(request)
        headers = passed_on(request)
        self._chunks: asyncio.Queue[str | None] = asyncio.Queue()
        self._abandoned = abandoned = Event()
        self._deadline = loop.time() + self._timeout
        begun = time.monotonic()

        def put(chunk: str | None) -> None:
            loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)

        def run() -> bytes:
            try:
                if abandoned.is_set():
                    raise CancelledError
                with state.tracing.span("parse", headers):
                    parsed = state.parse(route, body, tenant, abandoned)
                if parsed.contents is not None:
                    noted["contents"] = parsed.contents
                job = Job(
                    state,
                    parsed,
                    str(noted["request_id"]),
                    tenant,
                    headers,
                    lambda chunk: put(encode(chunk)),
                    abandoned,
                    noted,
                    begun,
                )
                return encode(answer(job)).encode()
            except CancelledError:  # asyncio would take it for a cancelled request
                raise ClientLeft("nobody waits for the answer") from None
            except MemoryError:
                raise TooLarge("expected a request that fits into memory") from None
            finally:
                state.admission.leave(tenant, time.monotonic() - begun)
                put(None)

        self._result = loop.run_in_executor(state.executor, run)

    @property
    def body(self) -> bytes:
        """The body of an answer that is no stream."""
        return self._result.result()

    async def first(self) -> str | None:
        """Wait for the first chunk: errors before it are answered with their status. None: the answer is no stream."""
        getting = asyncio.ensure_future(self._chunks.get())
        gone = asyncio.ensure_future(_disconnected(self._request))
        try:
            done, _ = await asyncio.wait(
                {getting, gone}, timeout=self._seconds_left(), return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:  # some servers cancel a request whose client leaves
            self._abandon()
            raise
        finally:
            gone.cancel()
        if getting in done:
            if getting.result() is None:
                await self._result
            return getting.result()
        getting.cancel()
        self._abandon()
        if gone in done:
            raise ClientLeft("the client has closed the connection")
        raise self._exceeded()

    async def events(self, first: str) -> AsyncIterator[dict[str, str]]:
        """Yield chunks as server-sent events, as OpenAI does: an error is the last chunk, else `[DONE]` is.

        Whoever stops reading abandons the work.
        """
        chunk: str | None = first
        try:
            while chunk is not None:
                yield {"data": chunk}
                try:
                    chunk = await asyncio.wait_for(self._chunks.get(), self._seconds_left())
                except TimeoutError:
                    raise self._exceeded() from None
            await self._result
            yield {"data": "[DONE]"}
        except Exception as error:  # noqa: BLE001 - the status is sent already: the client is told in the stream
            self._noted["error"] = type(error).__name__
            if status_of(error) == 500:
                log_fault(error, self._noted)
            yield {"data": encode(error_body(error))}
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Stop the work: nobody waits for it."""
        self._abandoned.set()
        self._result.add_done_callback(_forget)

    def _seconds_left(self) -> float:
        return max(self._deadline - asyncio.get_running_loop().time(), 0)

    def _exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"expected an answer within {self._timeout:g} seconds")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _forget(result: asyncio.Future[Any]) -> None:
    """Take the error of work that nobody waits for."""
    if not result.cancelled():
        result.exception()
