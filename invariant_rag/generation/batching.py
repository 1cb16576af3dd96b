"""Micro-batching: prompts that several threads submit at the same time are decoded as one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from threading import Event, Lock
from time import monotonic
from typing import Any
from weakref import finalize

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from invariant_rag.checks import MOST_CALLS, check_items, check_kind, check_number
from invariant_rag.errors import InvalidChoice, InvalidOption
from invariant_rag.generation.decode import samples_rows
from invariant_rag.generation.digest import choices_digest
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import as_ids, check_options, resolve_max_new_tokens, resolve_option
from invariant_rag.generation.outputs import Generation
from invariant_rag.generation.prefill import after_prefill
from invariant_rag.generation.streaming import StopOnEvent, TextQueueStreamer, TextStream, replay
from invariant_rag.segments import Prompt

_SHORT = 4  # a request is short beside one of so many times its tokens
_USED_HERE = {"eos_token_id", "generation_config", "stopping_criteria"}
_POLL_SECONDS = 0.02  # how often a waiting thread checks whether another one has generated for it


@dataclass(eq=False)
class _Request:
    """A prompt to generate for, and a future for its result."""

    lm: InvariantModel
    prompt: Prompt
    options: Mapping[str, Any]
    events: tuple[Event, ...] = ()
    streamer: BaseStreamer | None = None
    result: Future[Generation] = field(default_factory=Future)
    started: bool = False  # whether the streamer has got a token
    new_tokens: int = field(init=False)  # the most tokens of its answer

    def __post_init__(self) -> None:
        model = check_kind("lm", self.lm, InvariantModel).model
        if not _USED_HERE.isdisjoint(self.options):  # what else is wrong, `generate` says
            check_options(self.options, model)
        self.new_tokens = resolve_max_new_tokens(self.options.get("max_new_tokens"), self.options)
        sequences = resolve_option(self.options, "num_return_sequences", model.generation_config)
        if isinstance(sequences, int) and sequences > 1:
            raise InvalidChoice(
                f"num_return_sequences: expected 1, got {sequences}",
                hint="Call generate several times, or call generate of the model instead of the batcher.",
            )

    @cached_property
    def samples_rows(self) -> bool:
        """Whether it is sampled in a way in which rows of a batch can have generators of their own."""
        return samples_rows(self.options, self.lm.model)

    @property
    def shared_options(self) -> dict[str, Any]:
        """The options that requests of a batch have in common: all but the seed of a sampled one."""
        return {name: value for name, value in self.options.items() if name != "seed" or not self.samples_rows}

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for the result any more: one of the events is set."""
        return any(map(Event.is_set, self.events))

    def goes_before(self, running: _Request) -> bool:
        """Return whether it need not wait for a running one: it is short beside it, or another tenant's and no longer.

        Tenants have different caches.
        """
        own, its = self.new_tokens, running.new_tokens
        return _SHORT * own <= its or (self.lm.cache is not running.lm.cache and own <= its)

    def can_batch_with(self, other: _Request) -> bool:
        """Return whether both requests can be rows of one batch: same weights, choices, options, and tenant's cache."""
        lm, its = self.lm, other.lm
        return (
            (self.samples_rows or not resolve_option(self.options, "do_sample"))
            and not lm.prefiller.one_by_one
            and _are_equal(self.shared_options, other.shared_options)
            and (lm.model is its.model and lm.tokenizer is its.tokenizer and lm.cache is its.cache)
            and (lm is its or choices_digest(lm) == choices_digest(its))
        )

    def run_alone(self) -> Generation:
        """Generate without a queue; CancelledError if it was abandoned."""
        options = dict(self.options)
        if self.events:
            stops = map(StopOnEvent, self.events)
            options["stopping_criteria"] = [*(options.get("stopping_criteria") or ()), *stops]
        if self.streamer is not None:
            options["streamer"] = self.streamer
        generation = self.lm.generate(self.prompt, **options)
        if self.abandoned:
            raise CancelledError
        return generation


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
        abandoned: Event | None = None,
    ) -> Generation:
        """Generate for a prompt, possibly in a batch with waiting prompts of other threads.

        Args:
            lm: The model.
            prompt: The prompt.
            options: Keyword arguments of `InvariantModel.generate`.
            batch_size: Maximum number of prompts in a batch.
            abandoned: Once set, nobody waits for the answer any more: its row ends, and a waiting prompt is not begun.

        Raises:
            CancelledError: It was abandoned.
            InvalidChoice: `batch_size` is below 1, or `num_return_sequences` is above 1.
        """
        given = check_kind("options", {} if options is None else options, dict, error=InvalidOption)
        check_items("options", given, str, error=InvalidOption)
        return self.generate_all(lm, [(prompt, given)], batch_size=batch_size, abandoned=abandoned)[0]

    def generate_all(
        self,
        lm: InvariantModel,
        calls: Iterable[tuple[Prompt, Mapping[str, Any]]],
        *,
        batch_size: int = 8,
        abandoned: Event | None = None,
    ) -> list[Generation]:
        """Generate for several prompts, each with keywords of `InvariantModel.generate`; see `generate`."""
        ends = _events(abandoned)
        requests = self._add([_Request(lm, prompt, options, ends) for prompt, options in calls], batch_size)
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
        that begin before one is read are decoded together. It is the stream that raises CancelledError.
        """
        rest, closed = dict(options or {}), Event()
        streamer = TextQueueStreamer(lm.tokenizer, rest.pop("keep_tokens", None))
        check_options(rest, lm.model)
        requests = self._add([_Request(lm, prompt, rest, (closed, *_events(abandoned)), streamer)], batch_size)

        def generate(**_: Any) -> Generation:  # whatever says that the stream is closed ends its row: the event does
            return self._results(requests, batch_size)[0]

        stream = TextStream(generate, streamer, {}, check=lm.prefiller.shared.lock.check_new_thread, closed=closed)
        finalize(stream, closed.set)  # nobody waits for a stream that is not there
        return stream

    def _add(self, requests: Sequence[_Request], batch_size: int) -> Sequence[_Request]:
        """Let requests wait, together."""
        check_number("batch_size", batch_size, 1, MOST_CALLS)
        with self._waiting_lock:
            self._waiting += [each for each in requests if not each.lm.batches_calls]
        return requests

    def _results(self, requests: Sequence[_Request], batch_size: int) -> list[Generation]:
        """Return the answers to requests that wait; CancelledError if one was abandoned."""
        if requests and requests[0].lm.batches_calls:
            with ThreadPoolExecutor(len(requests)) as pool:
                return list((pool.map if len(requests) > 1 else map)(_Request.run_alone, requests))
        for each in requests:
            while not each.result.done():
                if not self._generate_lock.acquire(timeout=_POLL_SECONDS):  # it may have run between others
                    continue
                try:
                    if not each.result.done():
                        _run_batch(self._pop_batch(each, batch_size), partial(self._run_between, batch_size))
                finally:
                    self._generate_lock.release()
        generations = [each.result.result() for each in requests]
        if any(each.abandoned for each in requests):
            raise CancelledError
        return generations

    def _run_between(self, batch_size: int, running: _Request) -> bool:
        """Generate for requests that need not wait for the end of a batch, between its passes; say if there were any.

        They run in the thread that holds the model, inside of a stopping criterion, or of a prefill.
        """
        if not self._waiting:
            return False
        with self._waiting_lock:
            waiting = [each for each in self._waiting if not each.abandoned and each.goes_before(running)]
        if not waiting:
            return False
        with torch.random.fork_rng():  # the batch may draw from the global state, too
            _run_batch(self._pop_batch(waiting[0], batch_size))
        return True

    def _pop_batch(self, request: _Request, batch_size: int) -> list[_Request]:
        """Remove a request and others that can be batched with it from the queue, and all that were abandoned."""
        batch, kept = [] if request.abandoned else [request], []
        with self._waiting_lock:
            for each in self._waiting:
                if each in batch:
                    continue
                if each.abandoned:
                    each.result.set_exception(CancelledError())
                elif 0 < len(batch) < batch_size and each.can_batch_with(request):
                    batch.append(each)
                else:
                    kept.append(each)
            self._waiting = kept
        return batch


def generate_alone(
    lm: InvariantModel, prompt: Prompt, options: Mapping[str, Any], abandoned: Event | None = None
) -> Generation:
    """Generate for a prompt without a queue; see `MicroBatcher.generate`."""
    return _Request(lm, prompt, options, _events(abandoned)).run_alone()


def _are_equal(options: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    try:
        return options == others
    except (RuntimeError, ValueError):  # of tensors and arrays
        return False


def _events(abandoned: Event | None) -> tuple[Event, ...]:
    return () if abandoned is None else (abandoned,)


def _run_batch(batch: Sequence[_Request], run_between: Callable[[_Request], bool] | None = None) -> None:
    """Generate for a batch and set the results; if the batch fails, generate for each request separately.

    Before it, and between its forward passes, `run_between` may generate for others, and says whether it did.
    """
    if not batch:
        return
    first, rows = batch[0], _Rows(batch, run_between)
    options = {**first.options, "stopping_criteria": [rows]}
    if len(batch) > 1 and first.samples_rows:
        options["seed"] = [each.options.get("seed") for each in batch]
    token = after_prefill.set(rows.run_others)
    try:
        rows.run_others()
        generations = first.lm.generate([each.prompt for each in batch], **options)
    except BaseException as error:  # noqa: BLE001 - raised again by the waiting threads
        if len(batch) == 1 or not isinstance(error, Exception) or any(each.started for each in batch):
            for each in batch:
                each.result.set_exception(error)
            return
        for each in batch:  # only the requests that cause the error fail
            _run_batch([each], run_between)
        return
    finally:
        after_prefill.reset(token)
    rows.close()
    exact = first.lm.deterministic or all(each.prompt is first.prompt for each in batch)
    for request, generation in zip(batch, generations, strict=True):
        if request.streamer is not None and not request.started:  # of beams, or of a routed model
            replay(generation.token_ids, request.streamer)
        request.result.set_result(generation if exact else replace(generation, bitwise=False))


class _Rows(StoppingCriteria):
    """Gives the tokens of each row to the streamer of its request, until that has ended, or was abandoned.

    A routed model copies it, since it generates twice: then it is not known yet whose tokens the answer has.
    """

    def __init__(self, batch: Sequence[_Request], run_between: Callable[[_Request], bool] | None) -> None:
        lm, options = batch[0].lm, batch[0].options
        self._batch, self._run_between, self._ours_until = batch, run_between, 0.0
        self._criteria = StoppingCriteriaList(options.get("stopping_criteria") or ())
        self._open = dict(enumerate(batch))  # requests by row, until their answers end
        self._streams = True
        self._ends = set(as_ids(resolve_option(options, "eos_token_id", lm.model.generation_config)))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return whether each row stops `[B]`."""
        stops: torch.Tensor = self._criteria(input_ids, scores, **kwargs)
        if len(stops) != len(self._batch):  # beams: which one is the answer is known at the end
            return stops | all(each.abandoned for each in self._batch)
        tokens = input_ids[:, -1].cpu()
        for row, request in list(self._open.items()):
            if request.streamer is not None and self._streams:
                if not request.started:
                    request.streamer.put(input_ids[row : row + 1, :-1])
                request.started = True
                request.streamer.put(tokens[row : row + 1])
            stops[row] |= request.abandoned
            if stops[row] or int(tokens[row]) in self._ends:  # what follows is padding
                self.close([row])
        if not stops.all():
            self.run_others()
        return stops

    def run_others(self) -> None:
        """Generate for others who need not wait, unless they had the model for longer than the batch since."""
        start = monotonic()
        if start >= self._ours_until and self._run_between is not None and self._run_between(self._batch[0]):
            self._ours_until = 2 * monotonic() - start  # nobody else for as long as that took, so neither side starves

    def __deepcopy__(self, memo: Any) -> _Rows:
        other = _Rows(self._batch, self._run_between)
        other._criteria, other._streams, self._streams = deepcopy(self._criteria, memo), False, False
        return other

    def close(self, rows: Iterable[int] = ()) -> None:
        """End the streams of some rows, or of all that are still open."""
        for row in list(rows or self._open):
            request = self._open.pop(row)
            if request.streamer is not None and request.started:
                request.streamer.end()
