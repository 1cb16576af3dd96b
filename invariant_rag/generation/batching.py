"""Micro-batching: prompts that several threads submit at the same time are decoded as one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Any

from invariant_rag.checks import MOST_CALLS, check_kind, check_number
from invariant_rag.errors import InvalidChoice, InvalidOption
from invariant_rag.generation.identity import identity
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.option_checks import check_options
from invariant_rag.generation.options import resolve_option
from invariant_rag.generation.outputs import Generation
from invariant_rag.segments import Prompt


@dataclass(eq=False)
class _Request:
    """A prompt to generate for, and a future for its result."""

    lm: InvariantModel
    prompt: Prompt
    options: Mapping[str, Any]
    identity: str
    result: Future[Generation] = field(default_factory=Future)

    def can_batch_with(self, other: _Request) -> bool:
        """Return whether both requests can be rows of one batch.

        Sampled requests cannot: the result of a seed would depend on the other rows. Nor can those of a deterministic
        model.
        """
        return (
            not (resolve_option(self.options, "do_sample") or self.lm.deterministic)
            and self.options == other.options
            and self.lm.model is other.lm.model
            and self.identity == other.identity
        )


class MicroBatcher:
    """A queue that batches concurrent `generate` calls of several threads.

    There is no worker thread, and no call waits for a batch to fill: while one thread generates, other calls queue up;
    the next thread then generates for its own prompt and for the waiting calls with the same weights, choices and
    options. In a batch, an answer equals that of a single call up to rounding. Prompts with sampling are not batched.
    Pickling gives a batcher with an empty queue.

    >>> batcher = MicroBatcher()
    >>> with ThreadPoolExecutor(8) as pool:  # doctest: +SKIP
    ...     answers = list(pool.map(lambda prompt: batcher.generate(lm, prompt, {"max_new_tokens": 32}), prompts))
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return MicroBatcher, ()

    def __init__(self) -> None:
        self._waiting: list[_Request] = []
        self._waiting_lock = Lock()
        self._generate_lock = Lock()

    def generate(
        self,
        lm: InvariantModel,
        prompt: Prompt,
        options: Mapping[str, Any] | None = None,
        *,
        batch_size: int = 8,
    ) -> Generation:
        """Generate for a prompt, possibly in a batch with waiting prompts of other threads.

        Args:
            lm: The model.
            prompt: The prompt.
            options: Keyword arguments of `InvariantModel.generate`.
            batch_size: Maximum number of prompts in a batch.

        Raises:
            InvalidChoice: `batch_size` is below 1, or `num_return_sequences` is above 1.
        """
        check_kind("lm", lm, InvariantModel)
        check_number("batch_size", batch_size, 1, MOST_CALLS)
        given: Mapping[str, Any] = {} if options is None else check_kind("options", options, dict, error=InvalidOption)
        check_options(given, lm.model)
        sequences = resolve_option(given, "num_return_sequences", lm.model.generation_config) or 1
        if sequences > 1:
            raise InvalidChoice(
                f"num_return_sequences: expected 1, got {sequences}",
                hint="Call generate several times, or call generate of the model instead of the batcher.",
            )
        request = _Request(lm, prompt, given, identity(lm))
        with self._waiting_lock:
            self._waiting.append(request)
        with self._generate_lock:
            if not request.result.done():
                _run_batch(self._pop_batch(request, batch_size))
        return request.result.result()

    def _pop_batch(self, request: _Request, batch_size: int) -> list[_Request]:
        """Remove a request and others that can be batched with it from the queue."""
        with self._waiting_lock:
            others = (each for each in self._waiting if each is not request and each.can_batch_with(request))
            batch = [request, *islice(others, batch_size - 1)]
            self._waiting = [each for each in self._waiting if each not in batch]
        return batch


def _run_batch(batch: Sequence[_Request]) -> None:
    """Generate for a batch and set the results; if the batch fails, generate for each request separately."""
    first = batch[0]
    try:
        generations = first.lm.generate([each.prompt for each in batch], **first.options)
    except BaseException as error:  # noqa: BLE001 - raised again by the waiting threads
        if len(batch) == 1 or not isinstance(error, Exception):
            for each in batch:
                each.result.set_exception(error)
            return
        for each in batch:  # only the requests that cause the error fail
            _run_batch([each])
        return
    for request, generation in zip(batch, generations, strict=True):
        request.result.set_result(generation)
