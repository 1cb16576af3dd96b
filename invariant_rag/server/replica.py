"""An engine in a process of its own: calls come in, and pieces of answers go out, all of them picklable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, fields
from threading import Event
from typing import Any

from invariant_rag.cancellation import cancellable
from invariant_rag.errors import InvariantRAGError
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.server.engines.building import EngineConfig, build_engine, build_reranker
from invariant_rag.server.errors import ClientLeft, ReplicaFailed
from invariant_rag.server.logs import configure_logging
from invariant_rag.server.settings import Settings

_logger = logging.getLogger("invariant_rag.server")


@dataclass(frozen=True)
class Failed:
    """An error as a value. Ray logs exceptions with their messages, which may hold contents of a request."""

    error: InvariantRAGError


@dataclass(frozen=True)
class Done:
    """What a call returned."""

    value: Any


@dataclass(frozen=True)
class Description:
    """What others have to know of an engine; the attributes are those of `Engine`."""

    name: str
    toy: bool
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

    async def call(self, method: str, *arguments: Any) -> AsyncIterator[tuple[int, AnswerDelta] | Done | Failed]:
        """Call a method of the engine or of the reranker: yield the pieces of its answers, and then what it returns.

        Whoever stops listening abandons the call.

        Args:
            method: `answer`, `tokens`, `judge` or `sort_keys`.
            *arguments: Its arguments.
        """
        loop, abandoned = asyncio.get_running_loop(), Event()
        pieces: asyncio.Queue[tuple[int, AnswerDelta] | Done | Failed] = asyncio.Queue()

        def put(piece: tuple[int, AnswerDelta] | Done | Failed) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def work() -> Any:
            if method == "answer":
                (call,) = arguments
                return self._engine.answer(call, lambda index, delta: put((index, delta)), abandoned)
            with cancellable(abandoned):
                return getattr(self._reranker if method == "sort_keys" else self._engine, method)(*arguments)

        self._threads.submit(lambda: put(_caught(work)))
        try:
            while True:
                piece = await pieces.get()
                yield piece
                if isinstance(piece, Done | Failed):
                    return
        finally:
            abandoned.set()

    async def describe(self) -> Description:
        """Return what others have to know of the engine."""
        engine = self._engine
        return Description(**{each.name: getattr(engine, each.name) for each in fields(Description)})


def _caught(work: Callable[[], Any]) -> Done | Failed:
    try:
        return Done(work())
    except InvariantRAGError as error:
        return Failed(error)
    except CancelledError:
        return Failed(ClientLeft("nobody waits for the answer"))
    except Exception as error:
        _logger.error("fault", exc_info=error)
        return Failed(ReplicaFailed(f"{type(error).__name__} in a replica, whose log says where"))
