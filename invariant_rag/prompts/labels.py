"""Running numbers of documents in answers, such as `[2]`, translated back to the numbers that the caller gave.

Segments that are put in order by content get the running numbers of their new places. So the `[2]` of an answer means
the second document that the model got, and the caller wants to know which of its own documents that is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from invariant_rag.segments import Slot

Labels = Mapping[str, str]
"""Number of a document as the model got it -> its number as the caller gave it."""

_LABEL = r"(?:\d{1,6}|[A-Za-z](?![A-Za-z0-9]))"
_NUMBER = r"\d{1,6}(?!\d)"
_AND = r"(?:,|,? ?\band\b|,? ?\bor\b| ?&)[ \n]?"
_CITATION = re.compile(
    rf"[\[【]\^?[ \n]?(?:(?:docs?|documents?|sources?|passages?|refs?)[ :_#]{{0,2}})?"
    rf"{_LABEL}(?:[ \n]?[,;][ \n]?\^?{_LABEL})*[ \n]?(?:†source)?[\]】]"
    rf"|\b(?:document|source|passage|doc)(?::?[ \n]{_NUMBER}|s[ \n]{_NUMBER}(?:{_AND}{_NUMBER})*)",
    re.IGNORECASE,
)
_PART = re.compile(r"\d+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_BEGUN = re.compile(
    r"[\[【][\^\w \n,;:#†]*$"
    r"|\b(?:d[a-z]*|s[a-z]*|p[a-z]*|(?:documents?|docs?|sources?|passages?):?(?:[ \n][\d \n,;&a-z]*)?)$",
    re.IGNORECASE,
)


def labels_of(sets: Iterable[tuple[Sequence[Slot] | None, Sequence[int]]]) -> dict[str, str]:
    """Return how the running numbers of a prompt translate.

    >>> slots = [Slot(("[1] ",), number="1"), Slot(("[2] ",), number="2")]
    >>> labels_of([(slots, [1, 0])])
    {'1': '2', '2': '1'}

    Args:
        sets: For each set, its slots, and for each slot the index of the segment that took the place.

    Returns:
        The translation; empty if nothing changes, or if two sets use the same numbers for different ones.
    """
    labels: dict[str, str] = {}
    for slots, order in sets:
        for slot, index in zip(slots or (), order, strict=False):
            given = (slots or ())[index].number
            if slot.number is None or given is None:
                continue
            if labels.setdefault(slot.number, given) != given:
                return {}
    unchanged = not labels or all(number == given for number, given in labels.items())
    return {} if unchanged else labels


def find_labels(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield where a text cites a document by its number or letter, and that: start, end, number.

    >>> list(find_labels("At noon [2][1, 3], see source 2; 3 ferries."))
    [(8, 11, '2'), (11, 17, '1'), (11, 17, '3'), (23, 31, '2')]
    """
    for citation in _CITATION.finditer(text):
        yield from ((*citation.span(), _plain(each)) for each in _PART.findall(citation[0][_words(citation[0]) :]))


def _words(citation: str) -> int:
    """Return how many characters stand before the number of a citation like `Source 2`."""
    return 0 if citation[0] in "[【" else re.search(r"\d", citation).start()  # type: ignore[union-attr]


def _plain(label: str) -> str:
    """Return a label without leading zeros."""
    return label.lstrip("0") or "0" if label.isdecimal() else label


def without_labels(text: str) -> str:
    """Return a text of the same length in which citations by number are blank.

    >>> without_labels("At noon [2].")
    'At noon    .'
    """
    return _CITATION.sub(lambda citation: " " * len(citation[0]), text)


def translate_labels(text: str, labels: Labels) -> str:
    """Return a text with the numbers of its citations (`[2]`, `[1, 3]`, `[Doc 2]`, `Source 2`) as the caller gave them.

    >>> translate_labels("At noon [2][1, 3], see source 2; 3 ferries.", {"1": "3", "2": "1", "3": "2"})
    'At noon [1][3, 2], see source 1; 3 ferries.'
    """
    if not labels:
        return text

    return _translate(text, labels, 0)


def translate_stream(pieces: Iterable[str], labels: Labels) -> Iterator[str]:
    """Yield pieces of a text whose citations are translated; joined, they are `translate_labels` of the whole."""
    held, seen = "", 0  # `seen`: the last character that was yielded, which tells whether a word begins
    for piece in pieces:
        held += piece
        begun = _BEGUN.search(held, seen) if labels else None
        stop = begun.start() if begun else len(held)
        if stop > seen:
            yield _translate(held[:stop], labels, seen)
            held, seen = held[stop - 1 :], 1
    if len(held) > seen:
        yield _translate(held, labels, seen)


def _translate(text: str, labels: Labels, start: int) -> str:
    """Return `text[start:]` with its citations translated."""
    pieces = []
    for citation in _CITATION.finditer(text, start) if labels else ():
        words = _words(citation[0])
        numbers = _PART.sub(lambda each: labels.get(_plain(each[0]), each[0]), citation[0][words:])
        pieces += [text[start : citation.start()], citation[0][:words], numbers]
        start = citation.end()
    return "".join((*pieces, text[start:]))
