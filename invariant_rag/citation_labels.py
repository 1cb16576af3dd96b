"""Labels of documents, such as `[2]`: which document has which, and where an answer cites one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from invariant_rag.segments import SegmentSet

Labels = Mapping[str, int]  # label of a document in the prompt -> its index in `prompt.segments`, as they were given

_LABEL = r"(?:\d{1,6}(?:[-\u2013]\d{1,6})?|[A-Za-z])"
_NAME = r"(?:documents?|docs?|sources?|passages?|chunks?|snippets?|excerpts?)"
_CITATION = re.compile(
    rf"[\[【]\s?\^?(?:{_NAME}[ :#]*)?(?P<several>{_LABEL}(?:\s?[,;]\s?{_LABEL})*)\s?(?:†source)?[\]】]"
    rf"|\b{_NAME} #?(?P<one>\d{{1,6}})\b",
    re.IGNORECASE,
)
_PART = re.compile(r"(\d+)[-\u2013](\d+)|\w+")


def labels_of(sets: Iterable[tuple[SegmentSet, Sequence[int]]]) -> dict[str, int]:
    """Return the index of a segment, among those of all sets, by label; without labels that two segments have.

    `sets` are each set, and for each of its slots the index of the segment in it.
    """
    indices_of: dict[str, list[int]] = {}
    offset = 0
    for segments, order in sets:
        for slot, index in zip(segments.slots or (), order, strict=False):
            if slot.number is not None:
                indices_of.setdefault(slot.number, []).append(offset + index)
        offset += len(segments)
    return {label: indices[0] for label, indices in indices_of.items() if len(indices) == 1} if indices_of else {}


def find_labels(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield where a text cites a document by its number or letter, and that: start, end, label.

    >>> list(find_labels("At noon [2][1, 3], see source 2; 3 ferries."))
    [(8, 11, '2'), (11, 17, '1'), (11, 17, '3'), (23, 31, '2')]
    """
    for citation in _CITATION.finditer(text):
        for part in _PART.finditer(citation["several"] or citation["one"]):
            first = int(part[1] or 0)
            several = range(first, min(int(part[2]), first + 100) + 1) if part[1] else [part[0]]
            yield from ((*citation.span(), str(each)) for each in several)


def without_labels(text: str) -> str:
    """Return a text of the same length in which citations are blank."""
    return _CITATION.sub(lambda citation: " " * len(citation[0]), text)
