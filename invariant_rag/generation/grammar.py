"""A JSON text under a grammar of xgrammar: which tokens may come next, and how the text can be finished soonest.

Two matchers follow the text. One is compiled for the model's vocabulary and yields token masks. The other is compiled
for single bytes, whatever the tokenizer; in it, the shortest ending is searched.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from invariant_rag.errors import InvalidSchema, UnsupportedCombination
from invariant_rag.generation.ending_search import (
    BROKEN,
    CACHE_BYTES,
    LONGEST,
    PENDINGS,
    TOKEN_SECONDS,
    Budget,
    byte_matcher,
    finishes,
    import_xgrammar,
    new_matcher,
    pending,
    shortest_ending,
)
from invariant_rag.locks import ForkSafeLock
from invariant_rag.prompts import control_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KNOWN = 256
"""Endings to remember: more than one step can find. Most tokens can be followed by one that is known."""

_lock = ForkSafeLock()


class Vocabulary:
    """The tokens of a model as bytes, and those that may occur inside an object.

    Attributes:
        size: Number of logits.
        words: The bytes of each token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, ends: frozenset[int]) -> None:
        xgrammar = import_xgrammar()
        forbidden = {index for index in {*control_tokens(tokenizer), *ends} if index < size}
        stop = sorted(forbidden) or [size - 1]
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=stop)
        self.size = size
        self.words: list[bytes] = info.decoded_vocab
        self._compiler = xgrammar.GrammarCompiler(info, cache_limit_bytes=CACHE_BYTES)
        allowed = np.array([bool(word) for word in self.words] + [False] * (-size % 32))
        allowed[stop] = False
        self._masks: dict[bytes, torch.Tensor] = {}
        for before in PENDINGS:
            kept = allowed.copy()
            for index in allowed.nonzero()[0].tolist():
                word = self.words[index]
                if (not before or word[0] >= 0x80 or word[0] in b"u\\") and BROKEN.search(before + word):
                    kept[index] = False
            if not before:
                allowed = kept
            self._masks[before] = _packed(kept)
        self._ids = {self.words[index]: index for index in allowed.nonzero()[0].tolist()}
        self._longest = max(map(len, self._ids), default=0)
        self.segment = lru_cache(maxsize=4096)(self._segment)
        self.at_marker = lru_cache(maxsize=256)(self._at_marker)

    def matcher(self, schema: str) -> Any:
        """Return a matcher of a schema that follows tokens."""
        return new_matcher(self._compiler, schema)

    def mask_after(self, text: bytes) -> torch.Tensor:
        """Return which tokens may ever follow a text inside an object: bits `[1, size / 32]`."""
        return self._masks[pending(text)]

    def _at_marker(self, marker: bytes, before: bytes, *, anchored: bool) -> tuple[list[int], list[int]]:
        """Return the tokens that complete a marker in a text, and those that go beyond its end.

        Args:
            marker: The marker.
            before: The end of the text, as far as it is a part of the marker.
            anchored: Whether the marker only counts at the beginning of `before`.
        """
        completing: list[int] = []
        beyond: list[int] = []
        for index, word in enumerate(self.words):
            text = before + word
            start = text.find(marker)
            if start == 0 or (start > 0 and not anchored):
                (completing if start + len(marker) == len(text) else beyond).append(index)
        return completing, beyond

    def _segment(self, text: bytes) -> tuple[int, ...] | None:
        """Return the fewest tokens that spell a text; None if there are none."""
        best: list[tuple[int, int]] = [(0, 0)] * (len(text) + 1)  # tokens from here to the end, length of the first
        for start in reversed(range(len(text))):
            lengths = range(1, min(self._longest, len(text) - start) + 1)
            options = ((best[start + n][0] + 1, n) for n in lengths if text[start : start + n] in self._ids)
            best[start] = min(options, default=(LONGEST, 1))
        if best[0][0] >= LONGEST:
            return None
        tokens, start = [], 0
        while start < len(text):
            length = best[start][1]
            tokens.append(self._ids[text[start : start + length]])
            start += length
        return tuple(tokens)


_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, frozenset[int]], Vocabulary]]
_vocabularies = WeakKeyDictionary()


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, ends: Iterable[int]) -> Vocabulary:
    """Return the vocabulary of a model, which is built once.

    Args:
        tokenizer: The model's tokenizer.
        size: Number of logits.
        ends: Tokens that end a text, which cannot be part of one.

    Raises:
        ExtraRequired: xgrammar is not installed.
    """
    key = (size, frozenset(ends))
    with _lock:
        known = _vocabularies.setdefault(tokenizer, {})
        if key not in known:
            known[key] = Vocabulary(tokenizer, *key)
        return known[key]


class GrammarText:
    """A text that grows token by token and follows a schema.

    Attributes:
        schema: A JSON schema.

    Args:
        tokens: The vocabulary that it is written in.
        schema: A JSON schema.
        budget: What searching for endings may cost; several texts may share one. None: as much as for one text.

    Raises:
        InvalidSchema: xgrammar does not take the schema, or no text of it was found.
    """

    def __init__(self, tokens: Vocabulary, schema: str, budget: Budget | None = None) -> None:
        self.schema = schema
        self._budget = Budget() if budget is None else budget
        self._tokens = tokens
        self._matcher = tokens.matcher(schema)
        self._bytes = byte_matcher(schema)
        self._mask = import_xgrammar().allocate_token_bitmask(1, tokens.size)
        self._endings: tuple[bytes, ...] = ()
        self._seen: list[int] | None = None
        self._start = 0
        self._text = b""
        self._check_ending()

    def __deepcopy__(self, memo: dict[int, Any]) -> GrammarText:
        """Return a text that has not begun: a routed model writes two, and copies what it needs for the other."""
        other = copy.copy(self)
        other._matcher, other._bytes = self._matcher.fork(), self._bytes.fork()
        other._mask = self._mask.clone()
        other._begin([])
        other._seen = None
        return other

    def _check_ending(self) -> None:
        with self._budget.timed():
            ending = shortest_ending(self._bytes, b"", self._budget)
        if ending is None or self._tokens.segment(ending) is None:
            raise InvalidSchema("expected a schema with a finite text in the tokens of the model, found none")
        try:
            json.loads(ending)
        except ValueError as error:
            raise InvalidSchema(
                f"expected a schema of which xgrammar writes JSON, got {ending!r}: {error}",
                hint='A pattern cannot ask for quotes, backslashes and control characters: ", \\ and \\n.',
            ) from error
        self._endings = (ending,)

    @property
    def complete(self) -> bool:
        """Whether the text is finished."""
        return bool(self._matcher.is_terminated())

    @property
    def written(self) -> int:
        """Tokens of the text."""
        return len(self._seen or ()) - self._start

    def advance(self, tokens: list[int]) -> None:
        """Follow what was appended to prompt and text. Where that is not what was seen before, a new text begins.

        Raises:
            UnsupportedCombination: A token was appended that the grammar does not allow.
        """
        if self._seen is None or len(tokens) <= self._start or tokens[: len(self._seen)] != self._seen:
            self._begin(tokens)
        for token in tokens[len(self._seen or ()) :]:
            word = self._tokens.words[token]
            self._budget.seconds += TOKEN_SECONDS
            with self._budget.timed():
                accepted = self._matcher.accept_token(token) and self._bytes.accept_string(word)
            if not accepted:
                raise UnsupportedCombination(
                    f"expected a token that continues {self._text!r}, got {word!r}, which something else than the "
                    "schema chose",
                    hint="Leave other logits processors and stopping criteria away.",
                )
            self._text += word
            self._remember(*(known[len(word) :] for known in self._endings if known.startswith(word)))
        self._seen = tokens

    def _begin(self, prompt: list[int]) -> None:
        self._matcher.reset()
        self._bytes.reset()
        self._seen, self._start, self._text = prompt, len(prompt), b""

    def mask_scores(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[1, vocabulary]` in which tokens that cannot continue the text are minus infinity."""
        with self._budget.timed():
            self._matcher.fill_next_token_bitmask(self._mask)
        allowed = (self._mask & self._tokens.mask_after(self._text)).to(scores.device)
        masked = scores.clone()
        import_xgrammar().apply_token_bitmask_inplace(masked, allowed, vocab_size=self._tokens.size)
        return masked

    def ending(self, token: int | None = None, most: int = LONGEST) -> tuple[int, ...] | None:
        """Return tokens that finish the text, after this one if it is given.

        Args:
            token: A token that the grammar allows.
            most: How many tokens they may be.

        Returns:
            The tokens; none of them if the text is complete then; None if no ending of at most that many is known or,
            where none is known at all, found.
        """
        word = b"" if token is None else self._tokens.words[token]
        if not word:
            with self._budget.timed():
                return self._ending(b"", most)
        with self._budget.timed():
            if not self._bytes.accept_string(word):
                return None
            try:
                return self._ending(word, most)
            finally:
                self._bytes.rollback(1)

    def _ending(self, word: bytes, most: int) -> tuple[int, ...] | None:
        matcher = self._bytes
        if matcher.is_terminated():
            return ()
        before = pending(self._text + word)
        shorter = (known[len(word) :] for known in self._endings if word)  # where characters are counted
        too_long = []
        for known in (*self._endings, *shorter):
            tokens = self._tokens.segment(known)
            if tokens is None or len(tokens) > most:
                too_long.append(known)
            elif finishes(matcher, known) and not BROKEN.search(before + known[:1]):
                self._remember(known)
                return tokens
        if any(finishes(matcher, known) for known in too_long):
            return None
        found = shortest_ending(matcher, self._text + word, self._budget)
        tokens = None if found is None else self._tokens.segment(found)
        if found is None or tokens is None:
            return None
        self._remember(found)
        return tokens if len(tokens) <= most else None

    def _remember(self, *endings: bytes) -> None:
        self._endings = tuple(dict.fromkeys((*endings, *self._endings)))[:_KNOWN]


def _packed(bits: Any) -> torch.Tensor:
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy()).unsqueeze(0)
