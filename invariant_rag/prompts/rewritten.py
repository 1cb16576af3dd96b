"""Documents that a prompt holds in another form: cut, wrapped into other lines, in other letter case, or by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from invariant_rag.prompts.known_documents import KnownDocument
from invariant_rag.segments import Segment, value_of

_WORD = re.compile(r"\w+")
_PHRASE = 5
"""Neighbouring words that hardly occur in two texts by chance."""
_NAME = 4
"""Characters of a title or a source that hardly occurs in other text by chance."""
_BEGINNING = 3
"""The first words of a document that was cut: their place tells, too."""


def count_rewritten(text: str, documents: Sequence[KnownDocument]) -> int:
    """Return how many documents a text holds in part: five words of it in a row, or its first three.

    White space, letter case and punctuation do not matter. Documents that begin alike count once.

    >>> from invariant_rag.segments import Segment
    >>> texts = ["The ferry leaves at noon.", "Salt is sold in Brenn."]
    >>> count_rewritten("THE FERRY LEAVES. SALT IS SOLD", [KnownDocument.of(Segment(each)) for each in texts])
    2
    """
    words = _words(text)
    phrases, beginnings = set(_runs(words, _PHRASE)), set(_runs(words, _BEGINNING))
    held = set()
    for document in documents:
        own = _words(document.segment.text)
        beginning = tuple(own[:_BEGINNING])
        if beginning in beginnings or not phrases.isdisjoint(_runs(own, _PHRASE)):
            held.add(beginning)
    return len(held)


def lists_in_order(text: str, segments: Sequence[Segment]) -> bool:
    """Return whether a text names two of these segments, by title or metadata, in the order in which they come.

    A list of sources below the documents, for example: it would not follow when the documents change places.
    """
    for key in sorted({key for segment in segments for key in ("title", *segment.metadata)}):
        values = [value_of(segment, key) for segment in segments]
        telling = [value for value in values if isinstance(value, str) and len(value) >= _NAME]
        names = [value for value in telling if telling.count(value) == 1]
        places = [match.start() for name in names if (match := re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text))]
        if len(places) > 1 and places == sorted(places):
            return True
    return False


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _runs(words: Sequence[str], length: int) -> Iterable[tuple[str, ...]]:
    """Return every run of neighbouring words of a length."""
    return zip(*(words[start:] for start in range(length)), strict=False)
