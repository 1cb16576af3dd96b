"""One call of a model, in this process or on a server: what is asked, and where its answer is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

from invariant_rag.generation.answers import AnswerDelta, AnswerRequest, Reply
from invariant_rag.remote import RemoteModel
from llama_index.llms.invariant_rag.errors import no_swallowed_errors
from llama_index.llms.invariant_rag.reports import Reports

if TYPE_CHECKING:
    from invariant_rag import InvariantModel
    from invariant_rag.generation.batching import MicroBatcher

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """What one call asks for.

    Attributes:
        request: The request.
        sinks: The engines around, which report the answer.
        model: Returns the model of this process; or the model on a server.
        choices: What to ask a server for: method, ordering and overflow.
        batcher: Where to wait for concurrent calls; None: nowhere.
        batch_size: The most calls to decode together.
    """

    request: AnswerRequest
    sinks: Sequence[Reports]
    model: Callable[[], InvariantModel] | RemoteModel
    choices: Mapping[str, Any] = field(default_factory=dict)
    batcher: MicroBatcher | None = None
    batch_size: int = 8

    def reply(self, abandoned: Event | None = None) -> Reply:
        """Ask, and return the reply.

        Raises:
            AnswerFailed: The call failed with a `ValueError` or `TypeError`.
        """
        with no_swallowed_errors():
            if isinstance(self.model, RemoteModel):
                return self.model.reply(self.request, choices=self.choices)
            from invariant_rag.generation.answering import Answering  # models of a server need no torch

            answering = Answering(self.model(), self.request)
            return answering.reply(self.batcher, batch_size=self.batch_size, abandoned=abandoned)

    async def reply_in_thread(self) -> Reply:
        """Return what `reply` does; the event loop goes on, and cancelling the task ends the generation."""
        abandoned = Event()
        try:
            return await asyncio.to_thread(self.reply, abandoned)
        finally:
            abandoned.set()

    def stream(self) -> Generator[AnswerDelta | Reply, None, None]:
        """Yield the pieces of the answer, and then the reply. Nothing is loaded before it is read.

        Raises:
            AnswerFailed: As for `reply`.
        """
        with no_swallowed_errors():
            if isinstance(self.model, RemoteModel):
                yield from self.model.stream_reply(self.request, choices=self.choices)
                return
            from invariant_rag.generation.answering import Answering

            yield from Answering(self.model(), self.request).stream()


async def iterate_in_thread(pieces: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """Iterate over a generator in a worker thread; closing this iterator closes the generator."""
    loop, worker = asyncio.get_running_loop(), ThreadPoolExecutor(1, thread_name_prefix="invariant-rag")
    try:
        while (piece := await loop.run_in_executor(worker, next, pieces, None)) is not None:
            yield piece
    finally:
        worker.submit(pieces.close)  # runs after a step that is still in progress
        worker.shutdown(wait=False)
