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

_NUMBER = r"(?:\d+|[A-Za-z](?![A-Za-z]))"
_CITATION = re.compile(
    rf"\[\s*{_NUMBER}(?:\s*[,;]\s*{_NUMBER})*\s*\]|\b(?:documents?|sources?|passages?)\s+\d+", re.IGNORECASE
)
_PART = re.compile(_NUMBER)
_OPEN = re.compile(r"\[[\w\s,;]{0,40}$|\b(?:d|s|p)\w*\s*\d*$", re.IGNORECASE)


def labels_of(sets: Iterable[tuple[Sequence[Slot] | None, Sequence[int]]]) -> dict[str, str]:
    """Return how the running numbers of a prompt translate.

    >>> slots = [Slot(("[1] ",), number="1"), Slot(("[2] ",), number="2")]
    >>> labels_of([(slots, [1, 0])])
    {'1': '2', '2': '1'}

    Args:
        sets: For each set, its slots, and for each slot the index of the segment that took the place.

    Returns:
        The translation; empty if nothing changes, or if two sets use the same numbers, so that none is unambiguous.
    """
    labels: dict[str, str] = {}
    for slots, order in sets:
        for slot, index in zip(slots or (), order, strict=False):
            given = (slots or ())[index].number
            if slot.number is None or given is None:
                continue
            if slot.number in labels:
                return {}
            labels[slot.number] = given
    return {} if all(number == given for number, given in labels.items()) else labels


def find_labels(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield where a text cites a document by its number, and the number: start, end, number.

    >>> list(find_labels("At noon [2][1, 3], see source 2; 3 ferries."))
    [(8, 11, '2'), (11, 17, '1'), (11, 17, '3'), (23, 31, '2')]
    """
    for citation in _CITATION.finditer(text):
        numbers = citation[0] if citation[0][0] == "[" else citation[0].split()[-1]
        yield from ((*citation.span(), each) for each in _PART.findall(numbers))


def without_labels(text: str) -> str:
    """Return a text of the same length in which citations by number are blank.

    >>> without_labels("At noon [2].")
    'At noon    .'
    """
    return _CITATION.sub(lambda citation: " " * len(citation[0]), text)


def translate_labels(text: str, labels: Labels) -> str:
    """Return a text with the numbers of its citations (`[2]`, `[1, 3]`, `Source 2`) as the caller gave them.

    >>> translate_labels("At noon [2][1, 3], see source 2; 3 ferries.", {"1": "3", "2": "1", "3": "2"})
    'At noon [1][3, 2], see source 1; 3 ferries.'
    """
    if not labels:
        return text

    def translate(citation: re.Match[str]) -> str:
        head, number, rest = citation[0].rpartition(" ") if citation[0][0] != "[" else ("", "", citation[0])
        return head + number + _PART.sub(lambda each: labels.get(each[0], each[0]), rest)

    return _CITATION.sub(translate, text)


def translate_stream(pieces: Iterable[str], labels: Labels) -> Iterator[str]:
    """Yield pieces of a text whose citations are translated; joined, they are `translate_labels` of the whole."""
    held = ""
    for piece in pieces:
        held += piece
        begun = _OPEN.search(held) if labels else None
        ready = held[: begun.start()] if begun else held
        if ready:
            yield translate_labels(ready, labels)
            held = held[len(ready) :]
    if held:
        yield translate_labels(held, labels)
