"""Decoding that follows a structural tag of xgrammar: an object of a JSON schema, or text that may turn into calls.

A text that runs out of tokens ends there, with `finish_reason` "length", and parsing it raises `IncompleteObject`.

>>> class Departure(BaseModel):  # doctest: +SKIP
...     vessel: Literal["ferry", "barge"]
...     hour: int = Field(ge=0, le=23)
>>> generate_structured(lm, lm.chat_prompt("When does it leave?", documents), Departure)  # doctest: +SKIP
Departure(vessel='ferry', hour=12)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import LogitsProcessor, StoppingCriteria

from invariant_rag.checks import check_kind
from invariant_rag.errors import ExtraRequired, InvalidChoice, InvalidSchema, TokenizerRequired, UnsupportedCombination
from invariant_rag.generation.json_schema import (
    check_complete,
    check_expressible,
    compile_tag,
    json_format,
    json_schema,
    parse_object,
    tag_of,
)
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import as_ids, check_options, is_set, resolve_max_new_tokens, resolve_option
from invariant_rag.locks import ForkSafeLock
from invariant_rag.prompts import control_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from invariant_rag.segments import Prompt

__all__ = ["Constraint", "check_complete", "constrain", "generate_structured", "json_schema", "parse_object"]

T = TypeVar("T")

CACHE_BYTES = 1 << 28
"""Of grammars that are kept once they are compiled: schemas from outside are without number."""
# What xgrammar lets into strings of JSON though it is none in UTF-8: control characters, overlong forms, and halves of
# surrogate pairs, as bytes and behind \u (any character can be written as itself).
_BROKEN = re.compile(rb"[\x00-\t\v\f\x0e-\x1f]|\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]|(?<!\\)(?:\\\\)*\\u")
_LEADING = (b"\xe0", b"\xed", b"\xf0")  # behind these, as behind a backslash, some bytes would be broken

compile_elsewhere: ContextVar[Callable[[Vocabulary, str], Any] | None] = ContextVar("compile_elsewhere", default=None)
"""Compiles a structural tag for a vocabulary: a server does that in a process that can be stopped. None: here."""


@dataclass(frozen=True)
class Constraint:
    """What holds texts to a schema.

    Attributes:
        options: Keywords for one call of `InvariantModel.generate` or `stream`: those given to `constrain`, and more.
    """

    options: dict[str, Any]


def constrain(lm: InvariantModel, schema: Any, *, max_new_tokens: int | None = None, **kwargs: Any) -> Constraint:
    """Return keywords with which a model generates JSON that follows a schema, without control tokens.

    The end of the JSON ends the generation, with `finish_reason` "stop"; a text that needs more tokens than there are
    ends with "length".

    Args:
        lm: The model.
        schema: A pydantic class, another type that pydantic knows, or a JSON schema as dict or string.
        max_new_tokens: The most tokens to generate. None: as for `InvariantModel.generate`.
        **kwargs: Further keywords of `generate`.

    Raises:
        ExtraRequired: xgrammar is not installed.
        InvalidSchema: It is no schema, or has a keyword that xgrammar does not follow.
        TokenizerRequired: The model has no tokenizer.
        UnsupportedCombination: There are beams or stop strings.
    """
    check_kind("lm", lm, InvariantModel)
    if lm.tokenizer is None:
        raise TokenizerRequired("expected a model with a tokenizer: an object is written as text")
    described = json_schema(schema)
    check_expressible(described)
    return follow(lm, tag_of(json_format(described)), max_new_tokens, kwargs)


def follow(
    lm: InvariantModel,
    tag: str,
    max_new_tokens: int | None,
    kwargs: dict[str, Any],
    *,
    trigger: str = "",
    literals: str = "",
    turn_ends: Sequence[int] = (),
) -> Constraint:
    """Return keywords with which the texts of a model follow a structural tag; see `constrain`.

    A text is free up to the trigger; only `literals`, around JSON, may hold control tokens; `turn_ends` end a text as
    the model's own end tokens do.
    """
    check_options(kwargs, lm.model)
    tokenizer, defaults = cast("PreTrainedTokenizerBase", lm.tokenizer), lm.model.generation_config
    refused = [name for name in ("num_beams", "stop_strings") if is_set(resolve_option(kwargs, name, defaults))]
    if refused:
        raise UnsupportedCombination(
            f"expected keywords that leave an object whole, got {' and '.join(refused)}",
            hint="Leave them away; those of a generation_config too.",
        )
    words = vocabulary(tokenizer, lm.model.config.get_text_config(decoder=True).vocab_size)
    ends = [*as_ids(resolve_option(kwargs, "eos_token_id", defaults)), *as_ids(defaults.eos_token_id), *turn_ends]
    stops = frozenset(each for each in ends or as_ids(tokenizer.eos_token_id) if each < len(words.words))
    processor = GrammarProcessor(words, tag, stops, trigger, literals)
    return Constraint(
        {
            **kwargs,
            "max_new_tokens": resolve_max_new_tokens(max_new_tokens, kwargs),
            "logits_processor": [*(kwargs.get("logits_processor") or ()), processor],
            "stopping_criteria": [*(kwargs.get("stopping_criteria") or ()), GrammarComplete(processor)],
        }
    )


@overload
def generate_structured(lm: InvariantModel, prompt: Prompt, schema: type[T], **kwargs: Any) -> T: ...


@overload
def generate_structured(lm: InvariantModel, prompt: Prompt, schema: dict[str, Any] | str, **kwargs: Any) -> Any: ...


def generate_structured(lm: InvariantModel, prompt: Prompt, schema: Any, **kwargs: Any) -> Any:
    """Generate an object: an instance of a pydantic class, or what JSON of a schema says.

    The keywords are those of `constrain`; that the prompt should describe the schema is up to the caller. A routed
    model writes two texts, and one is kept.

    Raises:
        IncompleteObject: The text was cut off: it needs more tokens than `max_new_tokens`.
        InvalidChoice: There is more than one prompt.
        InvalidObject: The class rejects the text, with a rule that no grammar expresses.
        InvariantRAGError: As for `constrain`.
    """
    if isinstance(prompt, list | tuple):
        raise InvalidChoice(f"expected one prompt for an object, got {len(prompt)}", hint="Ask for one after another.")
    options = constrain(lm, schema, **kwargs).options
    return parse_object(lm.generate(prompt, **options).text, schema)


class Vocabulary:
    """The tokens of a model, for xgrammar (`info`) and as bytes (`words`)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise ExtraRequired("xgrammar", "structured") from error
        self.info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
        self.words: list[bytes] = self.info.decoded_vocab
        self._controls = {index: name for index, name in control_tokens(tokenizer).items() if index < size}
        self._compiler = xgrammar.GrammarCompiler(self.info, cache_limit_bytes=CACHE_BYTES)
        self.allowed = lru_cache(maxsize=64)(self._allowed)

    @cached_property
    def serialized(self) -> str:
        """The tokens as JSON, for another process."""
        return str(self.info.serialize_json())

    def compile(self, tag: str) -> Any:
        """Compile a structural tag, which is kept, or raise InvalidSchema. Several threads may do so at a time."""
        elsewhere = compile_elsewhere.get()
        return compile_tag(self._compiler, tag) if elsewhere is None else elsewhere(self, tag)

    def _allowed(self, before: bytes, quoted: bool, literals: str, stops: frozenset[int]) -> torch.Tensor:
        """Return which tokens may follow in JSON where its grammar allows them: bits `[size / 32]`.

        `before` is the end of the text, if that begins a character or an escape. Only `literals` have control tokens.
        Outside of strings (not `quoted`), a tab is white space.
        """
        allowed = np.zeros(-(-len(self.words) // 32) * 32, dtype=bool)
        in_string = (quoted or b'"' in word for word in self.words)
        allowed[: len(self.words)] = [
            not (inside and _BROKEN.search(before + word)) for inside, word in zip(in_string, self.words, strict=True)
        ]
        allowed[[index for index, name in self._controls.items() if name not in literals]] = False
        allowed[list(stops)] = True
        return torch.from_numpy(np.packbits(allowed, bitorder="little").view(np.int32).copy())


_lock = ForkSafeLock()
_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, dict[int, Vocabulary]] = WeakKeyDictionary()


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int) -> Vocabulary:
    """Return the vocabulary of a model with so many logits, which is built once."""
    with _lock:
        known = _vocabularies.setdefault(tokenizer, {})
        if size not in known:
            known[size] = Vocabulary(tokenizer, size)
        return known[size]


@dataclass(unsafe_hash=True)
class GrammarProcessor(LogitsProcessor):
    """Leaves only tokens that continue the texts of a batch, each of which follows the tag.

    Two of one tag and one model are equal, so that their texts can be rows of one batch.
    """

    words: Vocabulary
    tag: str
    stops: frozenset[int]
    trigger: str
    literals: str
    _seen: torch.Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _texts: list[_Text] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.compiled = self.words.compile(self.tag)

    def __deepcopy__(self, memo: dict[int, Any]) -> GrammarProcessor:
        """Return a processor of texts that have not begun: a routed model writes two answers."""
        return replace(self)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, vocabulary]`, minus infinity but for tokens that may be chosen."""
        from xgrammar import apply_token_bitmask_inplace

        found = scores.clone()
        bits = torch.stack([text.allowed() for text in self.follow(input_ids)])
        apply_token_bitmask_inplace(found, bits.to(scores.device))
        if (found.amax(-1) == -torch.inf).any():
            raise UnsupportedCombination(
                "expected a token that continues the schema, got scores that ban all of them",
                hint="Leave other logits processors away.",
            )
        return found

    def follow(self, input_ids: torch.Tensor) -> Sequence[_Text]:
        """Follow what was appended to prompts and texts `[B, L]`. Where they are others, new texts begin."""
        seen, self._seen = self._seen, input_ids
        if seen is None or not torch.equal(input_ids[:, : seen.shape[1]], seen):
            self._texts = [_Text(self) for _ in input_ids]
        else:
            for text, tokens in zip(self._texts, input_ids[:, seen.shape[1] :].tolist(), strict=True):
                for token in tokens:
                    text.advance(token)
        return self._texts


@dataclass(frozen=True)
class GrammarComplete(StoppingCriteria):
    """Ends a text of a processor where nothing can follow."""

    processor: GrammarProcessor

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return whether each text is finished `[B]`."""
        return torch.tensor([text.done for text in self.processor.follow(input_ids)], device=input_ids.device)


class _Text:
    """One text that grows token by token: where it is in its grammar, and in strings of JSON."""

    def __init__(self, processor: GrammarProcessor) -> None:
        from xgrammar import GrammarMatcher, allocate_token_bitmask

        self._of, self._trigger, self.done = processor, processor.trigger.encode(), False
        self._is_json = not self._trigger
        self._end = b""  # of a free text, what may begin the trigger; of JSON, its last byte
        self._quoted = self._escaped = False
        self._matcher = GrammarMatcher(processor.compiled, override_stop_tokens=sorted(processor.stops) or None)
        self._bits = allocate_token_bitmask(1, len(processor.words.words))
        self._matcher.fill_next_token_bitmask(self._bits)

    def advance(self, token: int) -> None:
        if self.done:
            return
        word = self._of.words.words[token]
        if not self._matcher.accept_token(token):
            raise UnsupportedCombination(
                f"expected a token that continues the text, got {word!r}, which something else than the schema chose",
                hint="Leave other logits processors and stopping criteria away.",
            )
        self._track(word)
        self.done = self._matcher.is_terminated()
        if not self.done:
            self._matcher.fill_next_token_bitmask(self._bits)
            following = np.unpackbits(self._bits.numpy().view(np.uint8), bitorder="little").nonzero()[0]
            self.done = self._matcher.is_completed() and self._of.stops.issuperset(following.tolist())

    def _track(self, word: bytes) -> None:
        """Follow by new bytes alone whether JSON has begun, and whether the text ends within a string of it."""
        if not self._is_json:
            text = self._end + word
            at = text.find(self._trigger)
            if at < 0:
                self._end = text[max(len(text) - len(self._trigger) + 1, 0) :]
                return
            self._is_json, word = True, text[at:]
        for byte in word:
            if self._escaped:
                self._escaped = False
            elif byte == ord("\\"):
                self._escaped = True
            elif byte == ord('"'):
                self._quoted = not self._quoted
        self._end = word[-1:] or self._end

    def allowed(self) -> torch.Tensor:
        """Return which tokens may come next: bits `[size / 32]`."""
        if self.done:
            return torch.full_like(self._bits[0], -1)
        bits = self._bits[0]
        if self._is_json:
            before = self._end if self._escaped or self._end in _LEADING else b""
            kept = bits & self._of.words.allowed(before, self._quoted, self._of.literals, self._of.stops)
            bits = kept if kept.any() else bits  # a constant may have an escape
        if not bits.any():
            raise InvalidSchema(
                "expected a schema that texts can follow, got one of which no text begins as this one does",
                hint='A pattern cannot ask for quotes, backslashes and control characters: ", \\ and \\n.',
            )
        return bits
