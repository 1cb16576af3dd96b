"""Documents that are known from a retrieval, found again in the text of a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from invariant_rag.segments import Segment

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")
_TELLING = 30
"""Characters of a sentence that hardly occurs in two texts by chance."""


@dataclass(frozen=True)
class KnownDocument:
    """A retrieved document, and the texts that a prompt may hold it as.

    Attributes:
        segment: The document, with its metadata and score.
        texts: Its text in every form that is looked for, such as with and without metadata.
    """

    segment: Segment
    texts: tuple[str, ...]

    @classmethod
    def of(cls, segment: Segment, *more: str) -> KnownDocument:
        """Return a document with its text, as it is and as Python and JSON write it in quotes, and with more forms.

        Quotes are part of a form: Python chooses them by what the text holds.
        """
        forms = [each.strip() for each in (*more, segment.text) if each.strip()]
        quoted = [quote(each) for each in forms for quote in (repr, json.dumps, _json)]
        written = {*forms, *quoted, *(form[1:-1] for form in quoted)}
        return cls(segment, tuple(sorted(written, key=lambda form: (-len(form), form))))


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class Retrieval:
    """The documents that one retriever returned together."""

    documents: tuple[KnownDocument, ...]


@dataclass(frozen=True)
class Occurrence:
    """A place where a text holds a known document.

    Attributes:
        start: Index of its first character.
        stop: Index after its last one.
        document: The document.
    """

    start: int
    stop: int
    document: KnownDocument


def occurrences(text: str, documents: Iterable[KnownDocument]) -> list[Occurrence]:
    """Return where a text holds documents as whole words, in the order of the text.

    Of two overlapping occurrences the longer one counts.

    >>> known = [KnownDocument.of(Segment(each)) for each in ("c d", "a b", "b")]
    >>> [each.document.segment.text for each in occurrences("Text: a b, c d.", known)]
    ['a b', 'c d']
    """
    forms: dict[str, KnownDocument] = {}
    for document in sorted(documents, key=lambda each: each.segment.canonical_key):
        for form in document.texts:
            forms.setdefault(form, document)
    found: list[Occurrence] = []
    for form in sorted(forms, key=lambda each: (-len(each), each)):
        start = text.find(form)
        while start >= 0:
            stop = start + len(form)
            if _whole(text, start, stop) and all(stop <= each.start or each.stop <= start for each in found):
                found.append(Occurrence(start, stop, forms[form]))
            start = text.find(form, start + 1)
    return sorted(found, key=lambda each: each.start)


def split_known(text: str, documents: Iterable[KnownDocument]) -> Iterator[str | Segment]:
    """Yield the texts of a string and the known documents in it, each as a segment of what is written there."""
    position = 0
    for each in occurrences(text, documents):
        if text[position : each.start]:
            yield text[position : each.start]
        yield replace(each.document.segment, text=text[each.start : each.stop])
        position = each.stop
    if text[position:]:
        yield text[position:]


def holds_part(text: str, document: KnownDocument) -> bool:
    """Return whether a text holds a telling part of a document: a sentence or line of at least 30 characters."""
    return any(piece in text for piece in _telling_parts(document))


def holds_several(text: str, documents: Sequence[KnownDocument]) -> bool:
    """Return whether a text holds at least two of these documents, or telling parts of them.

    >>> known = [KnownDocument.of(Segment(f"A sentence that two documents share. {end}")) for end in "ab"]
    >>> holds_several(known[0].segment.text, known)
    False
    """
    found = {frozenset(part for part in _telling_parts(each) if part in text) for each in documents} - {frozenset()}
    return sum(all(not each < other for other in found) for each in found) > 1


def _telling_parts(document: KnownDocument) -> list[str]:
    """Return the telling sentences and lines of a document, or its whole text if that is telling and they are not."""
    text = document.segment.text.strip()
    pieces = [piece for piece in map(str.strip, _SENTENCE_END.split(text)) if len(piece) >= _TELLING]
    return pieces or ([text] if len(text) >= _TELLING else [])


def _whole(text: str, start: int, stop: int) -> bool:
    """Return whether `text[start:stop]` does not begin or end within a word."""
    begins_within = start > 0 and text[start - 1].isalnum() and text[start].isalnum()
    ends_within = stop < len(text) and text[stop - 1].isalnum() and text[stop].isalnum()
    return not (begins_within or ends_within)
