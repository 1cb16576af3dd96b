"""Text that must follow a JSON schema: tokens that cannot continue it are never chosen (with xgrammar).

A text is never cut off in the middle: a token is chosen only if what it opens can still be closed with the tokens that
are left. How that can be done is known from a witness: an ending that is built character by character, by closing
whatever can be closed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from invariant_rag.errors import ExtraRequired, TokenizerRequired, UnsupportedCombination
from invariant_rag.prompts import control_tokens
from transformers import LogitsProcessor, StoppingCriteria

from langchain_invariant_rag.errors import DISTRIBUTION, InvalidSchema

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from transformers import PreTrainedTokenizerBase

_LONGEST = 4096
"""Characters of a witness at which to give up: a schema may describe no finite text."""

_TRIED = 8
"""Tokens to try, most likely first, where a text is sampled and few tokens are left."""

_CLOSING = b'}],"'
_BYTES = bytes(sorted(range(256), key=lambda byte: (byte in b"[{", not chr(byte).isalnum(), byte)))

_compilers: WeakKeyDictionary[PreTrainedTokenizerBase, dict[int, tuple[Any, list[bytes]]]] = WeakKeyDictionary()
_lock = Lock()


@dataclass(frozen=True)
class Constraint:
    """What holds one text to a schema; both parts belong to one call of `generate`."""

    processor: LogitsProcessor
    stopping: StoppingCriteria


def constrained(engine: InvariantModel, schema: str, max_tokens: int, *, sampled: bool) -> Constraint:
    """Return what makes the engine write one text that follows a JSON schema.

    Raises:
        ExtraRequired: xgrammar is not installed.
        InvalidSchema: The schema is none, or uses what xgrammar does not know.
        UnsupportedCombination: No text that follows the schema is known to fit into `max_tokens`.
    """
    text = _Text(engine, schema)
    needed = text.ending()
    if needed > max_tokens:
        raise UnsupportedCombination(
            f"expected max_tokens of at least {needed} for this schema, got {max_tokens}",
            hint="Raise max_tokens, or ask for less.",
        )
    return Constraint(_Continuing(text, max_tokens, len(schema), _TRIED if sampled else 1), _Complete(text))


class _Text:
    """A text that grows token by token, and what may come next."""

    def __init__(self, engine: InvariantModel, schema: str) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise ExtraRequired("xgrammar", "structured", distribution=DISTRIBUTION) from error
        if engine.tokenizer is None:
            raise TokenizerRequired("structured output needs the model's tokenizer")
        size = engine.model.config.get_text_config(decoder=True).vocab_size
        with _lock:
            known = _compilers.setdefault(engine.tokenizer, {})
            if size not in known:
                info = xgrammar.TokenizerInfo.from_huggingface(engine.tokenizer, vocab_size=size)
                known[size] = (xgrammar.GrammarCompiler(info), info.decoded_vocab)
            compiler, vocabulary = known[size]
            try:
                grammar = compiler.compile_json_schema(schema, any_whitespace=False)
            except RuntimeError as error:
                raise InvalidSchema(f"xgrammar does not take this schema: {error}") from error
        self._matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
        self._bits = xgrammar.allocate_token_bitmask(1, size)
        self._size = size
        self._forbidden = sorted(index for index in control_tokens(engine.tokenizer) if index < size)
        self._token_of = {word[0]: index for index, word in enumerate(vocabulary) if len(word) == 1}
        self._start: int | None = None
        self._read = 0  # tokens of prompt and text that were seen

    def __deepcopy__(self, memo: dict[int, Any]) -> _Text:
        """Return a text that has not begun: a routed model writes two, and copies what it needs for the other."""
        other = copy.copy(self)
        other._matcher = self._matcher.fork()
        other._matcher.reset()
        other._bits = self._bits.clone()
        other._start, other._read = None, 0
        return other

    @property
    def complete(self) -> bool:
        """Whether the text is finished."""
        return bool(self._matcher.is_terminated())

    @property
    def written(self) -> int:
        """Tokens of the text."""
        return self._read - (self._start or 0)

    def advance(self, tokens: list[int]) -> None:
        """Read what was appended to prompt and text; where nothing was, a text begins, and all is its prompt."""
        if self._start is None or len(tokens) <= self._start:
            self._matcher.reset()
            self._start = self._read = len(tokens)
        for token in tokens[self._read :]:
            self._matcher.accept_token(token)
        self._read = len(tokens)

    def allowed(self) -> torch.Tensor:
        """Return which tokens may come next: bool `[vocabulary]`."""
        self._matcher.fill_next_token_bitmask(self._bits)
        words = self._bits[0].unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)
        allowed = (words & 1).bool().flatten()[: self._size]
        allowed[self._forbidden] = False
        return allowed

    def ending(self, token: int | None = None) -> int:
        """Return how many tokens are enough to finish the text, after this one if it is given."""
        matcher = self._matcher.fork()
        if token is not None:
            matcher.accept_token(token)
        length = 0
        while length < _LONGEST and not matcher.is_terminated():
            piece = self._witness(matcher)
            matcher.accept_string(piece)
            length += len(piece)
        return length

    def first_of_ending(self) -> int:
        """Return the token with which the witness goes on."""
        return self._token_of[self._witness(self._matcher)[0]]

    def _witness(self, matcher: Any) -> bytes:
        """Return what the witness appends: the only possible text, or one character that closes if any does."""
        forced: str = matcher.find_jump_forward_string()
        if forced:
            return forced.encode()
        matcher.fill_next_token_bitmask(self._bits)
        words = self._bits[0].tolist() if self._size < 1024 else self._bits[0].numpy()

        def may_come(byte: int) -> bool:
            index = self._token_of.get(byte)
            return index is not None and bool(int(words[index >> 5]) >> (index & 31) & 1)

        inside_text = may_come(ord('"')) and may_come(ord("z"))
        choices = b'"' if inside_text else _CLOSING + _BYTES
        return bytes([next(byte for byte in choices if may_come(byte))])


class _Continuing(LogitsProcessor):
    """Leaves only tokens that continue the text, and that leave enough tokens to finish it."""

    def __init__(self, text: _Text, max_tokens: int, largest_step: int, tried: int) -> None:
        self._text = text
        self._max_tokens = max_tokens
        self._largest_step = largest_step  # no token opens more than the whole schema once
        self._tried = tried

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(input_ids) != 1:
            raise UnsupportedCombination(f"expected one text to follow a schema, got {len(input_ids)} (beams?)")
        self._text.advance(input_ids[0].tolist())
        scores = scores.masked_fill(~self._text.allowed().to(scores.device), -torch.inf)
        left = self._max_tokens - self._text.written
        if self._text.ending() + self._largest_step < left:
            return scores
        best = scores[0].topk(min(self._tried, scores.shape[1]))
        tried = [
            index
            for index, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            if score > -torch.inf
        ]
        fitting = [token for token in tried if self._text.ending(token) < left] or [self._text.first_of_ending()]
        only = torch.full_like(scores, -torch.inf)
        only[0, fitting] = scores[0, fitting]
        return only


class _Complete(StoppingCriteria):
    """Ends the generation with the text."""

    def __init__(self, text: _Text) -> None:
        self._text = text

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self._text.advance(input_ids[0].tolist())
        return torch.full((input_ids.shape[0],), self._text.complete, dtype=torch.bool, device=input_ids.device)
