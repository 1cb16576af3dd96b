"""Tokenize every part of a prompt separately, so that untrusted text never becomes a control token.

Names of control tokens in such text are cut while a template is rendered, and never matched. A copy of the tokenizer
encodes such text; its control tokens have random names.
"""

from __future__ import annotations

import json
import re
import secrets
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, proxy

from invariant_rag.checks import check_text
from invariant_rag.errors import InvalidPrompt, InvalidSegment, InvariantRAGError, TokenizerRequired
from invariant_rag.locks import ForkSafeLock
from invariant_rag.orderings.base import Candidate
from invariant_rag.prompts.template_probes import control_tokens, rendered_probes
from invariant_rag.segments import (
    Prompt,
    Segment,
    SegmentSet,
    Text,
    TokenIds,
    as_token_ids,
    plain_rendering,
    replace_surrogates,
)
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

CUT = "\ueca4\ueca6\ueca5"  # in a rendered text, makes the name of a control token literal
PRIVATE = "\ueca4\ueca5\ueca6"  # placeholders of cuts and sets in a rendered text, removed from every message
_PRIVATE = re.compile(f"[{PRIVATE}]")
_AFTER = rf"\g<0>{CUT}"
_SPACE = "\u2581"  # SentencePiece's mark of a space
_CHOSEN_KEYS = {"$defs", "arguments", "definitions", "patternProperties", "properties"}  # keys are from outside, too
_LONG = 4096  # characters
_SAMPLE = "A harbour, 3 ships."
_NONCE = secrets.token_hex(8)


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as token ids."""

    texts: tuple[TokenIds, ...]  # around the sets
    sets: tuple[tuple[Candidate, ...], ...]  # of segments in input order, to be ranked


def tokenize_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> TokenizedPrompt:
    """Tokenize every text and every segment of a prompt separately.

    Special tokens are parsed in texts and are literal in segments. Those that the tokenizer prepends to a text (bos)
    are prepended to the first text, unless it starts with them. Token ids are not changed, and get no bos. Text without
    a tokenizer is a `TokenizerRequired`.
    """
    if not isinstance(prompt, Prompt):
        hint = "Build one with lm.chat_prompt(question, documents), or with Prompt(prefix, segments, suffix)."
        raise InvalidPrompt(f"expected a Prompt, got {type(prompt).__name__}", hint=hint)
    literals = None if tokenizer is None else literals_of(tokenizer)
    texts = list(map(_encode_text if literals is None else literals.encode_text, prompt.texts))
    first, last = prompt.texts[0], prompt.texts[-1]
    if literals is not None and isinstance(first, str) and (first or isinstance(last, str)):
        start = literals.leading_ids()
        if texts[0][: len(start)] != start:
            texts[0] = start + texts[0]
    sets = []
    for each in prompt.sets:
        segments = tuple(each)
        written = list(map(prompt.rendering if each.slots is None else plain_rendering, segments))
        encoded = _encode_segments(segments, written, literals)
        texts_of: list[str | None] = [*written]
        for index, ids in enumerate(map(attrgetter("token_ids"), segments)):
            if ids is not None:
                texts_of[index] = None if tokenizer is None else str(tokenizer.decode(list(ids)))
        sets.append(tuple(map(Candidate, segments, encoded, texts_of)))
    return TokenizedPrompt(tuple(texts), tuple(sets))


def tokenize_in_slots(
    segments: SegmentSet, ranks: Sequence[int], tokenizer: PreTrainedTokenizerBase | None
) -> list[TokenIds]:
    """Tokenize segments, listed by rank, each in its physical slot. Rank 0 takes the last: the nearest."""
    ranked = [segments[index] for index in ranks]
    slots = reversed(segments.slots or ())
    written = [slot.render(segment) for segment, slot in zip(ranked, slots, strict=True)]
    return _encode_segments(ranked, written, None if tokenizer is None else literals_of(tokenizer))


def tokenize_text(text: str | Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> TokenIds:
    """Tokenize a text that continues a prompt: special tokens are parsed, and no bos is prepended."""
    if not isinstance(text, str):
        return as_token_ids(text, InvalidPrompt)
    return _encode_text(text) if tokenizer is None else literals_of(tokenizer).encode_text(text)


def tokenize_literal(text: str, tokenizer: PreTrainedTokenizerBase) -> TokenIds:
    """Tokenize untrusted text: the names of control tokens in it are plain text, and no control token is returned."""
    return literals_of(tokenizer).encode_literal([text])[0]


def _encode_text(text: Text) -> TokenIds:
    if text and isinstance(text, str):
        raise TokenizerRequired("expected token ids: the model has no tokenizer, and the prompt holds text")
    return text or ()


def _encode_segments(segments: Sequence[Segment], written: list[str], literals: Literals | None) -> list[TokenIds]:
    """Return the token ids of segments: their own, or those of their rendered text."""
    known_ids = list(map(attrgetter("token_ids"), segments))
    if literals is not None and known_ids.count(None) == len(known_ids):
        return literals.encode_literal(written)
    texts = [text for ids, text in zip(known_ids, written, strict=True) if ids is None]
    if literals is None and any(texts):
        raise TokenizerRequired("expected token ids: the model has no tokenizer, and a segment or its slot holds text")
    encoded = iter([()] * len(texts) if literals is None else literals.encode_literal(texts))
    return [next(encoded) if ids is None else ids for ids in known_ids]


@dataclass(frozen=True)
class Trusted:
    """A text in a message in which names of control tokens count. Whoever writes it can write turns of any role."""

    text: str

    def __post_init__(self) -> None:
        check_text("text", self.text, error=InvalidPrompt)

    def __str__(self) -> str:
        return _PRIVATE.sub("", self.text)


def literals_of(tokenizer: PreTrainedTokenizerBase) -> Literals:
    """Return what makes text literal for a tokenizer: made once, as long as it has the same control tokens."""
    control = control_tokens(tokenizer)
    known = _literals.get(tokenizer)
    if known is None or known.control is not control:
        known = _literals[tokenizer] = Literals(tokenizer, control)
    return known


class Literals:
    """Makes text from outside literal, for one tokenizer with its control tokens as they are now."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: Mapping[int, str]) -> None:
        self.control = control
        self._tokenizer = proxy(tokenizer)  # the key of `_literals` must stay collectable
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = ForkSafeLock()
        self._sample = list(tokenizer(_SAMPLE, add_special_tokens=False, verbose=False)["input_ids"])
        self._normalizer = None if self._backend is None else self._backend.normalizer
        self._index = {name: index for index, name in control.items()}
        bare = {name.strip(_SPACE) for name in self._index if _SPACE in name} - {""}
        for spelling, index in self._other_spellings(tokenizer):
            self._index.setdefault(spelling, index)
        self._unknown_is_control = tokenizer.unk_token_id in control
        names = {*self._index, *bare}
        whole_words = frozenset(each.content for each in tokenizer.added_tokens_decoder.values() if each.single_word)
        self._rendered = _pattern(self._index, whole_words)
        self._names = re.compile(f"(?=({_pattern(names).pattern}))")  # names may overlap
        self._closings, self._openings = _cuts(names)
        folded = {self._normalized(name).strip(f" {_SPACE}") for name in self._index} - {""}
        self._folded = re.compile("|".join([*map(re.escape, _first_signs(folded)), _pattern(folded).pattern]))
        ends = sorted(names | folded)
        self._joined, self._longest = "\0".join(ends), max(map(len, ends), default=0)
        self._beginnings = tuple({name[:at] for name in ends for at in range(1, len(name))})
        self._endings = tuple({name[at:] for name in ends for at in range(1, len(name))})

    def _other_spellings(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, int]]:
        """Yield other spellings of names: with a space for SentencePiece's mark, and as the template has them."""
        if self._backend is None:
            return
        for index, name in self.control.items():
            spaced = name.replace(_SPACE, " ")
            if spaced != name and index in self._backend.encode(spaced, add_special_tokens=False).ids:
                yield spaced, index
        for text in rendered_probes(tokenizer) if self._normalizer is not None else ():
            encoded = self._backend.encode(text, add_special_tokens=False)
            for index, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
                if index in self.control and (name := text[start:stop].strip()):
                    yield name, index

    def cut(self, value: Any, key: str = "") -> Any:
        """Keep a string, or JSON with strings in it, from forming names of control tokens.

        The cuts are where a name could begin or end, so a template may also leave parts of the text away, or write
        something beside it. `key` is the field of the value: types of a schema are words that templates compare.
        """
        if isinstance(value, str):
            text = _PRIVATE.sub("", value)
            if self._unknown_is_control and self._aliased is not None:
                self._refuse_control(text, _ids(self._aliased, [text])[0], InvalidPrompt)
            return self._cut_names(text) if key == "type" else self._cut_off(text)
        if isinstance(value, Mapping):
            cut_key = self.cut if key in _CHOSEN_KEYS else self._cut_key
            return {cut_key(name): self.cut(each, name) for name, each in value.items()}
        return [self.cut(each, key) for each in value] if isinstance(value, list | tuple) else value

    def _refuse_control(self, text: str, ids: TokenIds, error: type[InvariantRAGError]) -> None:
        if names := sorted({self.control[index] for index in ids if index in self.control}):
            told = f"the tokenizer encodes a part of {shown(text)} as a control token: {', '.join(names)}"
            raise error(told, hint="Remove what it cannot encode as text, or use another tokenizer.")

    def _cut_key(self, key: Any) -> Any:
        """Cut a key, unless it is a word: templates access keys by their names."""
        is_word = not isinstance(key, str) or (key.removeprefix("$").isidentifier() and not self._names.search(key))
        return key if is_word else self.cut(key)

    def holds_name(self, text: str) -> bool:
        """Return whether a text holds a name, its beginning or its end; or placeholders of cuts and sets."""
        return self._cut_names(text) != text or _PRIVATE.search(text) is not None

    def _cut_names(self, text: str) -> str:
        cut = self._openings.sub(_AFTER, self._closings.sub(CUT, text))
        if cut == text and self._normalizer is not None and self._folded.search(self._normalized(text)):
            return text[0] + CUT + text[1:]  # perhaps the name of a control token in other letters
        return cut

    def _cut_off(self, text: str) -> str:
        """Cut names inside a text, and its edges where they could form a name with text of the template."""
        words = text.strip()
        start = text.find(words)
        leading, trailing = text[:start], text[start + len(words) :]
        first, last = self._open_edges(words)
        before, after = self._open_edges(text) if leading or trailing else (False, False)
        marked = CUT * first + self._cut_names(words) + CUT * last
        return CUT * before + leading + marked + trailing + CUT * after

    def _open_edges(self, text: str) -> tuple[bool, bool]:
        """Return whether a text could form a name together with what a template writes before it, and after it."""
        before = self._normalizer is not None and unicodedata.combining(text[:1] or " ") > 0
        after = False
        for each in (text,) if self._normalizer is None else (text, self._normalized(text)):
            inside = 0 < len(each) < self._longest and "\0" not in each and each in self._joined
            before = before or inside or each.startswith(self._endings)
            after = after or inside or each.endswith(self._beginnings)
        return before, after

    def needed_cuts(self, text: str) -> str:
        """Return a rendered text with only the cuts inside of names; all, if a normalizer may make names of others."""
        if self._normalizer is not None or CUT not in text:
            return text
        parts = text.split(CUT)
        inside: set[int] = set()
        for match in self._names.finditer("".join(parts)):
            start, stop = match.span(1)
            inside.update(range(start + 1, max(stop, start + 2)))
        offsets = accumulate(map(len, parts[:-1]))
        joined = (part + (CUT if offset in inside else "") for part, offset in zip(parts, offsets, strict=False))
        return "".join(joined) + parts[-1]

    def encode_text(self, text: Text) -> TokenIds:
        """Return ids of a text in which names of control tokens count, unless they are cut; ids as they are."""
        if not isinstance(text, str):
            return text
        if CUT not in text:
            return self._called(text) if self._plain is None else _ids(self._plain, [text])[0]
        if self._aliased is None:  # the two halves of a name are tokenized separately
            return tuple(index for part in text.split(CUT) for index in self._called(part))
        aliased = self._rendered.sub(lambda match: _alias(self._index[match[0]]), text)
        return _ids(self._aliased, [aliased.replace(CUT, "")])[0]

    def encode_literal(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return ids of untrusted texts: names of control tokens in them are plain text, or raise `InvalidSegment`."""
        found = list(map(self._encode_halves, texts)) if self._aliased is None else _ids(self._aliased, texts)
        for text, ids in zip(texts, found, strict=True):
            if not self.control.keys().isdisjoint(ids):
                self._refuse_control(text, ids, InvalidSegment)
        return found

    def leading_ids(self) -> TokenIds:
        """Return the special tokens that the tokenizer prepends to a text, such as bos."""
        if self._plain is None or self._backend is None:
            bare, full = (list(self._called("a", add_special_tokens=each)) for each in (False, True))
        else:
            encoded = self._plain.encode("a", add_special_tokens=False)
            processor = self._backend.post_processor  # the one of now: `add_bos_token` may have changed it
            bare, full = encoded.ids, (encoded if processor is None else processor.process(encoded, None, True)).ids
        for at in range(len(full)):
            if full[at : at + len(bare)] == bare:
                return tuple(full[:at])
        return ()

    def _called(self, text: str, **options: bool) -> TokenIds:
        """Return ids as the tokenizer itself encodes a text. It stores the options of a call, so threads take turns."""
        clean = replace_surrogates(text)
        with self._lock:
            return tuple(self._tokenizer(clean, verbose=False, **{"add_special_tokens": False, **options})["input_ids"])

    def _encode_halves(self, text: str) -> TokenIds:
        """Encode text, bisecting it until no control token is matched: a normalizer may turn other text into a name."""
        ids = self._called(text, split_special_tokens=True)
        if len(text) < 2 or self.control.keys().isdisjoint(ids):
            return ids
        middle = len(text) // 2
        return self._encode_halves(text[:middle]) + self._encode_halves(text[middle:])

    def _normalized(self, text: str) -> str:
        return text if self._normalizer is None else self._normalizer.normalize_str(replace_surrogates(text))

    @cached_property
    def _plain(self) -> Tokenizer | None:
        """A copy of the tokenizer, of which no call keeps options. None if there is none that encodes alike."""
        return self._copy({})

    @cached_property
    def _aliased(self) -> Tokenizer | None:
        """A copy with other names for its control tokens, and for special ones. None if there is none."""
        names = {each.content: index for index, each in self._tokenizer.added_tokens_decoder.items() if each.special}
        copy = self._copy({name: _alias(index) for name, index in {**names, **self._index}.items()})
        known = copy is not None and all(
            index in copy.encode(_alias(index), add_special_tokens=False).ids for index in self.control
        )
        return copy if known else None

    def _copy(self, alias: Mapping[str, str]) -> Tokenizer | None:
        """Return a copy in which tokens have other names; None if it is written in Python, in whole or in part."""
        from tokenizers import Tokenizer

        try:
            state = json.loads(self._backend.to_str())  # type: ignore[union-attr]
        except Exception:  # noqa: BLE001 - there is none, or a component is written in Python: what tokenizers raises
            return None
        _rename(state, alias)
        copy = Tokenizer.from_str(json.dumps(state))
        return copy if copy.encode(_SAMPLE, add_special_tokens=False).ids == self._sample else None


_literals: WeakKeyDictionary[PreTrainedTokenizerBase, Literals] = WeakKeyDictionary()


def _first_signs(names: Iterable[str]) -> list[str]:
    return sorted({name[0] for name in names if not name[0].isalnum()})


def _cuts(names: Iterable[str]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return where texts are cut: before the last sign of a name, and after its first."""
    bare = {name: name.strip(f"{_SPACE} \n\r\t") or name for name in names}
    closings = sorted({name[-1] for name in bare.values() if len(name) > 1 and not name[-1].isalnum()})
    words = {name for name, each in bare.items() if each[0].isalnum()}
    openings = "|".join([f"(?={_pattern(words).pattern})(?s:.)", *map(re.escape, _first_signs(bare.values()))])
    return re.compile(f"(?={'|'.join(map(re.escape, closings)) or '(?!)'})"), re.compile(openings)


def _ids(tokenizer: Tokenizer, texts: Iterable[str]) -> list[TokenIds]:
    """Return ids of texts. A long one is a batch of one: only then is the interpreter's lock free meanwhile."""
    found = []
    for text in texts:
        clean, options = text if text.isascii() else replace_surrogates(text), {"add_special_tokens": False}
        is_long = len(clean) >= _LONG
        encoded = tokenizer.encode_batch([clean], **options)[0] if is_long else tokenizer.encode(clean, **options)
        found.append(tuple(encoded.ids))
    return found


def _alias(index: int) -> str:  # no text holds it, and normalizers leave it: letters and digits
    return f"\ua66e{_NONCE}{index}\ua66e"


def _pattern(names: Iterable[str], whole_words: frozenset[str] = frozenset()) -> re.Pattern[str]:
    """Return a pattern of names, the longest first. A name of one character counts unless a cut follows."""

    def each(name: str) -> str:
        escaped = re.escape(name) + (f"(?!{CUT})" if len(name) == 1 else "")
        return rf"(?<!\w){escaped}(?!\w)" if name in whole_words else escaped

    return re.compile("|".join(map(each, sorted(names, key=lambda name: (-len(name), name)))) or r"(?!)")


def _rename(state: dict[str, Any], alias: Mapping[str, str]) -> None:
    """Rename tokens in the state of a tokenizer: added ones, and those that its model might choose for a text."""
    state.update(truncation=None, padding=None, post_processor=None)
    for token in state["added_tokens"]:
        if token["content"] in alias:  # aliases are words, side by side
            token.update(content=alias[token["content"]], single_word=False)
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {alias.get(name, name): index for name, index in model["vocab"].items()}
    else:
        model["vocab"] = [[alias.get(name, name), score] for name, score in model["vocab"]]
    if "merges" in model:
        pairs = (each.split(" ", 1) if isinstance(each, str) else each for each in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if alias.keys().isdisjoint((a, b, a + b))]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = alias.get(model["unk_token"], model["unk_token"])
