"""One model for many threads: prompts that wait at the same time are decoded together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Any

from invariant_rag.errors import InvalidChoice
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import resolve_option
from invariant_rag.generation.outputs import Generation
from invariant_rag.segments import Prompt


@dataclass(eq=False)
class _Request:
    lm: InvariantModel
    prompt: Prompt
    options: Mapping[str, Any]
    identity: object
    answer: Future[Generation] = field(default_factory=Future)

    def goes_with(self, other: _Request) -> bool:
        return not self.sampled and self.options == other.options and self.identity == other.identity

    @property
    def sampled(self) -> bool:
        """Whether chance decides: what a seed gives would depend on the other rows of a batch."""
        return bool(resolve_option(self.options, "do_sample"))


class MicroBatcher:
    """Decodes prompts of several threads together.

    It has no thread of its own, and nobody waits for a batch to fill. Whoever's turn it is runs its own prompt, and
    with it those that queued up meanwhile for the same model with the same options. An answer in a batch equals that
    of the prompt alone up to rounding; prompts whose answers are sampled run alone. A copy in another process begins
    with an empty queue.

    >>> batcher = MicroBatcher()
    >>> with ThreadPoolExecutor(8) as pool:  # doctest: +SKIP
    ...     answers = list(pool.map(lambda prompt: batcher.generate(lm, prompt, {"max_new_tokens": 32}), prompts))
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return MicroBatcher, ()

    def __init__(self) -> None:
        self._waiting: list[_Request] = []
        self._queue = Lock()
        self._turn = Lock()

    def generate(
        self,
        lm: InvariantModel,
        prompt: Prompt,
        options: Mapping[str, Any] | None = None,
        *,
        identity: object = None,
        batch_size: int = 8,
    ) -> Generation:
        """Return what the model generates for a prompt.

        Args:
            lm: The model.
            prompt: The prompt.
            options: Keywords of `InvariantModel.generate`.
            identity: What is equal for models that generate alike. None: a model goes with itself alone.
            batch_size: The most prompts to decode together.

        Raises:
            InvalidChoice: `batch_size` is below 1, or more than one answer is wanted.
        """
        if batch_size < 1:
            raise InvalidChoice(f"batch_size: expected at least 1, got {batch_size}")
        answers = resolve_option(options or {}, "num_return_sequences", lm.model.generation_config) or 1
        if answers > 1:
            raise InvalidChoice(
                f"num_return_sequences: expected 1, got {answers}",
                hint="Ask several times, or call generate of the model itself.",
            )
        mine = _Request(lm, prompt, options or {}, id(lm) if identity is None else identity)
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
        generations = first.lm.generate([each.prompt for each in batch], **first.options)
    except BaseException as error:  # noqa: BLE001 - raised again by the threads that asked
        if len(batch) == 1 or not isinstance(error, Exception):
            for each in batch:
                each.answer.set_exception(error)
            return
        for each in batch:  # one bad prompt is no reason for the others to fail
            _answer([each])
        return
    for request, generation in zip(batch, generations, strict=True):
        request.answer.set_result(generation)
