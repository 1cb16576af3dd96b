"""Text as it is generated: a generation in a thread of its own, read piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from invariant_rag.errors import TokenizerRequired, UnsupportedCombination

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from invariant_rag.generation.outputs import Generation


_CONTEXT = 16
"""Tokens to decode before a new one: what a token adds to a text may depend on the tokens right before it."""


class _Pieces(BaseStreamer):
    """Turns tokens into pieces of text, and hands them over to another thread.

    transformers' `TextStreamer` decodes each line on its own, which loses the white space that decoders strip from the
    beginning of a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.queue: SimpleQueue[str | None] = SimpleQueue()
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


class TextStream(Iterator[str]):
    """Pieces of text as they are generated; afterwards, the generation. Dropping it stops the generation too."""

    def __init__(self, generate: Callable[..., Generation], pieces: _Pieces, options: dict[str, Any]) -> None:
        self._done: list[Generation] = []
        self._pieces = _read(generate, pieces, options, self._done)

    @property
    def generation(self) -> Generation | None:
        """What the generation returned, once the stream has ended by itself; None before."""
        return self._done[0] if self._done else None

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop the generation and wait until it has stopped."""
        self._pieces.close()


def stream_text(
    generate: Callable[..., Generation], tokenizer: PreTrainedTokenizerBase | None, options: dict[str, Any]
) -> TextStream:
    """Run `generate` in a thread and return its text as it comes.

    Args:
        generate: Called with `options`, a `streamer` and `stopping_criteria`.
        tokenizer: What turns tokens into text.
        options: Keywords for `generate`.

    Raises:
        TokenizerRequired: There is no tokenizer.
    """
    if tokenizer is None:
        raise TokenizerRequired("expected a model with a tokenizer: a stream is text")
    return TextStream(generate, _Pieces(tokenizer), options)


def _read(
    generate: Callable[..., Generation], pieces: _Pieces, options: dict[str, Any], done: list[Generation]
) -> Generator[str, None, None]:
    closed, failed = Event(), list[BaseException]()
    criteria = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), Abandoned(closed)])
    result: list[Generation] = []

    def work() -> None:
        try:
            result.append(generate(**{**options, "streamer": pieces, "stopping_criteria": criteria}))
        except BaseException as error:  # noqa: BLE001 - raised again where the stream is read
            failed.append(error)
        pieces.queue.put(None)

    thread = Thread(target=work, name="invariant-rag-stream", daemon=True)
    thread.start()
    try:
        while (piece := pieces.queue.get()) is not None:
            yield piece
        if failed:
            raise failed[0]
        done += result
    finally:
        closed.set()
        thread.join()


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text up to the first stop string.

    >>> before_stop("one. two. three.", [". t"])
    'one'
    """
    return text[: min((at for at in map(text.find, stops) if at >= 0), default=None)]


def stream_before_stop(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield pieces of text up to the first stop string. Joined, they are `before_stop` of the joined pieces.

    What may be the beginning of a stop string is held back until it is known. Pieces behind it are read and dropped: a
    model that was given `stop_strings` is about to stop by itself, and then says what it read and wrote.

    >>> list(stream_before_stop(["ab", "c", "d", "e"], ["cd"]))
    ['ab']
    """
    held, ended = "", False
    for piece in pieces:
        if ended:
            continue
        held += piece
        open_from = len(held) - _begun(held, stops)  # a stop string may begin there; one found behind it has to wait
        kept = before_stop(held, stops)
        ended = len(kept) < len(held) and len(kept) <= open_from
        ready = kept if ended else held[:open_from]
        if ready:
            yield ready
        held = held[len(ready) :]
    rest = "" if ended else before_stop(held, stops)
    if rest:
        yield rest


def _begun(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text with which a stop string begins."""
    lengths = range(1, min(len(text), max(map(len, stops), default=1) - 1) + 1)
    return max((n for n in lengths if any(stop.startswith(text[-n:]) for stop in stops)), default=0)
