"""Documents that a prompt holds in another form: cut, wrapped into other lines, or in other letter case."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from invariant_rag.prompts.known_documents import KnownDocument

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+")
_PHRASE = 5
"""Neighbouring words, or ideographs, that hardly occur in two texts by chance."""
_BEGINNING = 3
"""The first words of a document that was cut: their place tells, too."""
_PREFIX = 10
"""The first characters of a document that was cut within a word."""

Run = tuple[str, ...]


@dataclass(frozen=True)
class _Words:
    """The words of a text, and runs of them that tell it from others."""

    words: Run
    runs: frozenset[Run]
    prefix: str

    @classmethod
    @lru_cache(maxsize=4096)  # documents are handed from run to run
    def of(cls, text: str) -> _Words:
        words = tuple(_WORD.findall(text.casefold()))
        length = _PHRASE if words and re.match(f"[{_IDEOGRAPHS}]", words[0]) else _BEGINNING
        runs = frozenset((*_runs(words, _PHRASE), *([words[:length]] if len(words) >= length else [])))
        joined = " ".join(words)
        return cls(words, runs, joined[:_PREFIX] if len(joined) > _PREFIX and length == _BEGINNING else "")


def count_rewritten(text: str, documents: Sequence[KnownDocument]) -> int:
    """Return how many documents a text holds in part: five words of it in a row, or its beginning.

    White space, letter case and punctuation do not matter. Words that several documents hold count once.

    >>> from invariant_rag.segments import Segment
    >>> texts = ["The ferry leaves at noon.", "Salt is sold in Brenn."]
    >>> count_rewritten("THE FERRY LEAVES. SALT IS SOLD", [KnownDocument.of(Segment(each)) for each in texts])
    2
    """
    texts = list(dict.fromkeys(each.segment.text for each in documents))
    held = _held(text, texts)
    return sum(map(bool, _own(held, texts))) or int(any(held))


def documents_in_part(text: str, documents: Sequence[str]) -> list[int]:
    """Return which documents a text holds in part, by words in a row that no other of them has; not by a prefix.

    >>> documents_in_part("So the ferry leaves!", ["The ferry leaves at noon.", "The mill grinds barley."])
    [0]
    """
    held = _own(_held(text, documents), documents)
    return [index for index, own in enumerate(held) if any(len(run) > 1 for run in own)]


def _held(text: str, documents: Sequence[str]) -> list[set[Run]]:
    """Return, for each document, the runs of its words and the prefix that a text holds."""
    words = _WORD.findall(text.casefold())
    runs = {run for length in (_BEGINNING, _PHRASE) for run in _runs(words, length)}
    joined = f" {' '.join(words)}"
    known = map(_Words.of, documents)
    return [
        {run for run in each.runs if run in runs}
        | ({(each.prefix,)} if each.prefix and f" {each.prefix}" in joined else set())
        for each in known
    ]


def _own(held: Sequence[set[Run]], documents: Sequence[str]) -> list[set[Run]]:
    """Return, for each document, what is held of it and not part of another one."""
    known = map(_Words.of, documents)
    counts = Counter(run for each in known for run in {*each.runs, (each.prefix,)})
    return [{run for run in mine if counts[run] == 1} for mine in held]


def _runs(words: Sequence[str], length: int) -> Iterable[Run]:
    """Return every run of neighbouring words of a length."""
    return zip(*(words[start:] for start in range(length)), strict=False)
