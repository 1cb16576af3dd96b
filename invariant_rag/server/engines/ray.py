"""An engine whose model is in replicas on Ray Serve, and the replica. Equal sets meet the one that has read them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from ray import serve
from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.exceptions import RayServeException

from invariant_rag.cancellation import cancellable, cancelled_event
from invariant_rag.errors import InvariantRAGError
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.orderings import Candidate
from invariant_rag.segments import SegmentSet
from invariant_rag.server.documents import set_key
from invariant_rag.server.engines.base import Call, Emit, Engine, EngineReply, JudgeCall, Reranker, wait_for
from invariant_rag.server.engines.building import build_engine, build_reranker
from invariant_rag.server.errors import ClientLeft, ReplicaFailed, ReplicaLost
from invariant_rag.server.logs import configure_logging
from invariant_rag.server.settings import EngineConfig, Settings

if TYPE_CHECKING:
    from invariant_rag.judge import Verdict

T = TypeVar("T")
_logger = logging.getLogger("invariant_rag.server")

_LOST = (RayActorError, ObjectLostError, RayServeException)
_DESCRIBED = ("name", "toy", "context_window", "method", "methods", "orderings")
"""Attributes of an engine that others have to know."""


class RayEngine(Engine):
    """The replicas of a Ray Serve deployment as an engine, and as a reranker.

    A request whose replica dies is asked again of another one, once, unless a piece of its answer has been given away.

    Args:
        handle: Handle of a deployment of `Replica`. The first replica is waited for.
        together: How many requests all replicas answer at a time.
    """

    def __init__(self, handle: Any, together: int) -> None:
        self.handle = handle
        self.together = together
        # A handle belongs to one event loop. This one serves all threads that wait for answers.
        self._loop = asyncio.new_event_loop()
        Thread(target=self._run, name="invariant-rag-replicas", daemon=True).start()
        for name, value in self._start(self._routed(None).describe.remote).result().items():
            setattr(self, name, value)

    def check_ready(self) -> None:
        """Check that a replica is up.

        Raises:
            ReplicaLost: None is.
        """
        application = serve.status().applications.get(self.handle.app_name)
        deployments = {} if application is None else application.deployments
        found = deployments.get(self.handle.deployment_name)
        if not any(state == "RUNNING" for state in (found.replica_states if found else ())):
            raise ReplicaLost("expected at least one replica, got none", retry_after=1)

    def close(self) -> None:
        """End the loop of this engine. The replicas go on."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def answer(self, call: Call, emit: Emit, abandoned: Event) -> EngineReply:
        """Answer a request; see `Engine.answer`.

        Raises:
            ReplicaLost: The replica died in the middle of a stream, or a second one did.
        """
        session = _session(call.choices.tenant, call.sets) if any(call.sets) else None
        found: EngineReply = self._wait_for(abandoned, "answer", call, session=session, emit=emit)
        return found

    def tokens(self, call: Call) -> list[int]:
        """Return the token ids of what the model reads."""
        found: list[int] = self._wait_for(cancelled_event(), "tokens", call)
        return found

    def judge(self, call: JudgeCall) -> Verdict:
        """Compare answers; see `Judge`."""
        answers = SegmentSet(call.request.options or call.request.answers or ())
        found: Verdict = self._wait_for(
            cancelled_event(), "judge", call, session=_session(call.choices.tenant, [answers])
        )
        return found

    def sort_keys(self, candidates: Sequence[Candidate], query: str) -> list[float]:
        """Return the sort keys of the replicas' reranker."""
        found: list[float] = self._wait_for(cancelled_event(), "sort_keys", candidates, query)
        return found

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _start(self, attempt: Callable[[], Awaitable[T]]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(_retried(attempt), self._loop)

    def _wait_for(
        self, abandoned: Event, method: str, *arguments: Any, session: str | None = None, emit: Emit | None = None
    ) -> Any:
        """Return what a method of a replica returns."""
        return wait_for(self._start(lambda: self._call(method, arguments, session, emit)), abandoned)

    async def _call(self, method: str, arguments: Sequence[Any], session: str | None, emit: Emit | None) -> Any:
        emitted = False
        pieces = self._routed(session, stream=True).call.remote(method, *arguments)
        try:
            async for piece in pieces:
                if isinstance(piece, Done):
                    if piece.error is not None:
                        raise piece.error
                    return piece.value
                if emit is not None:
                    emit(*piece)
                    emitted = True
        except asyncio.CancelledError:
            pieces.cancel()
            raise
        except _LOST as error:
            if emitted:
                raise ReplicaLost("the replica was lost in the middle of the answer") from error
            raise
        raise ReplicaLost("expected a reply at the end of an answer")

    def _routed(self, session: str | None, **options: Any) -> Any:
        return self.handle.options(**options, **({} if session is None else {"session_id": session}))


class RemoteReranker:
    """The reranker of the replicas; `local` is the same one in this process, where its model is never loaded."""

    def __init__(self, engine: RayEngine, local: Reranker) -> None:
        self.name, self.model_name = local.name, local.model_name
        self.probability, self.sort_keys = local.probability, engine.sort_keys


def _session(tenant: str, sets: Sequence[SegmentSet]) -> str:
    """Return the key by which a call is routed: equal sets of a tenant have equal keys in any order."""
    return hashlib.sha256(f"{tenant}\0{set_key(sets)}".encode()).hexdigest()[:32]


async def _retried(attempt: Callable[[], Awaitable[T]]) -> T:
    """Return the result of an attempt; if its replica is lost, that of a second one, or raise ReplicaLost."""
    try:
        return await attempt()
    except _LOST as error:
        _logger.warning("replica lost", extra={"fields": {"error": type(error).__name__}})
    try:
        return await attempt()
    except _LOST as error:
        raise ReplicaLost("two replicas were lost, one after the other", retry_after=1) from error


@dataclass(frozen=True)
class Done:
    """The end of a call: what it returned, or its error: Ray logs exceptions with messages, which may hold texts."""

    value: Any = None
    error: InvariantRAGError | None = None


class Replica:
    """Holds an engine and a reranker, in a process of its own: what goes in and out is picklable.

    Args:
        config: What the engine is made from.
        settings: Its tenants and limits. The keys are none: they stay where requests come in.
        reranker: As for `build_reranker`.
        places: How many calls run or wait here.
    """

    def __init__(self, config: EngineConfig, settings: Settings, reranker: str | None, places: int) -> None:
        configure_logging()
        self._engine = build_engine(config, settings)
        self._reranker = build_reranker(reranker)
        self._threads = ThreadPoolExecutor(places, "invariant-rag-call")

    async def call(self, method: str, *arguments: Any) -> AsyncIterator[tuple[int, AnswerDelta] | Done]:
        """Call `answer`, `tokens`, `judge` or `sort_keys`: yield the pieces of its answers, and then its end.

        Whoever stops listening abandons the call.
        """
        loop, abandoned = asyncio.get_running_loop(), Event()
        pieces: asyncio.Queue[tuple[int, AnswerDelta] | Done] = asyncio.Queue()

        def put(piece: tuple[int, AnswerDelta] | Done) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def work() -> Any:
            if method == "answer":
                (call,) = arguments
                return self._engine.answer(call, lambda index, delta: put((index, delta)), abandoned)
            with cancellable(abandoned):
                return getattr(self._reranker if method == "sort_keys" else self._engine, method)(*arguments)

        self._threads.submit(lambda: put(_done(work)))
        try:
            while True:
                piece = await pieces.get()
                yield piece
                if isinstance(piece, Done):
                    return
        finally:
            abandoned.set()

    async def describe(self) -> dict[str, Any]:
        """Return what others have to know of the engine."""
        return {name: getattr(self._engine, name) for name in _DESCRIBED}


def _done(work: Callable[[], Any]) -> Done:
    try:
        return Done(work())
    except InvariantRAGError as error:
        return Done(error=error)
    except CancelledError:
        return Done(error=ClientLeft("nobody waits for the answer"))
    except Exception as error:
        _logger.error("fault", exc_info=error)
        return Done(error=ReplicaFailed(f"{type(error).__name__} in a replica, whose log says where"))
