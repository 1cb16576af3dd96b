"""One request: parsed by a worker, answered in a thread, with a deadline, until its client leaves.

The event loop only passes bytes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any, TypeAlias

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from invariant_rag.cancellation import cancellable
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.orderings import Candidate, Relevance
from invariant_rag.orderings.monot5 import EMBEDDED_NAME, PUBLISHED
from invariant_rag.segments import plain_rendering
from invariant_rag.server import errors
from invariant_rag.server.admission import Admission
from invariant_rag.server.engines.base import Call, Engine
from invariant_rag.server.engines.building import build_reranker
from invariant_rag.server.middleware import log_fault
from invariant_rag.server.parsing import Parsed, parse, segment_of
from invariant_rag.server.replies import ChatReplies
from invariant_rag.server.schemas import RerankRequest
from invariant_rag.server.settings import Settings
from invariant_rag.server.telemetry import Metrics, StreamClock, Tracing
from invariant_rag.server.worker import PARSERS
from invariant_rag.shown import shown

_JSON = ("application/json", "+json")
_PARSING_SECONDS = 5.0
_BYTES_PER_SECOND = 1e6  # about how fast bodies are parsed: a short one is parsed before long ones
_SECONDS_PER_TOKEN = _SECONDS_PER_DOCUMENT = 0.05
TOY = (
    "The embedded MonoT5 ranks these documents: a toy that was trained on synthetic ones. "
    f"Start the server with `--reranker {PUBLISHED}`, or another checkpoint."
)
"""The warning about the embedded reranker, for clients and the console."""


class AppState:
    """What the routes of one application share."""

    def __init__(self, engine: Engine, settings: Settings, reranker: Relevance | None) -> None:
        self.engine, self.settings = engine, settings
        self.reranker = reranker or build_reranker(None)
        self.without_keys = settings.without_keys()  # for other processes
        self.metrics = Metrics(engine.caches.values())
        self.admission = Admission(settings, engine.together, PARSERS.count, self.metrics)
        self.executor = ThreadPoolExecutor(settings.max_requests, "invariant-rag-request")
        self.tracing = Tracing()
        self.started = int(time.time())

    def check_model(self, name: str | None, *allowed: str) -> None:
        """Raise UnknownModel for the name of a model that there is not; None is the one that there is."""
        known = allowed or (self.engine.name,)
        if name is not None and name not in known:
            raise errors.UnknownModel(f"expected the model {known[0]!r}, got {shown(name)}", param="model")

    def close(self) -> None:
        """Wait for what runs, and end."""
        self.executor.shutdown(wait=True, cancel_futures=True)
        self.engine.close()


class Job:
    """A request while it runs. Its place is given back when the thread ends, and not when its client leaves.

    Attributes:
        headers: What an engine behind this server gets of its head.
        noted: Its fields in the log.
        begun: When it came, in seconds of `time.monotonic`.
        abandoned: Once set, nobody waits for the answer any more.
        result: The body of the answer; empty after a stream.
    """

    parsed: Parsed

    def __init__(self, request: Request, route: str, handler: Handler) -> None:
        self.state: AppState = request.app.state.serving
        self._request, self._route, self._handler = request, route, handler
        own = request.scope["state"]
        self.noted, self.tenant, self._body = own["noted"], own["tenant"], own["body"]
        self.id = str(self.noted["request_id"])
        self.headers = {"x-request-id": self.id}
        for name in ("traceparent", "tracestate"):
            if name in request.headers:
                self.headers[name] = request.headers[name]
        self.state.admission.enter(self.tenant)
        self.begun, self.abandoned = time.monotonic(), Event()
        self._chunks: asyncio.Queue[str | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._deadline: float = self._loop.time() + self.state.settings.timeout
        self._late = f"expected an answer within {self.state.settings.timeout:g} seconds"
        self.result = self._loop.run_in_executor(self.state.executor, self._run)

    def put(self, chunk: Any) -> None:
        """Take a chunk of a stream, from any thread. A request is answered with a stream if there is one."""
        self._loop.call_soon_threadsafe(self._chunks.put_nowait, errors.encode(chunk))

    @contextmanager
    def turn(self, seconds: float) -> Iterator[None]:
        """Wait for the turn of a request that takes about so many seconds, and have it; see `FairQueue.turn`."""
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
            reply = self._handler(self)
            return b"" if reply is None else errors.encode(reply).encode()
        except CancelledError:
            raise errors.ClientLeft("nobody waits for the answer") from None
        except MemoryError:
            raise errors.TooLarge("expected a request that fits into memory") from None
        finally:
            self.state.admission.leave(self.tenant, time.monotonic() - self.begun)
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, None)

    def _parse(self) -> Parsed:
        """Return the body as a call. A process that can be stopped does the work."""
        work = self._route, self._body, self.state.without_keys, self.tenant
        with self.state.admission.parsing.turn(self.tenant, len(self._body) / _BYTES_PER_SECOND, self.abandoned):
            try:
                return PARSERS.call(_PARSING_SECONDS, self.abandoned, parse, *work)
            except TimeoutError:
                raise errors.TooLarge(f"expected a body that is parsed within {_PARSING_SECONDS:g} seconds") from None

    async def first(self) -> str | None:
        """Wait for the first chunk: errors before it are answered with their status. None: the answer is no stream."""
        getting = asyncio.ensure_future(self._chunks.get())
        gone = asyncio.ensure_future(_disconnected(self._request))
        try:
            left = self.state.settings.timeout  # of the time that it has, as it begins
            done, _ = await asyncio.wait({getting, gone}, timeout=left, return_when="FIRST_COMPLETED")
        except asyncio.CancelledError:  # some servers cancel a request whose client leaves
            self._abandon()
            raise
        finally:
            gone.cancel()
        if getting in done and self._loop.time() < self._deadline:  # a busy loop sees both at one time
            if getting.result() is None:
                await self.result
            return getting.result()
        getting.cancel()
        self._abandon()
        if gone in done:
            raise errors.ClientLeft("the client has closed the connection")
        raise errors.DeadlineExceeded(self._late)

    async def events(self, first: str) -> AsyncIterator[dict[str, str]]:
        """Yield server-sent events; the last is an error or `[DONE]`. Who stops listening abandons the work."""
        chunk: str | None = first
        try:
            while chunk is not None:
                yield {"data": chunk}
                try:
                    chunk = await asyncio.wait_for(self._chunks.get(), max(self._deadline - self._loop.time(), 0))
                except TimeoutError:
                    raise errors.DeadlineExceeded(self._late) from None
            await self.result
            yield {"data": "[DONE]"}
        except Exception as error:  # noqa: BLE001 - the status is sent already: the client is told in the stream
            self.noted["error"] = type(error).__name__
            if errors.status_of(error) == 500:
                log_fault(error, self.noted)
            yield {"data": errors.encode(errors.error_body(error))}
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Stop the work: nobody waits for it, nor for its error."""
        self.abandoned.set()
        self.result.add_done_callback(lambda result: result.cancelled() or result.exception())


Handler: TypeAlias = Callable[[Job], Any]
"""Answers a request in a thread: puts the chunks of a stream, or returns a body."""


def endpoint(route: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return what answers requests to a route of `parsing.ROUTES`."""

    async def post(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not kind.endswith(_JSON):  # a page elsewhere could send a browser with another type
            raise errors.InvalidRequest("expected the header `content-type: application/json`")
        job = Job(request, route, handler)
        first = await job.first()
        if first is None:
            return Response(job.result.result(), media_type="application/json")
        return EventSourceResponse(job.events(first))

    return post


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def tokenize(job: Job) -> Any:
    """Return the token ids of a text, or of a conversation as the model gets it."""
    (call,), engine = job.parsed.work, job.state.engine
    job.state.check_model(job.parsed.model)
    with job.turn(0.0), cancellable(job.abandoned):
        tokens = engine.tokens(call)
    return {"count": len(tokens), "max_model_len": engine.context_window, "tokens": tokens}


def rank(job: Job, version: str) -> Any:
    """Rank documents by their relevance to a query, best first, for a version of Cohere's API.

    Scores are bit-equal for every order; of equal ones, the content decides.
    """
    reranker = job.state.reranker
    request: RerankRequest = job.parsed.work
    job.state.check_model(job.parsed.model, reranker.model_name, reranker.name)
    candidates = [Candidate(each, (), plain_rendering(each)) for each in map(segment_of, request.documents)]
    with job.turn(len(candidates) * _SECONDS_PER_DOCUMENT), cancellable(job.abandoned):
        keys = reranker.sort_keys(candidates, request.query)
    ranking = sorted(range(len(keys)), key=lambda index: (keys[index], candidates[index].tie_breaker))
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": reranker.probability(-keys[index])} for index in ranking[: request.top_n]
    ]
    for each in results if request.return_documents else ():
        each["document"] = {"text": candidates[each["index"]].segment.text}
    meta: dict[str, Any] = {"api_version": {"version": version}}
    meta |= {"warnings": [TOY]} if reranker.model_name == EMBEDDED_NAME else {}
    return {"id": job.id, "object": "list", "model": reranker.model_name, "results": results, "meta": meta}


def judge(job: Job) -> Any:
    """Say which answer is the best, or which option is right."""
    job.state.check_model(job.parsed.model)
    with job.turn((job.parsed.work.request.max_tokens or 0) * _SECONDS_PER_TOKEN), cancellable(job.abandoned):
        verdict = job.state.engine.judge(job.parsed.work)
    names = ("winner", "best", "ranking", "probabilities", "labels", "explanation")
    fields = {name: getattr(verdict, name) for name in names}
    return {"id": job.id, "object": "judgement", "model": job.state.engine.name, **fields}


def answer(job: Job, kind: type[ChatReplies] = ChatReplies) -> Any:
    """Answer a conversation, or continue texts: return a whole reply, or put the chunks of a stream.

    Listing the documents in another order changes no bit of the answer.
    """
    job.state.check_model(job.parsed.model)
    replies = kind(job.id, job.state.engine.name)
    calls: list[Call] = list(map(partial(replace, headers=job.headers), job.parsed.work))
    request = calls[0].request  # but for the question, that of all
    waiting = list(range(len(calls) * request.n))  # answers whose first chunk is not sent
    clock = StreamClock(job.state.metrics, job.begun)

    def begin() -> None:
        for index in waiting:
            for chunk in replies.begin(index):
                job.put(chunk)
        waiting.clear()

    def emit(index: int, delta: AnswerDelta) -> None:
        clock.tick(index)
        begin()
        job.put(replies.delta(index, delta))

    with job.turn(len(waiting) * (request.max_new_tokens or 1) * _SECONDS_PER_TOKEN):
        answered = job.state.engine.answer_all(calls, emit, job.abandoned)
    for reply in answered:
        job.state.metrics.count_tokens(reply.usage)
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            job.noted[name] = job.noted.get(name, 0) + getattr(reply.usage, name)
    job.noted["set_key"] = answered[0].ledger.get("set_key")
    if not calls[0].stream:
        return replies.whole(answered)
    begin()
    ends = [(choice, reply) for reply in answered for choice in reply.choices]
    for index, (choice, reply) in enumerate(ends):
        job.put(replies.end(index, choice, reply))
    if job.parsed.include_usage:
        job.put(replies.usage(answered))
    return None
