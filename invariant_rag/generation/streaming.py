"""Streaming: generation in a background thread, deltas of its text, and the text of each token."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from invariant_rag.errors import TokenizerRequired, UnsupportedCombination
from invariant_rag.generation.answers import TokenLogprob
from invariant_rag.generation.options import as_ids
from invariant_rag.generation.outputs import Generation

_CONTEXT_TOKENS = 16  # that are decoded together with a new one, whose text may depend on those before it


class TextQueueStreamer(BaseStreamer):
    """A streamer that decodes tokens incrementally and puts deltas of text into a queue; None ends the stream.

    transformers' `TextStreamer` decodes each line separately, which loses white space that decoders strip from the
    beginning of a text. The special tokens `keep` are part of the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, keep: Any = None) -> None:
        if tokenizer is None:
            raise TokenizerRequired("expected a model with a tokenizer, which decodes tokens of a stream; got none")
        self.queue: SimpleQueue[str | None] = SimpleQueue()
        self._tokenizer, self._keep = tokenizer, frozenset(as_ids(keep, "keep_tokens"))
        self._tokens: list[int] = []
        self._emitted = 0  # characters of the decoded tokens that are in the queue
        self.began = False  # whether it has got the prompt

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, which is ignored, and then generated tokens, one or more at a time."""
        if value.ndim > 1 and value.shape[0] > 1:
            raise UnsupportedCombination(f"expected one sequence to stream, got {value.shape[0]}")
        if not self.began:
            self.began = True
            return
        self._tokens += value.flatten().tolist()
        text = decode_keeping(self._tokenizer, self._tokens, self._keep)
        self._emit(text.rstrip("\ufffd"))  # one character may span several tokens
        if self._emitted == len(text) and len(self._tokens) > 2 * _CONTEXT_TOKENS:
            context = decode_keeping(self._tokenizer, self._tokens[-_CONTEXT_TOKENS:], self._keep)
            if context:  # special tokens decode to nothing; the next token would be decoded as the first of a text
                self._tokens, self._emitted = self._tokens[-_CONTEXT_TOKENS:], len(context)

    def end(self) -> None:
        """Emit the rest of the text."""
        self._emit(decode_keeping(self._tokenizer, self._tokens, self._keep))

    def _emit(self, text: str) -> None:
        if len(text) > self._emitted:
            self.queue.put(text[self._emitted :])
            self._emitted = len(text)


def decode_keeping(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], keep: frozenset[int]) -> str:
    """Decode tokens without special tokens, but for those to keep."""
    if not keep:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    dropped = (special | set(tokenizer.all_special_ids)) - keep
    return str(tokenizer.decode([token for token in tokens if token not in dropped], skip_special_tokens=False))


class StopOnEvent(StoppingCriteria):
    """A stopping criterion that stops all rows once an event is set, for example by a cancelled request."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return whether each row stops `[B]`."""
        return torch.full((input_ids.shape[0],), self._event.is_set(), dtype=torch.bool, device=input_ids.device)


class TextStream(Iterator[str]):
    """Deltas of the text of a generation in a background thread. Closing or deleting it stops the generation.

    `generate` writes to the streamer until it ends or `closed` is set; before that, `check` may raise in this thread.
    """

    generation: Generation | None = None  # once the stream is exhausted; None before, and after `close`

    def __init__(
        self, generate: Callable[[], Generation], streamer: TextQueueStreamer, closed: Event, check: Callable[[], None]
    ) -> None:
        self._closed, self._deltas = closed, _deltas(generate, streamer.queue, closed, check)  # which knows no `self`

    def __next__(self) -> str:
        try:
            return next(self._deltas)
        except StopIteration as end:
            self.generation = self.generation or end.value
            raise

    def close(self) -> None:
        """Stop the generation and wait for its thread to end.

        While another thread waits for the next delta, the stream ends there, and this call does not wait.
        """
        self._closed.set()
        with suppress(ValueError):  # the other thread's generator cannot be closed from here
            self._deltas.close()


def _deltas(
    generate: Callable[[], Generation], queue: SimpleQueue[str | None], closed: Event, check: Callable[[], None]
) -> Generator[str, None, Generation | None]:
    """Generate in a thread and yield deltas of its text; then return the generation."""
    check()
    done: Future[Generation] = Future()

    def run() -> None:
        try:
            done.set_result(generate())
        except BaseException as error:  # noqa: BLE001 - raised again by the iterator
            done.set_exception(error)
        queue.put(None)

    thread = Thread(target=run, name="invariant-rag-stream", daemon=True)
    thread.start()
    try:
        while (delta := queue.get()) is not None:
            yield delta
        return None if closed.is_set() and isinstance(done.exception(), CancelledError | None) else done.result()
    finally:
        closed.set()
        if current_thread() is not thread:  # which may collect an abandoned stream
            thread.join()


def replay(token_ids: Iterable[int], streamer: BaseStreamer) -> None:
    """Pass finished tokens to a streamer as transformers does: the prompt, then each token."""
    streamer.put(torch.empty((1, 0), dtype=torch.long))
    for token in token_ids:
        streamer.put(torch.tensor([token]))
    streamer.end()


def token_logprobs(generation: Generation, tokenizer: PreTrainedTokenizerBase) -> list[TokenLogprob]:
    """Return the generated tokens with their parts of the text, which joined are the text, and those in their stead."""
    streamer = TextQueueStreamer(tokenizer)
    streamer.put(torch.empty((1, 0), dtype=torch.long))  # the prompt
    logprobs_of_tokens, start = list[TokenLogprob](), 0
    tops = generation.top_logprobs or ((),) * len(generation.token_ids)
    chosen = zip(generation.token_ids, generation.logprobs, tops, strict=True)
    for count, (token, logprob, best) in enumerate(chosen, 1):
        streamer.put(torch.tensor([token]))
        if count == len(generation.token_ids):
            streamer.end()
        text = "".join(streamer.queue.get() or "" for _ in range(streamer.queue.qsize()))
        before = list(generation.token_ids[max(0, count - _CONTEXT_TOKENS) : count - 1])
        known = len(str(tokenizer.decode(before)).rstrip("\ufffd")) if best else 0
        names = {each: str(tokenizer.decode([*before, each]))[known:] for each, _ in best} | {token: text}
        top = tuple((names[each], value) for each, value in best)
        logprobs_of_tokens.append(TokenLogprob(text, logprob, start, start + len(text), top))
        start += len(text)
    return logprobs_of_tokens
