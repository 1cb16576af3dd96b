"""Micro-batching: prompts that several threads submit at the same time are decoded as one batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import filterfalse
from operator import attrgetter
from threading import Event, Lock
from time import monotonic
from typing import Any, TypeAlias
from weakref import finalize

import torch

from invariant_rag.checks import MOST_CALLS, check_items, check_kind, check_number
from invariant_rag.errors import InvalidChoice, InvalidOption
from invariant_rag.generation.decode import samples_rows
from invariant_rag.generation.digest import choices_digest
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import check_options, resolve_max_new_tokens, resolve_option
from invariant_rag.generation.outputs import Generation
from invariant_rag.generation.prefill import after_prefill
from invariant_rag.generation.streaming import StopOnEvent, TextQueueStreamer, TextStream
from invariant_rag.segments import Prompt

Call: TypeAlias = tuple[Prompt, Mapping[str, Any]]  # a prompt, with keywords of `InvariantModel.generate`
_SHORT = 4  # a request is short beside one of so many times its tokens
_USED_HERE = {"generation_config", "stopping_criteria"}
_POLL_SECONDS = 0.02  # how often a waiting thread checks whether another one has generated for it


@dataclass(eq=False)
class _Request:
    """A prompt to generate for, and a future for its result."""

    lm: InvariantModel
    prompt: Prompt
    options: Mapping[str, Any]
    events: tuple[Event, ...] = ()
    streamer: TextQueueStreamer | None = None
    result: Future[Generation] = field(default_factory=Future)
    new_tokens: int = field(init=False)  # the most tokens of its answer

    def __post_init__(self) -> None:
        model = check_kind("lm", self.lm, InvariantModel).model
        if not _USED_HERE.isdisjoint(self.options):  # `generate` refuses the rest
            check_options(self.options, model)
        self.new_tokens = resolve_max_new_tokens(self.options.get("max_new_tokens"), self.options)
        sequences = resolve_option(self.options, "num_return_sequences", model.generation_config)
        if isinstance(sequences, int) and sequences > 1:
            hint = "Call generate several times, or call generate of the model instead of the batcher."
            raise InvalidChoice(f"num_return_sequences: expected 1, got {sequences}", hint=hint)

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for the result any more: one of the events is set."""
        return any(map(Event.is_set, self.events))

    def goes_before(self, running: _Request) -> bool:
        """Return whether it may go before a running request: 4 times shorter, or of another tenant and no longer."""
        return self.new_tokens * (_SHORT if self.lm.cache is running.lm.cache else 1) <= running.new_tokens

    def can_batch_with(self, other: _Request) -> bool:
        """Return whether both requests can be rows of one batch: same weights, choices, options, and tenant's cache."""
        lm, its = self.lm, other.lm
        if lm.model is not its.model or lm.tokenizer is not its.tokenizer or lm.cache is not its.cache:
            return False
        in_rows = samples_rows(self.options, lm.model)
        if lm.prefiller.one_by_one or (resolve_option(self.options, "do_sample") and not in_rows):
            return False
        own = {"seed": None} if in_rows else {}  # of each row
        try:
            is_alike = {**self.options, **own} == {**other.options, **own}
        except (RuntimeError, ValueError):  # of tensors and arrays
            return False
        return is_alike and (lm is its or choices_digest(lm) == choices_digest(its))

    def run_alone(self) -> Generation:
        """Generate without a queue."""
        stops = [*(self.options.get("stopping_criteria") or ()), *map(StopOnEvent, self.events)]
        own = {"streamer": self.streamer} if self.streamer else {}
        return self.lm.generate(self.prompt, **{**self.options, "stopping_criteria": stops, **own})


class MicroBatcher:
    """A queue that batches concurrent `generate` calls of several threads.

    No call waits for a batch to fill: while one thread generates, other calls queue up; the next thread then generates
    for its own prompt and for the waiting calls with the same weights, choices and options. A request that is short
    beside a batch, or another tenant's, is generated before it, or between two of its forward passes: of its prefill,
    too. In a batch, an answer equals that of a single call up to rounding; sampled ones have seeds of their own. A
    model whose engine batches calls, such as vLLM, is called at once.

    >>> batcher = MicroBatcher()
    >>> with ThreadPoolExecutor(8) as pool:  # doctest: +SKIP
    ...     answers = list(pool.map(lambda prompt: batcher.generate(lm, prompt, {"max_new_tokens": 32}), prompts))
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return MicroBatcher, ()

    def __init__(self) -> None:
        self.waiting: list[_Request] = []
        self._waiting_lock = Lock()
        self._generate_lock = Lock()

    def generate(
        self,
        lm: InvariantModel,
        prompt: Prompt,
        options: Mapping[str, Any] | None = None,
        *,
        batch_size: int = 8,
        abandoned: Event | None = None,
    ) -> Generation:
        """Generate for a prompt, possibly in a batch with waiting prompts of other threads.

        Options are keywords of `InvariantModel.generate`. A batch has at most `batch_size` prompts. Once `abandoned` is
        set, nobody waits for the answer any more: its row ends, and a waiting prompt is not begun.

        Raises:
            CancelledError: It was abandoned.
            InvalidChoice: `batch_size` is below 1, or `num_return_sequences` is above 1.
        """
        keywords = check_kind("options", {} if options is None else options, dict, error=InvalidOption)
        check_items("options", keywords, str, error=InvalidOption)
        abandoned = None if abandoned is None else check_kind("abandoned", abandoned, Event)
        return self.generate_all(lm, [(prompt, keywords)], batch_size=batch_size, abandoned=abandoned)[0]

    def generate_all(
        self, lm: InvariantModel, calls: Iterable[Call], *, batch_size: int = 8, abandoned: Event | None = None
    ) -> list[Generation]:
        """Generate for several prompts; see `generate`."""
        events = () if abandoned is None else (abandoned,)
        requests = self._add([_Request(lm, prompt, options, events) for prompt, options in calls], batch_size)
        return self._results(requests, batch_size)

    def stream(
        self,
        lm: InvariantModel,
        prompt: Prompt,
        options: Mapping[str, Any] | None = None,
        *,
        batch_size: int = 8,
        abandoned: Event | None = None,
    ) -> TextStream:
        """Stream the text of a prompt, possibly in a batch with waiting prompts of other threads; see `generate`.

        `keep_tokens` is an option, too, as for `InvariantModel.stream`. The prompt waits from now on: several streams
        that begin before one is consumed are decoded together. It is the stream that raises CancelledError.
        """
        rest, closed = dict(options or {}), Event()
        streamer = TextQueueStreamer(lm.tokenizer, rest.pop("keep_tokens", None))
        check_options(rest, lm.model)
        events = (closed,) if abandoned is None else (closed, check_kind("abandoned", abandoned, Event))
        requests = self._add([_Request(lm, prompt, rest, events, streamer)], batch_size)
        check = lm.prefiller.shared.lock.check_new_thread
        stream = TextStream(lambda: self._results(requests, batch_size)[0], streamer, closed, check)
        finalize(stream, closed.set)  # nobody waits for a stream that is not there
        return stream

    def _add(self, requests: Sequence[_Request], batch_size: int) -> Sequence[_Request]:
        """Let requests wait, together."""
        check_number("batch_size", batch_size, 1, MOST_CALLS)
        with self._waiting_lock:
            self.waiting += filterfalse(attrgetter("lm.batches_calls"), requests)
        return requests

    def _results(self, requests: Sequence[_Request], batch_size: int) -> list[Generation]:
        """Return the answers to requests that wait; CancelledError if one was abandoned."""
        generations = list[Generation]()
        if requests and requests[0].lm.batches_calls:
            with ThreadPoolExecutor(len(requests)) as pool:
                generations += (pool.map if len(requests) > 1 else map)(_Request.run_alone, requests)
        for each in requests[len(generations) :]:
            while not each.result.done():
                if not self._generate_lock.acquire(timeout=_POLL_SECONDS):  # it may have run between others
                    continue
                try:
                    if not each.result.done():
                        _run_batch(self._pop_batch(each, batch_size), self, batch_size)
                finally:
                    self._generate_lock.release()
            generations.append(each.result.result())
        if any(map(attrgetter("abandoned"), requests)):
            raise CancelledError
        return generations

    def _pop_batch(self, request: _Request, batch_size: int) -> list[_Request]:
        """Remove a request and others that can be batched with it from the queue, and all that were abandoned."""
        batch, later = [] if request.abandoned else [request], []
        with self._waiting_lock:
            for each in self.waiting:
                if each in batch:
                    continue
                if each.abandoned:
                    each.result.set_exception(CancelledError())
                elif 0 < len(batch) < batch_size and each.can_batch_with(request):
                    batch.append(each)
                else:
                    later.append(each)
            self.waiting = later
        return batch


def _run_batch(batch: Sequence[_Request], batcher: MicroBatcher | None = None, batch_size: int = 1) -> None:
    """Generate for a batch and set the results; if the batch fails, generate for each request separately.

    With a batcher, those that wait there and need not do so are generated for before it, and between its passes.
    """
    if not batch:
        return
    first, streamers = batch[0], list(map(attrgetter("streamer"), batch))
    turn = _BetweenPasses(batch, batcher, batch_size)
    options = {**first.options, "stopping_criteria": [*(first.options.get("stopping_criteria") or ()), turn]}
    if any(streamers):
        options["streamers"] = streamers
    if len(batch) > 1 and samples_rows(first.options, first.lm.model):
        options["seed"] = [each.options.get("seed") for each in batch]
    token = after_prefill.set(turn.run_others)
    try:
        turn.run_others()
        generations = first.lm.generate(list(map(attrgetter("prompt"), batch)), **options)
    except BaseException as error:  # noqa: BLE001 - raised again by the waiting threads
        if len(batch) == 1 or not isinstance(error, Exception) or any(each and each.began for each in streamers):
            for each in batch:
                each.result.set_exception(error)
            return
        for each in batch:  # only the requests that cause the error fail
            _run_batch([each], batcher, batch_size)
        return
    finally:
        after_prefill.reset(token)
    exact = first.lm.deterministic or len(batch) == 1 or all(each.prompt is first.prompt for each in batch)
    for request, generation in zip(batch, generations, strict=True):
        request.result.set_result(generation if exact else replace(generation, bitwise=False))


class _BetweenPasses(StopOnEvent):
    """Ends rows that were abandoned, and lets others generate between two forward passes."""

    def __init__(self, batch: Sequence[_Request], batcher: MicroBatcher | None, batch_size: int) -> None:
        self._batch, self._batcher, self._batch_size, self._ours_until = batch, batcher, batch_size, 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return whether each row stops `[B]`; beams all stop together."""
        if self._batcher is not None and self._batcher.waiting:
            self.run_others()
        stops = torch.tensor(list(map(attrgetter("abandoned"), self._batch)), device=input_ids.device)
        return stops if len(stops) == len(input_ids) else stops.all().expand(len(input_ids))

    def run_others(self) -> None:
        """Generate for others who need not wait, unless they had the model for longer than the batch since."""
        start, batcher = monotonic(), self._batcher
        if batcher is None or not batcher.waiting or start < self._ours_until:
            return
        urgent = [each for each in batcher.waiting if not each.abandoned and each.goes_before(self._batch[0])]
        if urgent:
            with torch.random.fork_rng():  # the batch may draw from the global state, too
                _run_batch(batcher._pop_batch(urgent[0], self._batch_size))
            self._ours_until = 2 * monotonic() - start  # nobody else for as long as that took, so neither side starves
