"""An engine in a process of its own: calls come in, and pieces of answers go out, all of them picklable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from invariant_rag.errors import InvariantRAGError
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.orderings import Candidate
from invariant_rag.server.engines.base import Call, JudgeCall, Reply
from invariant_rag.server.engines.building import EngineConfig, build_engine, build_reranker
from invariant_rag.server.errors import ClientLeft, ReplicaFailed
from invariant_rag.server.serving import configure_logging
from invariant_rag.server.settings import Settings

if TYPE_CHECKING:
    from invariant_rag.judge import Verdict

T = TypeVar("T")
_logger = logging.getLogger("invariant_rag.server")


@dataclass(frozen=True)
class Failed:
    """An error as a value. Ray logs exceptions with their messages, which may hold contents of a request."""

    error: InvariantRAGError


@dataclass(frozen=True)
class Description:
    """What others have to know of an engine; the attributes are those of `Engine`."""

    name: str
    context_window: int | None
    method: str
    methods: frozenset[str]
    orderings: Mapping[str, frozenset[str]]


class Replica:
    """Holds an engine and a reranker.

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

    async def answer(self, call: Call) -> AsyncIterator[tuple[int, AnswerDelta] | Reply | Failed]:
        """Yield the pieces of the answers with their indices, and then the reply.

        Whoever stops listening abandons the call.
        """
        loop, abandoned = asyncio.get_running_loop(), Event()
        pieces: asyncio.Queue[tuple[int, AnswerDelta] | Reply | Failed] = asyncio.Queue()

        def put(piece: tuple[int, AnswerDelta] | Reply | Failed) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def answer() -> None:
            put(_caught(lambda: self._engine.answer(call, lambda index, delta: put((index, delta)), abandoned)))

        self._threads.submit(answer)
        try:
            while True:
                piece = await pieces.get()
                yield piece
                if isinstance(piece, Reply | Failed):
                    return
        finally:
            abandoned.set()

    async def tokens(self, call: Call) -> list[int] | Failed:
        """Return the token ids of what the model reads."""
        return await self._run(lambda: self._engine.tokens(call))

    async def judge(self, call: JudgeCall) -> Verdict | Failed:
        """Compare answers."""
        return await self._run(lambda: self._engine.judge(call))

    async def sort_keys(self, candidates: Sequence[Candidate], query: str) -> list[float] | Failed:
        """Return the reranker's sort keys of documents."""
        return await self._run(lambda: self._reranker.sort_keys(candidates, query))

    async def describe(self) -> Description:
        """Return what others have to know of the engine."""
        engine = self._engine
        return Description(engine.name, engine.context_window, engine.method, engine.methods, engine.orderings)

    async def _run(self, work: Callable[[], T]) -> T | Failed:
        return await asyncio.get_running_loop().run_in_executor(self._threads, _caught, work)


def _caught(work: Callable[[], T]) -> T | Failed:
    try:
        return work()
    except InvariantRAGError as error:
        return Failed(error)
    except CancelledError:
        return Failed(ClientLeft("nobody waits for the answer"))
    except Exception as error:
        _logger.error("fault", exc_info=error)
        return Failed(ReplicaFailed(f"{type(error).__name__} in a replica, whose log says where"))
