"""An engine in a process of its own: calls come in, and pieces of answers go out, all of them picklable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any

from invariant_rag.cancellation import cancellable
from invariant_rag.errors import InvariantRAGError
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.server.engines.building import build_engine, build_reranker
from invariant_rag.server.errors import ClientLeft, ReplicaFailed
from invariant_rag.server.logs import configure_logging
from invariant_rag.server.settings import EngineConfig, Settings

_logger = logging.getLogger("invariant_rag.server")
DESCRIBED = ("name", "toy", "context_window", "method", "methods", "orderings")
"""Attributes of an engine that others have to know."""


@dataclass(frozen=True)
class Done:
    """The end of a call: what it returned, or its error: Ray logs exceptions with messages, which may hold texts."""

    value: Any = None
    error: InvariantRAGError | None = None


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

    async def call(self, method: str, *arguments: Any) -> AsyncIterator[tuple[int, AnswerDelta] | Done]:
        """Call a method of the engine or of the reranker: yield the pieces of its answers, and then its end.

        Whoever stops listening abandons the call.

        Args:
            method: `answer`, `tokens`, `judge` or `sort_keys`.
            *arguments: Its arguments.
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
        return {name: getattr(self._engine, name) for name in DESCRIBED}


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
