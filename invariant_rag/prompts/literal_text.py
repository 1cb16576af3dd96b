"""Text from outside stays text: names of control tokens in it are cut while a template is rendered, and never matched.

Such text is read by a copy of the tokenizer in which control tokens have other names, which nobody can know. There, a
name in the text is like any other word, and what the model reads is the text, character by character.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from invariant_rag.checks import check_text
from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts.control_tokens import control_tokens
from invariant_rag.segments import TokenIds, replace_surrogates

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
        self._normalizer = None if self._backend is None else self._backend.normalizer
        whole_words = {each.content for each in tokenizer.added_tokens_decoder.values() if each.single_word}
        self._index = {name: index for index, name in control.items()}
        bare = {name.strip(_SPACE) for name in self._index if _SPACE in name} - {""}
        self._index |= {spaced: index for spaced, index in self._spaced() if spaced not in self._index}
        self._starts = re.compile(f"(?s)(?={_pattern({*self._index, *bare}).pattern}).")  # names may overlap
        self._rendered = _pattern(self._index, whole_words)
        folded = {self._normalized(name).strip(f" {_SPACE}") for name in self._index} - {""}
        self._folded = _pattern(folded)
        self._edges = _Edges({*self._index, *bare})
        self._folded_edges = _Edges(folded)

    def _spaced(self) -> Iterator[tuple[str, int]]:
        """Yield names as they are in a text, where a piece of SentencePiece holds the mark of a space for a space."""
        for index, name in self.control.items():
            spaced = name.replace(_SPACE, " ")
            if spaced != name and self._backend is not None:
                ids = self._backend.encode(spaced, add_special_tokens=False).ids
                if index in ids:
                    yield spaced, index

    def cut(self, value: Any) -> Any:
        """Cut every name of a control token in a string, or in JSON with strings in it.

        A string is also cut off from what a template writes on both sides of it, if the two could form a name together.
        Within JSON, templates put strings into quotes. The cut passes through a chat template, and ends in
        `tokenize_prompt`. Characters that stand for cuts and sets in a rendered text are removed.
        """
        if isinstance(value, str):
            before, after = self._open_edges(_PRIVATE.sub("", value))
            return f"{CUT if before else ''}{self._cut_names(value)}{CUT if after else ''}"
        return self._cut_names(value)

    def _cut_names(self, value: Any) -> Any:
        if isinstance(value, str):
            text = _PRIVATE.sub("", value)
            cut = self._starts.sub(lambda found: found[0] + CUT, text)
            if cut == text and self._normalizer is not None and self._folded.search(self._normalized(text)):
                return text[0] + CUT + text[1:]  # the name of a control token in other letters
            return cut
        if isinstance(value, Mapping):
            return {self._cut_names(key): self._cut_names(each) for key, each in value.items()}
        return [self._cut_names(each) for each in value] if isinstance(value, list | tuple) else value

    def _open_edges(self, text: str) -> tuple[bool, bool]:
        """Return whether a text could form a name together with what a template writes before it, and after it."""
        found = [self._edges.of(text)]
        if self._normalizer is not None and text:
            found.append(self._folded_edges.of(self._normalized(text)))
        return any(before for before, _ in found), any(after for _, after in found)

    def encode(self, text: str) -> TokenIds | None:
        """Return ids of a text without any control token; None if the tokenizer cannot be copied."""
        if self._copy is None:
            return None
        return tuple(self._copy.encode(replace_surrogates(text), add_special_tokens=False).ids)

    def encode_rendered(self, text: str) -> TokenIds | None:
        """Return ids of a rendered text, in which cut names are literal; None if the tokenizer cannot be copied."""
        aliased = self._rendered.sub(lambda found: _alias(self._index[found[0]]), text)
        return self.encode(aliased.replace(CUT, ""))

    def _normalized(self, text: str) -> str:
        return text if self._normalizer is None else self._normalizer.normalize_str(replace_surrogates(text))

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


class _Edges:
    """Finds texts that begin with the end of a name, or end with its beginning.

    Args:
        names: The names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        listed = sorted(names)
        self._beginnings = {name[:at] for name in listed for at in range(1, len(name))}
        self._endings = {name[at:] for name in listed for at in range(1, len(name))}
        self._longest = max(map(len, listed), default=0)

    def of(self, text: str) -> tuple[bool, bool]:
        """Return whether the text begins with the end of a name, and whether it ends with the beginning of one."""
        lengths = range(1, min(len(text), self._longest - 1) + 1)
        return (
            any(text[:length] in self._endings for length in lengths),
            any(text[-length:] in self._beginnings for length in lengths),
        )


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
        token["content"] = alias.get(token["content"], token["content"])
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
