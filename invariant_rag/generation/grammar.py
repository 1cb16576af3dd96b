"""A JSON text under a grammar of xgrammar: which tokens may come next, and how the text can be finished soonest.

Two matchers follow the text. One is compiled for the model's vocabulary and yields token masks. The other is compiled
for single bytes, whatever the tokenizer; in it, the shortest ending is searched.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from invariant_rag.errors import ExtraRequired, InvalidSchema, UnsupportedCombination
from invariant_rag.prompts import control_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST = 16_384
"""Bytes of an ending at which to give up: a schema may describe no finite text."""

_KNOWN = 256
"""Endings to remember: more than one step can find. Most tokens can be followed by one that is known."""

_ASCII = sorted(range(32, 127), key=lambda byte: (byte != ord('"'), not chr(byte).isalnum(), byte in b"[{\\", byte))
_ALPHABETS = (
    ([byte for byte in _ASCII if not chr(byte).isalnum() or byte in b"01aA"], 2_000),
    (_ASCII, 20_000),
    ([*_ASCII, *range(127, 256)], 20_000),
)
"""Bytes in which to search for the end of a value, and states of the grammar to visit: a few will often do."""

# Bytes that xgrammar lets into strings though they are no JSON in UTF-8: control characters, overlong forms, halves of
# surrogate pairs; and \u escapes, which may be such halves too (any character can be written as itself).
_BROKEN = re.compile(
    rb"[\x00-\x1f]|\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]|\xf4[\x90-\xbf]|(?<!\\)(?:\\\\)*\\u", re.DOTALL
)
_PENDING = (b"", b"\xe0", b"\xed", b"\xf0", b"\xf4", b"\\")
"""Ends of a text that make a difference to what may follow."""

_POSITIONS = re.compile(r"There are \d+|rule_start_pos=\d+")

_lock = Lock()  # xgrammar compiles in threads of its own


class Vocabulary:
    """The tokens of a model as bytes, and those that may occur inside an object.

    Attributes:
        size: Number of logits.
        words: The bytes of each token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, ends: frozenset[int]) -> None:
        xgrammar = _xgrammar()
        forbidden = {index for index in {*control_tokens(tokenizer), *ends} if index < size}
        stop = sorted(forbidden) or [size - 1]
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=stop)
        self.size = size
        self.words: list[bytes] = info.decoded_vocab
        self._compiler = xgrammar.GrammarCompiler(info)
        allowed = np.array([bool(word) for word in self.words] + [False] * (-size % 32))
        allowed[stop] = False
        self._masks: dict[bytes, torch.Tensor] = {}
        for pending in _PENDING:
            kept = allowed.copy()
            for index in allowed.nonzero()[0].tolist():
                word = self.words[index]
                if (not pending or word[0] >= 0x80 or word[0] in b"u\\") and _BROKEN.search(pending + word):
                    kept[index] = False
            if not pending:
                allowed = kept
            self._masks[pending] = _packed(kept)
        self._ids = {self.words[index]: index for index in allowed.nonzero()[0].tolist()}
        self._longest = max(map(len, self._ids), default=0)
        self.segment = lru_cache(maxsize=4096)(self._segment)

    def compile(self, schema: str) -> Any:
        """Return a schema's grammar over the tokens."""
        return _compiled(self._compiler, schema)

    def mask_after(self, text: bytes) -> torch.Tensor:
        """Return which tokens may ever follow a text inside an object: bits `[1, size / 32]`."""
        return self._masks[_pending(text)]

    def _segment(self, text: bytes) -> tuple[int, ...] | None:
        """Return the fewest tokens that spell a text; None if there are none."""
        best: list[tuple[int, int]] = [(0, 0)] * (len(text) + 1)  # tokens from here to the end, length of the first
        for start in reversed(range(len(text))):
            lengths = range(1, min(self._longest, len(text) - start) + 1)
            options = ((best[start + n][0] + 1, n) for n in lengths if text[start : start + n] in self._ids)
            best[start] = min(options, default=(_LONGEST, 1))
        if best[0][0] >= _LONGEST:
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

    Args:
        tokens: The vocabulary that it is written in.
        schema: A JSON schema.

    Raises:
        InvalidSchema: xgrammar does not take the schema, or no text of it was found.
    """

    def __init__(self, tokens: Vocabulary, schema: str) -> None:
        xgrammar = _xgrammar()
        self._tokens = tokens
        self._matcher = xgrammar.GrammarMatcher(tokens.compile(schema), terminate_without_stop_token=True)
        grammar = _compiled(_byte_compiler(), schema)
        self._bytes = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
        self._mask = xgrammar.allocate_token_bitmask(1, tokens.size)
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
        ending = _shortest_ending(self._bytes, b"")
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
            if not (self._matcher.accept_token(token) and self._bytes.accept_string(word)):
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
        self._matcher.fill_next_token_bitmask(self._mask)
        allowed = (self._mask & self._tokens.mask_after(self._text)).to(scores.device)
        masked = scores.clone()
        _xgrammar().apply_token_bitmask_inplace(masked, allowed, vocab_size=self._tokens.size)
        return masked

    def ending(self, token: int | None = None, most: int = _LONGEST) -> tuple[int, ...] | None:
        """Return tokens that finish the text, after this one if it is given.

        Args:
            token: A token that the grammar allows.
            most: How many tokens they may be.

        Returns:
            The tokens; none of them if the text is complete then; None if no ending of at most that many is known or,
            where none is known at all, found.
        """
        matcher, word = self._bytes, b"" if token is None else self._tokens.words[token]
        if word:
            matcher = matcher.fork()
            if not matcher.accept_string(word):
                return None
        if matcher.is_terminated():
            return ()
        too_long = False
        shorter = (known[len(word) :] for known in self._endings if word)  # where characters are counted
        for known in (*self._endings, *shorter):
            if _finishes(matcher, known):
                tokens = self._tokens.segment(known)
                if tokens is not None and len(tokens) <= most:
                    self._remember(known)
                    return tokens
                too_long = True
        found = None if too_long else _shortest_ending(matcher, self._text + word)
        tokens = None if found is None else self._tokens.segment(found)
        if found is None or tokens is None:
            return None
        self._remember(found)
        return tokens if len(tokens) <= most else None

    def _remember(self, *endings: bytes) -> None:
        self._endings = tuple(dict.fromkeys((*endings, *self._endings)))[:_KNOWN]


def _shortest_ending(matcher: Any, text: bytes) -> bytes | None:
    """Return bytes that finish a text: value by value, each ended as soon as possible.

    Args:
        matcher: Matcher over bytes, which stays as it is.
        text: What was written so far.
    """
    matcher, ending = matcher.fork(), b""
    while not matcher.is_terminated():
        forced = _forced_byte(matcher)
        searches = (_end_of_value(matcher, text + ending, *limits) for limits in _ALPHABETS)
        piece = forced or next((found for found in searches if found is not None), None)
        if piece is None or len(ending) > _LONGEST or not matcher.accept_string(piece):
            return None
        ending += piece
    return ending


def _end_of_value(matcher: Any, text: bytes, alphabet: list[int], most_states: int) -> bytes | None:
    """Search, breadth first, for the shortest bytes that end the string, number or container that is being written."""
    in_string = _in_string(text)
    if not in_string and (closing := _closing(_byte_mask(matcher))):
        return closing
    frontier = [(matcher, b"")]
    visited, seen = 0, set[str]()
    while frontier and visited < most_states:
        reached: dict[str, tuple[Any, bytes]] = {}
        for state, path in frontier:
            for byte in _next_bytes(state, text + path, alphabet):
                visited += 1
                longer = path + bytes([byte])
                child = state.fork()
                child.accept_string(longer[-1:])
                mask, open_string = _byte_mask(child), _in_string(text + longer)
                if not open_string and (in_string or child.is_terminated() or _closing(mask)):
                    return longer
                reached.setdefault(_state(child), (child, longer))
        kinds = {_POSITIONS.sub("", state) for state in reached}
        if kinds <= seen:
            return None  # a loop
        seen |= kinds
        frontier = list(reached.values())
    return None


def _next_bytes(matcher: Any, text: bytes, alphabet: list[int]) -> Iterator[int]:
    """Yield the bytes of an alphabet that may come next; inside a character, those that end it."""
    may_come = _next_bits(matcher)
    if not may_come[:128].any():
        alphabet = _ALPHABETS[-1][0]
    for byte in alphabet:
        if may_come[byte] and not _BROKEN.search(_pending(text) + bytes([byte])):
            yield byte


def _next_bits(matcher: Any) -> Any:
    return np.unpackbits(_byte_mask(matcher).view(np.uint8), bitorder="little")[:256]


def _byte_mask(matcher: Any) -> Any:
    if matcher.is_terminated():
        return np.zeros(9, dtype=np.int32)
    mask = torch.empty(1, 9, dtype=torch.int32)
    matcher.fill_next_token_bitmask(mask)
    return mask[0].numpy()


def _forced_byte(matcher: Any) -> bytes | None:
    """Return the next byte if only one may come. (xgrammar's `find_jump_forward_string` hangs on an endless schema)."""
    may_come = _next_bits(matcher).nonzero()[0]
    return bytes([may_come[0]]) if len(may_come) == 1 else None


def _state(matcher: Any) -> str:
    r"""Return the parser states of a matcher, for which there is no public name.

    The bytes that may come next do not tell them apart. After `00` and after `0i`, `\w+ing` allows the same bytes, but the way to an end differs.
    """
    return str(matcher._debug_print_internal_state())


def _closing(mask: Any) -> bytes | None:
    """Return the byte that ends a value or a container, if one may come next."""
    return next((bytes([byte]) for byte in b"}]," if int(mask[byte >> 5]) >> (byte & 31) & 1), None)


def _finishes(matcher: Any, ending: bytes) -> bool:
    matcher = matcher.fork()
    return bool(matcher.accept_string(ending) and matcher.is_terminated())


def _in_string(text: bytes) -> bool:
    r"""Return whether a text ends inside a JSON string.

    >>> [_in_string(text) for text in (b'{"a', b'{"a"', rb'{"a\\"', rb'{"a\\\\"')]
    [True, False, True, False]
    """
    return re.sub(rb"\\.", b"", text, flags=re.DOTALL).count(b'"') % 2 == 1


def _pending(text: bytes) -> bytes:
    """Return the end of a text as far as it limits what may follow: an open escape, or the lead byte of a character."""
    backslashes = len(text) - len(text.rstrip(b"\\"))
    if backslashes:
        return b"\\" if backslashes % 2 else b""
    return text[-1:] if text[-1:] in _PENDING else b""


def _packed(bits: Any) -> torch.Tensor:
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy()).unsqueeze(0)


@cache
def _byte_compiler() -> Any:
    xgrammar = _xgrammar()
    words = [bytes([byte]) for byte in range(256)]
    return xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo([*words, b"<end>"], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256])
    )


def _compiled(compiler: Any, schema: str) -> Any:
    with _lock:
        try:
            return compiler.compile_json_schema(schema, any_whitespace=False)
        except RuntimeError as error:
            raise InvalidSchema(f"xgrammar does not take this schema: {error}") from error


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError as error:
        raise ExtraRequired("xgrammar", "structured") from error
    return xgrammar
