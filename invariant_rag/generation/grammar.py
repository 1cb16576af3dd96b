"""Texts that follow a grammar of xgrammar while they are generated: a JSON object, or text that may turn into calls."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from time import thread_time
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import LogitsProcessor, StoppingCriteria

from invariant_rag.errors import ExtraRequired, InvalidSchema, UnsupportedCombination
from invariant_rag.generation.json_schema import compile_tag
from invariant_rag.locks import ForkSafeLock
from invariant_rag.prompts import control_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHE_BYTES = 1 << 28
"""Of grammars that are kept once they are compiled: schemas from outside are without number."""
_SECONDS, _TOKEN_SECONDS = 2.0, 0.02  # of a processor, to follow a text, and more for each of its tokens

# What xgrammar lets into strings of JSON though it is none in UTF-8: control characters, overlong forms, halves of
# surrogate pairs; and \u escapes, which may be such halves (any character can be written as itself).
_BROKEN = re.compile(
    rb"[\x00-\x1f]|\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]|\xf4[\x90-\xbf]|(?<!\\)(?:\\\\)*\\u", re.DOTALL
)
_LEADS = (b"\xe0", b"\xed", b"\xf0", b"\xf4")  # ends of a text after which some bytes would be broken

_lock = ForkSafeLock()

Compile: TypeAlias = "Callable[[Vocabulary, str], Any]"
compile_elsewhere: ContextVar[Compile | None] = ContextVar("compile_elsewhere", default=None)
"""Compiles a structural tag for a vocabulary: a server does that in a process that can be stopped. None: here."""


@dataclass(frozen=True)
class Grammar:
    """What a text follows.

    Attributes:
        format: A format of xgrammar's structural tags; vLLM takes them, too.
        trigger: The text is free until it holds this, and what comes then follows the format. Empty: all of it does.
        anchored: Whether the trigger only counts at the beginning of the text.
        reasoning: Markers around reasoning, in which no trigger counts; the first is empty if the prompt has it.
        literals: The text around the JSON of the format, which may have control tokens.
    """

    format: Mapping[str, Any]
    trigger: str = ""
    anchored: bool = False
    reasoning: tuple[str, str] | None = None
    literals: str = ""

    @property
    def tag(self) -> str:
        """The structural tag, as JSON."""
        return json.dumps({"type": "structural_tag", "format": self.format})

    def trigger_ends(self, text: bytes, word: bytes) -> list[int]:
        """Return where triggers end, outside of reasoning, that the last word of a text completes."""
        trigger, start = self.trigger.encode(), len(text) - len(word) - len(self.trigger.encode()) + 1
        if self.reasoning is not None and text.lstrip().startswith(self.reasoning[0].encode()):
            end = text.find(self.reasoning[1].encode())
            start = max(start, len(text) if end < 0 else end + len(self.reasoning[1].encode()))
        found = re.compile(re.escape(trigger)).finditer(text, max(start, 0))
        return [each.end() for each in found if not self.anchored or each.start() == 0]


def json_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format of JSON that follows a schema, with at most one character of white space between its parts."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}


def import_xgrammar() -> Any:
    """Return the package.

    Raises:
        ExtraRequired: It is not installed.
    """
    try:
        import xgrammar
    except ImportError as error:
        raise ExtraRequired("xgrammar", "structured") from error
    return xgrammar


class Vocabulary:
    """The tokens of a model as bytes, and which of them may stand where.

    Attributes:
        info: What xgrammar knows of them.
        words: Their bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, ends: frozenset[int]) -> None:
        xgrammar = import_xgrammar()
        stop = sorted(index for index in ends if index < size) or [size - 1]
        self.info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=stop)
        self.words: list[bytes] = self.info.decoded_vocab
        self._controls = {index for index in control_tokens(tokenizer) if index < size}
        self._compiler = xgrammar.GrammarCompiler(self.info, cache_limit_bytes=CACHE_BYTES)
        self.allowed = lru_cache(maxsize=64)(self._allowed)

    @cached_property
    def serialized(self) -> str:
        """The tokens as JSON, for another process."""
        return str(self.info.serialize_json())

    def compile(self, grammar: Grammar) -> Any:
        """Compile a grammar, which is kept. Several threads may compile at the same time.

        Raises:
            InvalidSchema: xgrammar does not take it.
        """
        elsewhere = compile_elsewhere.get()
        return compile_tag(self._compiler, grammar.tag) if elsewhere is None else elsewhere(self, grammar.tag)

    def _allowed(self, before: bytes | None, literals: str, stops: frozenset[int]) -> torch.Tensor:
        """Return which tokens may follow where the grammar allows them: bits `[1, size / 32]`.

        Args:
            before: Within a string of JSON: its end, if that is a backslash or the lead byte of a character. Else None.
            literals: Text outside of JSON, which may have control tokens.
            stops: Tokens that end a text.
        """
        allowed = np.ones(-(-len(self.words) // 32) * 32, dtype=bool)
        for index in self._controls:
            name = self.words[index].decode(errors="replace")
            allowed[index] = before is None and bool(name) and name in literals
        for index, word in enumerate(self.words) if before is not None else ():
            allowed[index] &= not _BROKEN.search((before or b"") + word)
        allowed[list(stops)] = True
        return torch.from_numpy(np.packbits(allowed, bitorder="little").view(np.int32).copy()).unsqueeze(0)


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


class GrammarProcessor(LogitsProcessor):
    """Leaves only tokens that continue the texts of a batch, each of which follows the grammar.

    Two of one grammar and one model are equal, so that their texts can be rows of one batch.

    Attributes:
        grammar: The grammar.
        stops: Tokens that end a text.

    Args:
        words: The vocabulary.
        grammar: The grammar.
        stops: Tokens that end a text.

    Raises:
        InvalidSchema: xgrammar does not take the grammar.
    """

    def __init__(self, words: Vocabulary, grammar: Grammar, stops: frozenset[int]) -> None:
        self.words, self.grammar, self.stops = words, grammar, stops
        self.compiled = words.compile(grammar)
        self._seen: torch.Tensor | None = None
        self._texts: list[_Text] = []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GrammarProcessor):
            return NotImplemented
        return self.words is other.words and (self.grammar, self.stops) == (other.grammar, other.stops)

    def __hash__(self) -> int:
        return hash((id(self.words), self.grammar.tag, self.stops))

    def __deepcopy__(self, memo: dict[int, Any]) -> GrammarProcessor:
        """Return a processor of texts that have not begun: a routed model writes two answers."""
        other = copy.copy(self)
        other._seen, other._texts = None, []
        return other

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, vocabulary]`, minus infinity but for tokens that may be chosen."""
        texts = self.follow(input_ids)
        return torch.cat([text.constrain(scores[row : row + 1]) for row, text in enumerate(texts)])

    def follow(self, input_ids: torch.Tensor) -> Sequence[_Text]:
        """Follow what was appended to prompts and texts `[B, L]`. Where they are others, new texts begin."""
        seen = self._seen
        if seen is None or len(input_ids) != len(seen) or not torch.equal(input_ids[:, : seen.shape[1]], seen):
            self._texts = [_Text(self) for _ in input_ids]
        else:
            for text, tokens in zip(self._texts, input_ids[:, seen.shape[1] :].tolist(), strict=True):
                for token in tokens:
                    text.advance(token)
        self._seen = input_ids
        return self._texts


@dataclass(frozen=True)
class GrammarComplete(StoppingCriteria):
    """Ends a text of a processor where nothing can follow."""

    processor: GrammarProcessor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return whether each text is finished `[B]`."""
        return torch.tensor([text.done for text in self.processor.follow(input_ids)], device=input_ids.device)


class _Text:
    """One text that grows token by token."""

    def __init__(self, processor: GrammarProcessor) -> None:
        self._of = processor
        self._written = b""
        self._quoted = self._escaped = self.done = False
        self._seconds = _SECONDS
        self._next: torch.Tensor | None = None
        self._matcher: Any = None if processor.grammar.trigger else self._new_matcher()

    def _new_matcher(self) -> Any:
        stops = sorted(self._of.stops) or None
        return import_xgrammar().GrammarMatcher(self._of.compiled, override_stop_tokens=stops)

    def advance(self, token: int) -> None:
        """Follow a token.

        Raises:
            InvalidSchema: Following the grammar takes too long.
            UnsupportedCombination: The grammar does not allow the token.
        """
        if self.done:
            return
        word, began = self._of.words.words[token], thread_time()
        before, self._written, self._next = self._written, self._written + word, None
        if self._matcher is None:
            self._begin(word)
        elif self._matcher.accept_token(token):
            self._note_quotes(word)
        else:
            raise UnsupportedCombination(
                f"expected a token that continues {before!r}, got {word!r}, which something else than the schema chose",
                hint="Leave other logits processors and stopping criteria away.",
            )
        if self._matcher is not None:
            self.done = bool(self._matcher.is_terminated()) or (self._matcher.is_completed() and self._only_stops())
        self._seconds += _TOKEN_SECONDS - (thread_time() - began)
        if self._seconds < 0:
            raise InvalidSchema(
                f"expected a schema whose answers are followed in {_SECONDS:g} seconds, got one that takes longer",
                hint="Leave away nested repetitions in patterns.",
            )

    def _begin(self, word: bytes) -> None:
        """Begin to follow the grammar behind a trigger, unless it does not allow what is there already."""
        for end in self._of.grammar.trigger_ends(self._written, word):
            matcher, rest = self._new_matcher(), self._written[end:]
            if not rest or matcher.accept_string(rest):
                self._matcher = matcher
                self._note_quotes(rest)
                return

    def _note_quotes(self, word: bytes) -> None:
        for byte in word:
            if self._quoted:
                self._quoted = self._escaped or byte != ord('"')
                self._escaped = byte == ord("\\") and not self._escaped
            else:
                self._quoted = byte == ord('"')

    def _allowed(self) -> torch.Tensor:
        """Return which tokens the grammar allows next: bits `[1, size / 32]`."""
        if self._next is None:
            bits: torch.Tensor = import_xgrammar().allocate_token_bitmask(1, len(self._of.words.words))
            self._matcher.fill_next_token_bitmask(bits)
            self._next = bits
        return self._next

    def _only_stops(self) -> bool:
        bits = np.unpackbits(self._allowed().numpy().view(np.uint8), bitorder="little").nonzero()[0]
        return not self._of.stops or self._of.stops.issuperset(bits.tolist())

    def constrain(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[1, vocabulary]`, minus infinity for tokens that cannot continue the text.

        Raises:
            InvalidSchema: None can.
        """
        if self._matcher is None or self.done:
            return scores
        before = self._written[-1:] if self._written[-1:] in _LEADS else b"\\" * self._escaped
        place = before if self._quoted else None
        kept = self._allowed() & self._of.words.allowed(place, self._of.grammar.literals, self._of.stops)
        if self._escaped and not kept.any():  # a constant with an escaped control character
            kept = self._allowed()
        if not kept.any():
            raise InvalidSchema(
                f"expected a schema of which a text begins with {self._written!r}, got one of which none does",
                hint='A pattern cannot ask for quotes, backslashes and control characters: ", \\ and \\n.',
            )
        kept = kept.to(scores.device)
        for candidate in (scores.clone(), torch.zeros_like(scores)):  # zeros: other processors ban all that may follow
            import_xgrammar().apply_token_bitmask_inplace(candidate, kept)
            if candidate.max() > -torch.inf:
                break
        return candidate
