"""A request to a model of this process, with the methods that a request to a server has."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from invariant_rag import InvariantModel
from invariant_rag.generation.answers import AnswerDelta
from llama_index.llms.invariant_rag.answering import Answer, MicroBatches, Request, answer, answer_in_thread, stream


@dataclass(frozen=True)
class LocalRequest:
    """What one call asks a model for.

    Attributes:
        load: Returns the model.
        request: What is asked for.
        batches: Where to wait for concurrent calls; None: nowhere.
    """

    load: Callable[[], InvariantModel]
    request: Request
    batches: MicroBatches | None = None

    def answer(self) -> Answer:
        """Ask, and return the answer; see `answering.answer`."""
        return answer(self.load, self.request, self.batches)

    async def answer_in_thread(self) -> Answer:
        """Return what `answer` does; the event loop goes on meanwhile."""
        return await answer_in_thread(self.load, self.request, self.batches)

    def stream(self) -> Generator[AnswerDelta | Answer, None, None]:
        """Yield the pieces of `answer` as they come, and then the whole answer."""
        return stream(self.load, self.request)
