"""One request: parsed by a worker, answered in a thread, with a deadline, until its client leaves.

The event loop only passes bytes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any, TypeAlias

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from invariant_rag.server.admission import Admission
from invariant_rag.server.engines.base import Engine, Reranker
from invariant_rag.server.engines.building import build_reranker
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
from invariant_rag.server.parsing import Parsed, parse
from invariant_rag.server.settings import Settings
from invariant_rag.server.worker import PARSERS
from invariant_rag.shown import shown

_JSON = ("application/json", "+json")
_PARSING_SECONDS = 5.0
_BYTES_PER_SECOND = 1e6
"""About how fast bodies are parsed: a short one is parsed before long ones."""


class State:
    """What the routes of one application share.

    Args:
        engine: What answers.
        settings: What is allowed.
        reranker: Scores documents for a query. None: that of `build_reranker`.
    """

    def __init__(self, engine: Engine, settings: Settings, reranker: Reranker | None) -> None:
        self.engine, self.settings = engine, settings
        self.reranker = reranker or build_reranker(None)
        self.without_keys = settings.without_keys()  # for other processes
        self.metrics = Metrics(engine.caches.values())
        self.admission = Admission(settings, engine.together, PARSERS.count, self.metrics)
        self.executor = ThreadPoolExecutor(settings.max_requests, "invariant-rag-request")
        self.tracing = Tracing()
        self.started = int(time.time())

    def check_model(self, name: str | None, *allowed: str) -> None:
        """Check the model of a request; None is the one that there is.

        Raises:
            UnknownModel: There is no such model.
        """
        known = allowed or (self.engine.name,)
        if name is not None and name not in known:
            raise UnknownModel(f"expected the model {known[0]!r}, got {shown(name)}", param="model")

    def close(self) -> None:
        """Wait for what runs, and end."""
        self.executor.shutdown(wait=True, cancel_futures=True)
        self.engine.close()


def state_of(request: Request) -> State:
    """Return the state of the application that got a request."""
    found: State = request.app.state.serving
    return found


class Job:
    """A request while it runs. Its place is given back when the thread ends, and not when its client leaves.

    Attributes:
        state: What the routes share.
        id: Its name.
        tenant: Whose it is; "" where no keys are needed.
        headers: What an engine behind this server gets of its head.
        noted: What the log says of it.
        begun: When it came, in seconds of `time.monotonic`.
        abandoned: Once set, nobody waits for the answer any more.
        parsed: The request, once it is parsed.
        result: The body of the answer; empty after a stream.

    Raises:
        Busy: There is no place for it.
    """

    parsed: Parsed

    def __init__(self, request: Request, route: str, handler: Handler) -> None:
        self.state = state_of(request)
        self._request, self._route, self._handler = request, route, handler
        own = request.scope["state"]
        self.noted, self.tenant, self._body = own["noted"], own["tenant"], own["body"]
        self.id = str(self.noted["request_id"])
        traced = {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}
        self.headers = {**traced, "x-request-id": self.id}
        self.state.admission.enter(self.tenant)
        self.begun, self.abandoned = time.monotonic(), Event()
        self._chunks: asyncio.Queue[str | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + self.state.settings.timeout
        self.result = self._loop.run_in_executor(self.state.executor, self._run)

    def put(self, chunk: Any) -> None:
        """Take a chunk of a stream, from any thread. A request is answered with a stream if there is one."""
        self._loop.call_soon_threadsafe(self._chunks.put_nowait, None if chunk is None else encode(chunk))

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

    def _run(self) -> bytes:
        """Parse and answer, in a thread."""
        try:
            if self.abandoned.is_set():
                raise CancelledError
            with self.state.tracing.span("parse", self.headers):
                self.parsed = self._parse()
            if self.parsed.contents is not None:
                self.noted["contents"] = self.parsed.contents
            found = self._handler(self)
            return b"" if found is None else encode(found).encode()
        except CancelledError:
            raise ClientLeft("nobody waits for the answer") from None
        except MemoryError:
            raise TooLarge("expected a request that fits into memory") from None
        finally:
            self.state.admission.leave(self.tenant, time.monotonic() - self.begun)
            self.put(None)

    def _parse(self) -> Parsed:
        """Return the body as a call. A process that can be stopped does the work."""
        work = self._route, self._body, self.state.without_keys, self.tenant
        with self.state.admission.parsing.turn(self.tenant, len(self._body) / _BYTES_PER_SECOND, self.abandoned):
            try:
                return PARSERS.call(_PARSING_SECONDS, self.abandoned, parse, *work)
            except TimeoutError:
                raise TooLarge(f"expected a body that is parsed within {_PARSING_SECONDS:g} seconds") from None

    async def first(self) -> str | None:
        """Wait for the first chunk: errors before it are answered with their status. None: the answer is no stream.

        Raises:
            ClientLeft: The client has closed the connection.
            DeadlineExceeded: It takes too long.
        """
        getting = asyncio.ensure_future(self._chunks.get())
        gone = asyncio.ensure_future(_disconnected(self._request))
        try:
            done, _ = await asyncio.wait({getting, gone}, timeout=self._seconds_left, return_when="FIRST_COMPLETED")
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
        raise self._exceeded

    async def events(self, first: str) -> AsyncIterator[dict[str, str]]:
        """Yield chunks as server-sent events, as OpenAI does: an error is the last chunk, else `[DONE]` is.

        Whoever stops listening abandons the work.
        """
        chunk: str | None = first
        try:
            while chunk is not None:
                yield {"data": chunk}
                try:
                    chunk = await asyncio.wait_for(self._chunks.get(), self._seconds_left)
                except TimeoutError:
                    raise self._exceeded from None
            await self.result
            yield {"data": "[DONE]"}
        except Exception as error:  # noqa: BLE001 - the status is sent already: the client is told in the stream
            self.noted["error"] = type(error).__name__
            if status_of(error) == 500:
                log_fault(error, self.noted)
            yield {"data": encode(error_body(error))}
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Stop the work: nobody waits for it, nor for its error."""
        self.abandoned.set()
        self.result.add_done_callback(lambda result: result.cancelled() or result.exception())

    @property
    def _seconds_left(self) -> float:
        return max(self._deadline - self._loop.time(), 0)

    @property
    def _exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"expected an answer within {self.state.settings.timeout:g} seconds")


Handler: TypeAlias = Callable[[Job], Any]
"""Answers a request in a thread: puts the chunks of a stream, or returns a body."""


async def respond(request: Request, route: str, handler: Handler) -> Response:
    """Answer a request to a route of `parsing.ROUTES`.

    Raises:
        InvalidRequest: Its content is not said to be JSON. (A page elsewhere could send a browser with another type.)
        InvariantRAGError: There is no place or no time for it, its client leaves, or as the handler raises it.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not kind.endswith(_JSON):
        raise InvalidRequest("expected the header `content-type: application/json`")
    job = Job(request, route, handler)
    first = await job.first()
    if first is None:
        return Response(job.result.result(), media_type="application/json")
    return EventSourceResponse(job.events(first))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
