"""One request: parsed by a worker, answered in a thread, with a deadline, until its client leaves.

The event loop only passes bytes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any, TypeAlias, cast

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from invariant_rag.server.admission import Admission
from invariant_rag.server.engines.base import Engine, Reranker
from invariant_rag.server.errors import (
    ClientLeft,
    DeadlineExceeded,
    InvalidRequest,
    TooLarge,
    UnknownModel,
    encode,
    error_body,
    status_of,
)
from invariant_rag.server.logs import Tracing
from invariant_rag.server.metrics import Metrics
from invariant_rag.server.middleware import log_fault
from invariant_rag.server.order_sampling import OrderSampling
from invariant_rag.server.parsing import Parsed, parse
from invariant_rag.server.settings import Settings
from invariant_rag.server.worker import PARSERS
from invariant_rag.shown import shown

_JSON = ("application/json", "+json")
_PARSING_SECONDS = 5.0
_BYTES_PER_SECOND = 1e6
"""About how fast bodies are parsed: a short one is parsed before long ones."""


@dataclass(frozen=True)
class State:
    """What the routes of one application share.

    Attributes:
        engine: What answers.
        settings: What is allowed.
        without_keys: The same for other processes, which get no key.
        metrics: What is counted.
        admission: Who may wait, and whose turn it is.
        executor: Threads for as many requests as may run and wait.
        sampling: Asks some requests again in another order.
        reranker: Scores documents for a query.
        tracing: Spans of OpenTelemetry.
        started: Seconds since 1970.
    """

    engine: Engine
    settings: Settings
    without_keys: Settings
    metrics: Metrics
    admission: Admission
    executor: ThreadPoolExecutor
    sampling: OrderSampling
    reranker: Reranker
    tracing: Tracing
    started: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None, *allowed: str) -> None:
        """Check the model of a request; None is the one that there is.

        Raises:
            UnknownModel: There is no such model.
        """
        known = allowed or (self.engine.name,)
        if name is not None and name not in known:
            raise UnknownModel(f"expected the model {known[0]!r}, got {shown(name)}", param="model")


def state_of(request: Request) -> State:
    """Return the state of the application that got a request."""
    return cast("State", request.app.state.serving)


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
    """Answer a request to a route of `parsing.ROUTES`.

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
        return Response(running.result.result(), media_type="application/json")
    return EventSourceResponse(running.events(first))


class _Running:
    """A request while it runs.

    Its place is given back when the thread ends: a client that leaves does not make room for work that still runs.
    """

    def __init__(self, request: Request, route: str, body: bytes, answer: Answer) -> None:
        self._state = state = state_of(request)
        self._request, self._noted = request, request.scope["state"]["noted"]
        # The tenant whose key it came with; an empty text where no keys are needed.
        self._tenant = str(request.scope["state"].get("tenant", ""))
        self._route, self._body, self._answer = route, body, answer
        state.admission.enter(self._tenant)
        self._begun, self._abandoned = time.monotonic(), Event()
        self._chunks: asyncio.Queue[str | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + state.settings.timeout
        self.result = self._loop.run_in_executor(state.executor, self._run)

    def _put(self, chunk: Any) -> None:
        self._loop.call_soon_threadsafe(self._chunks.put_nowait, None if chunk is None else encode(chunk))

    def _run(self) -> bytes:
        """Parse and answer, in a thread."""
        state, given = self._state, self._request.headers
        traced = {name: given[name] for name in ("traceparent", "tracestate") if name in given}
        headers = {**traced, "x-request-id": str(self._noted["request_id"])}
        try:
            if self._abandoned.is_set():
                raise CancelledError
            with state.tracing.span("parse", headers):
                parsed = self._parsed()
            if parsed.contents is not None:
                self._noted["contents"] = parsed.contents
            job = Job(
                state,
                parsed,
                headers["x-request-id"],
                self._tenant,
                headers,
                self._put,
                self._abandoned,
                self._noted,
                self._begun,
            )
            return encode(self._answer(job)).encode()
        except CancelledError:  # asyncio would take it for a cancelled request
            raise ClientLeft("nobody waits for the answer") from None
        except MemoryError:
            raise TooLarge("expected a request that fits into memory") from None
        finally:
            state.admission.leave(self._tenant, time.monotonic() - self._begun)
            self._put(None)

    def _parsed(self) -> Parsed:
        """Return the body as a call. A process that can be stopped does the work."""
        state, work = self._state, (self._route, self._body, self._state.without_keys, self._tenant)
        with state.admission.parsing.turn(self._tenant, len(self._body) / _BYTES_PER_SECOND, self._abandoned):
            try:
                return PARSERS.call(_PARSING_SECONDS, self._abandoned, parse, *work)
            except TimeoutError:
                raise TooLarge(f"expected a body that is parsed within {_PARSING_SECONDS:g} seconds") from None

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
                await self.result
            return getting.result()
        getting.cancel()
        self._abandon()
        if gone in done:
            raise ClientLeft("the client has closed the connection")
        raise self._exceeded()

    async def events(self, first: str) -> AsyncIterator[dict[str, str]]:
        """Yield chunks as server-sent events, as OpenAI does: an error is the last chunk, else `[DONE]` is.

        Whoever stops listening abandons the work.
        """
        chunk: str | None = first
        try:
            while chunk is not None:
                yield {"data": chunk}
                try:
                    chunk = await asyncio.wait_for(self._chunks.get(), self._seconds_left())
                except TimeoutError:
                    raise self._exceeded() from None
            await self.result
            yield {"data": "[DONE]"}
        except Exception as error:  # noqa: BLE001 - the status is sent already: the client is told in the stream
            self._noted["error"] = type(error).__name__
            if status_of(error) == 500:
                log_fault(error, self._noted)
            yield {"data": encode(error_body(error))}
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Stop the work: nobody waits for it, nor for its error."""
        self._abandoned.set()
        self.result.add_done_callback(lambda result: result.cancelled() or result.exception())

    def _seconds_left(self) -> float:
        return max(self._deadline - self._loop.time(), 0)

    def _exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"expected an answer within {self._state.settings.timeout:g} seconds")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
