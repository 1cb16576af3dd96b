"""Text as it is generated: a generation in a thread of its own, read piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from invariant_rag.errors import TokenizerRequired, UnsupportedCombination

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_CONTEXT = 16
"""Tokens to decode before a new one: what a token adds to a text may depend on the tokens right before it."""


class _Pieces(BaseStreamer):
    """Turns tokens into pieces of text, and hands them over to another thread.

    transformers' `TextStreamer` decodes each line on its own, which loses the white space that decoders strip from the
    beginning of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.queue: SimpleQueue[str | BaseException | None] = SimpleQueue()
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._written = 0  # characters of the decoded tokens that were handed over
        self._in_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, and then the tokens, one or more at a time."""
        if value.ndim > 1 and value.shape[0] > 1:
            raise UnsupportedCombination(f"expected one sequence to stream, got {value.shape[0]}")
        if self._in_prompt:
            self._in_prompt = False
            return
        self._tokens += value.flatten().tolist()
        text = self._decoded(self._tokens)
        self._write(text.rstrip("\ufffd"))  # the bytes of a character may be several tokens
        if self._written == len(text) and len(self._tokens) > 2 * _CONTEXT:
            last = self._decoded(self._tokens[-_CONTEXT:])
            if last:  # special tokens have no text: without any, the next token would be taken for the first
                self._tokens, self._written = self._tokens[-_CONTEXT:], len(last)

    def end(self) -> None:
        """Hand over what was held back."""
        self._write(self._decoded(self._tokens))

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _write(self, text: str) -> None:
        if len(text) > self._written:
            self.queue.put(text[self._written :])
            self._written = len(text)


class Abandoned(StoppingCriteria):
    """Ends a generation once an event is set: nobody waits for it any more."""

    def __init__(self, abandoned: Event) -> None:
        self._abandoned = abandoned

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Say of each row whether it ends here."""
        return torch.full((input_ids.shape[0],), self._abandoned.is_set(), dtype=torch.bool, device=input_ids.device)


def stream_text(
    generate: Callable[..., None], tokenizer: PreTrainedTokenizerBase | None, options: dict[str, Any]
) -> Iterator[str]:
    """Run `generate` in a thread and yield its text as it comes.

    Args:
        generate: Called with `options`, a `streamer` and `stopping_criteria`.
        tokenizer: What turns tokens into text.
        options: Keywords for `generate`.

    Raises:
        TokenizerRequired: There is no tokenizer.
    """
    if tokenizer is None:
        raise TokenizerRequired("expected a model with a tokenizer: a stream is text")
    pieces, closed = _Pieces(tokenizer), Event()
    criteria = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), Abandoned(closed)])

    def work() -> None:
        try:
            generate(**{**options, "streamer": pieces, "stopping_criteria": criteria})
        except BaseException as error:  # noqa: BLE001 - raised again where the stream is read
            pieces.queue.put(error)
        else:
            pieces.queue.put(None)

    return _read(Thread(target=work, name="invariant-rag-stream", daemon=True), pieces.queue, closed)


def _read(thread: Thread, queue: SimpleQueue[str | BaseException | None], closed: Event) -> Iterator[str]:
    thread.start()
    try:
        while (piece := queue.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece
    finally:
        closed.set()
        thread.join()
