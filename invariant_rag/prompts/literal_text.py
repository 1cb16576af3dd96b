"""Text from outside stays text: names of control tokens in it are cut while a template is rendered, and never matched.

Such text is read by a copy of the tokenizer in which control tokens have other names, which nobody can know. There, a
name in the text is like any other word, and what the model reads is the text, character by character.
"""

from __future__ import annotations

import json
import re
import secrets
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from invariant_rag.checks import check_text
from invariant_rag.errors import InvalidPrompt
from invariant_rag.locks import ForkSafeLock
from invariant_rag.prompts.control_tokens import control_tokens, rendered_probes
from invariant_rag.segments import TokenIds, replace_surrogates
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

CUT = "\ueca4\ueca6\ueca5"
"""In a rendered text, cuts the name of a control token that came from outside: the name is literal."""

PRIVATE = "\ueca4\ueca5\ueca6"
"""Characters that stand for cuts and sets in a rendered text. They are removed from every text of a message."""

_SPACE = "\u2581"
"""SentencePiece's mark of a space."""

_PRIVATE = re.compile(f"[{PRIVATE}]")
_CHOSEN_KEYS = frozenset({"$defs", "arguments", "definitions", "patternProperties", "properties"})
"""Fields of tools and calls in which the keys of an object come from outside too."""
_LONG = 4096  # characters
_SAMPLE = "A harbour, 3 ships."
_NONCE = secrets.token_hex(8)
_literals: WeakKeyDictionary[PreTrainedTokenizerBase, Literals] = WeakKeyDictionary()


@dataclass(frozen=True)
class Trusted:
    """A text in a message in which names of control tokens are control tokens. All other text in messages is literal.

    Attributes:
        text: The text. Whoever can write it can write turns of any role.
    """

    text: str

    def __post_init__(self) -> None:
        check_text("text", self.text, error=InvalidPrompt)

    def __str__(self) -> str:
        return _PRIVATE.sub("", self.text)


def literals_of(tokenizer: PreTrainedTokenizerBase) -> Literals:
    """Return what makes text literal for a tokenizer. It is made once per tokenizer and control tokens."""
    control = control_tokens(tokenizer)
    known = _literals.get(tokenizer)
    if known is None or known.control is not control:
        known = _literals[tokenizer] = Literals(tokenizer, control)
    return known


class Literals:
    """Makes text from outside literal, for one tokenizer as it is now.

    Args:
        tokenizer: The tokenizer.
        control: Its control tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: Mapping[int, str]) -> None:
        self.control = control
        self._backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        self._lock = ForkSafeLock()
        self._sample = list(tokenizer(_SAMPLE, add_special_tokens=False, verbose=False)["input_ids"])
        self._normalizer = None if self._backend is None else self._backend.normalizer
        whole_words = {each.content for each in tokenizer.added_tokens_decoder.values() if each.single_word}
        self._index = {name: index for index, name in control.items()}
        bare = {name.strip(_SPACE) for name in self._index if _SPACE in name} - {""}
        self._index |= {spaced: index for spaced, index in self._spaced() if spaced not in self._index}
        if self._normalizer is not None:
            self._index |= {name: index for name, index in self._respelled(tokenizer) if name not in self._index}
        self._unknown_is_control = tokenizer.unk_token_id in control
        names = {*self._index, *bare}
        self._marks = _Marks(names)
        self._rendered = _pattern(self._index, whole_words)
        self._names = re.compile(f"(?=({_pattern(names).pattern}))")  # names may overlap
        folded = {self._normalized(name).strip(f" {_SPACE}") for name in self._index} - {""}
        self._folded = _pattern(folded)
        self._folded_openings = frozenset(_Marks(folded).openings)
        self._edges = _Edges(names)
        self._folded_edges = _Edges(folded)

    def _spaced(self) -> Iterator[tuple[str, int]]:
        """Yield names as they are in a text, where a piece of SentencePiece holds the mark of a space for a space."""
        for index, name in self.control.items():
            spaced = name.replace(_SPACE, " ")
            if spaced != name and self._backend is not None:
                ids = self._backend.encode(spaced, add_special_tokens=False).ids
                if index in ids:
                    yield spaced, index

    def _respelled(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, int]]:
        """Yield names as the template spells them, where a normalizer makes the tokens' own names of them."""
        if self._backend is None:
            return
        for text in rendered_probes(tokenizer):
            encoded = self._backend.encode(text, add_special_tokens=False)
            for index, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
                if index in self.control and (name := text[start:stop].strip()):
                    yield name, index

    def cut(self, value: Any, key: str = "") -> Any:
        """Keep a string, or JSON with strings in it, from forming names of control tokens.

        The cuts are at every character with which a name begins or ends, so a template may also leave parts of the text
        away without joining a name from the rest. A string is cut off from what the template writes on both sides of
        it, if the two could form a name together. The cuts pass through a chat template, and end in `tokenize_prompt`.
        Characters that stand for cuts and sets in a rendered text are removed.

        Args:
            value: The string or JSON.
            key: The field that it is the value of. Types of a schema are words that templates compare.

        Raises:
            InvalidPrompt: The tokenizer has a control token for a character that it does not know, and the string has
                such a character.
        """
        if isinstance(value, str):
            text = _PRIVATE.sub("", value)
            if self._unknown_is_control:
                self._check_known(text)
            return self._cut_names(text) if key == "type" else self._cut_off(text)
        if isinstance(value, Mapping):
            cut_key = self.cut if key in _CHOSEN_KEYS else self._cut_key
            return {cut_key(name): self.cut(each, name) for name, each in value.items()}
        return [self.cut(each, key) for each in value] if isinstance(value, list | tuple) else value

    def _check_known(self, text: str) -> None:
        found = {self.control[index] for index in self.encode(text) or () if index in self.control}
        if found:
            raise InvalidPrompt(
                f"the tokenizer encodes a character of {shown(text)} as a control token: {', '.join(sorted(found))}",
                hint="Remove what it cannot encode as text, or use another tokenizer.",
            )

    def _cut_key(self, key: Any) -> Any:
        """Cut a key, unless it is a word: templates look for keys by their names."""
        is_word = not isinstance(key, str) or (key.removeprefix("$").isidentifier() and not self._names.search(key))
        return key if is_word else self.cut(key)

    def holds_name(self, text: str) -> bool:
        """Return whether a text holds a name, its beginning or its end; or characters that stand for cuts and sets."""
        return self._cut_names(text) != text or _PRIVATE.search(text) is not None

    def _cut_names(self, text: str) -> str:
        cut = self._marks.cut(text)
        if cut == text and self._normalizer is not None:
            normalized = self._normalized(text)
            if self._folded.search(normalized) or not self._folded_openings.isdisjoint(normalized):
                return text[0] + CUT + text[1:]  # perhaps the name of a control token in other letters
        return cut

    def _cut_off(self, text: str) -> str:
        """Cut the names in a text, and cut it off from what a template may write beside it, or beside its words."""
        words = text.strip()
        start = text.find(words)
        first, last = self._open_edges(words)
        before, after = self._open_edges(text) if words != text else (False, False)
        marked = f"{CUT if first else ''}{self._cut_names(words)}{CUT if last else ''}"
        leading, trailing = text[:start], text[start + len(words) :]
        return f"{CUT if before else ''}{leading}{marked}{trailing}{CUT if after else ''}"

    def _open_edges(self, text: str) -> tuple[bool, bool]:
        """Return whether a text could form a name together with what a template writes before it, and after it."""
        if self._normalizer is None or not text:
            return self._edges.of(text)
        found = [self._edges.of(text), self._folded_edges.of(self._normalized(text))]
        found.append((unicodedata.combining(text[0]) > 0, False))
        return any(before for before, _ in found), any(after for _, after in found)

    def needed_cuts(self, text: str) -> str:
        """Return a rendered text with only those cuts that are inside of names.

        Where a normalizer may make names of other letters, every cut is needed: it says that text is from outside.
        """
        if self._normalizer is not None:
            return text
        pieces = text.split(CUT)
        joined = "".join(pieces)
        inside: set[int] = set()
        for found in self._names.finditer(joined):
            start, stop = found.span(1)
            inside.update(range(start + 1, max(stop, start + 2)))
        places = accumulate(map(len, pieces[:-1]))
        parts = (piece + (CUT if place in inside else "") for piece, place in zip(pieces, places, strict=False))
        return "".join(parts) + pieces[-1]

    def encode_plain(self, text: str, *, split_special_tokens: bool) -> TokenIds | None:
        """Return ids of a text as the tokenizer itself encodes it; None if the tokenizer cannot be copied.

        A fast tokenizer keeps truncation, padding and `split_special_tokens` of its last call, of whichever thread, so
        it is a copy that encodes.
        """
        if self._private is None:
            return None
        with self._lock:
            self._private.encode_special_tokens = split_special_tokens
            return _ids(self._private, text)

    def leading_ids(self) -> TokenIds | None:
        """Return the special tokens that the tokenizer prepends to a text, such as bos; None if it cannot be copied."""
        if self._private is None or self._backend is None:
            return None
        bare = self._private.encode("a", add_special_tokens=False)
        processor = self._backend.post_processor  # the one of now: `add_bos_token` may have changed it
        full = bare if processor is None else processor.process(bare, None, True)
        return leading(full.ids, bare.ids)

    def encode(self, text: str) -> TokenIds | None:
        """Return ids of a text without any control token; None if the tokenizer cannot be copied."""
        if self._copy is None:
            return None
        return _ids(self._copy, text)

    def encode_rendered(self, text: str) -> TokenIds | None:
        """Return ids of a rendered text, in which cut names are literal; None if the tokenizer cannot be copied."""
        aliased = self._rendered.sub(lambda found: _alias(self._index[found[0]]), text)
        return self.encode(aliased.replace(CUT, ""))

    def _normalized(self, text: str) -> str:
        return text if self._normalizer is None else self._normalizer.normalize_str(replace_surrogates(text))

    @cached_property
    def _private(self) -> Tokenizer | None:
        """A copy of the tokenizer. None if it is written in Python, or does more than its fast part does."""
        if self._backend is None:
            return None
        from tokenizers import Tokenizer

        try:
            copy = Tokenizer.from_str(self._backend.to_str())
        except Exception:  # noqa: BLE001 - what tokenizers raises for components that are written in Python
            return None
        copy.no_truncation()
        copy.no_padding()
        return copy if copy.encode(_SAMPLE, add_special_tokens=False).ids == self._sample else None

    @cached_property
    def _copy(self) -> Tokenizer | None:
        """The tokenizer with aliases as names of its control tokens. None if it is written in Python."""
        if self._backend is None:
            return None
        from tokenizers import Tokenizer

        try:
            state = json.loads(self._backend.to_str())
        except Exception:  # noqa: BLE001 - what tokenizers raises for components that are written in Python
            return None
        _rename(state, {name: _alias(index) for name, index in self._index.items()})
        copy = Tokenizer.from_str(json.dumps(state))
        found = [copy.encode(_alias(index), add_special_tokens=False).ids for index in self.control]
        return copy if all(index in ids for index, ids in zip(self.control, found, strict=True)) else None


class _Marks:
    """Cuts texts at the characters with which names begin or end.

    Letters and digits are too common for that: of a name that begins or ends with them, every whole occurrence is cut.

    Attributes:
        openings: The characters with which names begin, if they are no letters.

    Args:
        names: The names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        bare = {name: name.strip(f"{_SPACE} \n\r\t") or name for name in names}
        self.openings = {name[0] for name in bare.values() if not name[0].isalnum()}
        closings = {name[-1] for name in bare.values() if len(name) > 1 and not name[-1].isalnum()}
        words = {name for name, each in bare.items() if each[0].isalnum()}
        after = "|".join([f"(?={_pattern(words).pattern})(?s:.)", *map(re.escape, sorted(self.openings))])
        before = "|".join(map(re.escape, sorted(closings))) or "(?!)"
        self._before, self._after = re.compile(f"(?={before})"), re.compile(after)

    def cut(self, text: str) -> str:
        """Return a text with its cuts."""
        return self._after.sub(lambda found: found[0] + CUT, self._before.sub(CUT, text))


class _Edges:
    """Finds texts that begin with the end of a name, end with its beginning, or are its middle.

    Args:
        names: The names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        listed = sorted(names)
        self._all = "\0".join(listed)
        self._beginnings = tuple({name[:at] for name in listed for at in range(1, len(name))})
        self._endings = tuple({name[at:] for name in listed for at in range(1, len(name))})
        self._longest = max(map(len, listed), default=0)

    def of(self, text: str) -> tuple[bool, bool]:
        """Return whether the text begins with the end of a name, and whether it ends with the beginning of one."""
        if 0 < len(text) < self._longest and "\0" not in text and text in self._all:
            return True, True
        return text.startswith(self._endings), text.endswith(self._beginnings)


def _ids(tokenizer: Tokenizer, text: str) -> TokenIds:
    """Return ids of a text. A long one is a batch of one: only then is the interpreter's lock free meanwhile."""
    clean = text if text.isascii() else replace_surrogates(text)
    if len(clean) < _LONG:
        return tuple(tokenizer.encode(clean, add_special_tokens=False).ids)
    (encoded,) = tokenizer.encode_batch([clean], add_special_tokens=False)
    return tuple(encoded.ids)


def leading(full: list[int], bare: list[int]) -> TokenIds:
    """Return what stands before some ids within others; nothing where they do not occur."""
    return tuple(full[: next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)])


def _alias(index: int) -> str:
    """Return a name that no text holds, and that normalizers leave as it is: letters and digits."""
    return f"\ua66e{_NONCE}{index}\ua66e"


def _pattern(names: Iterable[str], whole_words: Iterable[str] = ()) -> re.Pattern[str]:
    """Return a pattern of names, the longest first. A name of one character counts unless a cut follows."""
    whole = {*whole_words}

    def each(name: str) -> str:
        escaped = re.escape(name) + (f"(?!{CUT})" if len(name) == 1 else "")
        return rf"(?<!\w){escaped}(?!\w)" if name in whole else escaped

    return re.compile("|".join(map(each, sorted(names, key=lambda name: (-len(name), name)))) or r"(?!)")


def _rename(state: dict[str, Any], alias: Mapping[str, str]) -> None:
    """Rename tokens in the state of a tokenizer: added ones, and those that its model might choose for a text."""
    state.update(truncation=None, padding=None, post_processor=None)
    for token in state["added_tokens"]:
        if token["content"] in alias:  # aliases are words, and stand side by side
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
