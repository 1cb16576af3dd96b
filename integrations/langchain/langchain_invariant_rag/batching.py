"""One engine for many threads: prompts that wait at the same time can be decoded together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Any

from invariant_rag.engine import Generation, InvariantModel
from invariant_rag.segments import Prompt


def generate_batch(engine: InvariantModel, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> list[Generation]:
    """Return one generation for each prompt, decoded as one batch.

    A single prompt is not padded, so no bit of its logits depends on anything else.
    """
    if len(prompts) == 1:
        return [engine.generate(prompts[0], **options)]
    return engine.generate(prompts, **options)


@dataclass(eq=False)
class _Request:
    engine: InvariantModel
    prompt: Prompt
    options: Mapping[str, Any]
    identity: object
    answer: Future[Generation] = field(default_factory=Future)

    def goes_with(self, other: _Request) -> bool:
        return self.options == other.options and self.identity == other.identity


class MicroBatcher:
    """Decodes prompts of several threads together.

    It has no thread of its own, and nobody waits for a batch to fill. Whoever's turn it is runs its own prompt, and
    with it those that queued up meanwhile for the same engine with the same options.
    """

    def __init__(self) -> None:
        self._waiting: list[_Request] = []
        self._queue = Lock()
        self._turn = Lock()

    def generate(
        self, engine: InvariantModel, prompt: Prompt, options: Mapping[str, Any], *, identity: object, batch_size: int
    ) -> Generation:
        """Return what the engine generates for a prompt.

        Args:
            engine: What generates.
            prompt: The prompt.
            options: Keywords of `InvariantModel.generate`.
            identity: What is equal for engines that generate alike.
            batch_size: The most prompts to decode together.
        """
        mine = _Request(engine, prompt, options, identity)
        with self._queue:
            self._waiting.append(mine)
        with self._turn:
            if not mine.answer.done():
                _answer(self._taken(mine, batch_size))
        return mine.answer.result()

    def _taken(self, mine: _Request, batch_size: int) -> list[_Request]:
        """Take a request, and those that go with it, out of the queue."""
        with self._queue:
            others = (each for each in self._waiting if each is not mine and each.goes_with(mine))
            batch = [mine, *islice(others, batch_size - 1)]
            self._waiting = [each for each in self._waiting if each not in batch]
        return batch


def _answer(batch: Sequence[_Request]) -> None:
    first = batch[0]
    try:
        generations = generate_batch(first.engine, [each.prompt for each in batch], first.options)
    except BaseException as error:  # noqa: BLE001 - raised again by the thread that asked
        if len(batch) == 1:
            first.answer.set_exception(error)
            return
        for each in batch:  # one bad prompt is no reason for the others to fail
            _answer([each])
        return
    for request, generation in zip(batch, generations, strict=True):
        request.answer.set_result(generation)
