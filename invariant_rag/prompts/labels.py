"""Running numbers of documents in answers, such as `[2]`, translated back to the numbers that the caller gave.

Segments that are put in order by content get the running numbers of their new places. So the `[2]` of an answer means
the second document that the model got, and the caller wants to know which of its own documents that is. What a citation
looks like is in `citation_styles`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import regex

from invariant_rag.prompts.citation_styles import NAME, grammar, spelling_of
from invariant_rag.segments import Slot

Labels = Mapping[str, str]
"""Number of a document as the model got it -> its number as the caller gave it.

Where the prompt numbers its documents in a way that is no citation elsewhere, such as `(2)`, that is a key, too.
"""

_PART = regex.compile(r"(\d+)([-\u2013])(\d+)|\d+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_CONTEXT = 16  # characters before a citation that tell whether it is one


def labels_of(sets: Iterable[tuple[Sequence[Slot] | None, Sequence[int]]]) -> dict[str, str]:
    """Return how the running numbers of a prompt translate.

    >>> slots = [Slot(("[1] ",), number="1"), Slot(("[2] ",), number="2")]
    >>> labels_of([(slots, [1, 0])])
    {'1': '2', '2': '1'}
    >>> labels_of([([Slot(("(1) ",), number="1"), Slot(("(2) ",), number="2")], [1, 0])])
    {'1': '2', '2': '1', '(1)': '(2)', '(2)': '(1)'}

    Args:
        sets: For each set, its slots, and for each slot the index of the segment that took the place.

    Returns:
        The translation; empty if nothing changes, or if two sets use the same numbers for different ones.
    """
    labels: dict[str, str] = {}
    spelt: dict[str, str] = {}
    for slots, order in sets:
        for slot, index in zip(slots or (), order, strict=False):
            given = (slots or ())[index]
            if slot.number is None or given.number is None:
                continue
            if labels.setdefault(slot.number, given.number) != given.number:
                return {}
            spellings = spelling_of(slot), spelling_of(given)
            if spellings[0] is not None and spellings[1] is not None:
                spelt[spellings[0]] = spellings[1]
    unchanged = not labels or all(number == given for number, given in labels.items())
    return {} if unchanged else {**labels, **spelt}


def spellings_of(slot: Slot) -> list[str]:
    """Return by what an answer may name the segment of a slot: its number, and how the prompt writes that, if need be.

    >>> spellings_of(Slot(("(1) ",), number="1")), spellings_of(Slot(("[1] ",), number="1")), spellings_of(Slot())
    (['1', '(1)'], ['1'], [])
    """
    return [each for each in (slot.number, spelling_of(slot)) if each is not None]


def find_labels(text: str, labels: Iterable[str] = ()) -> Iterator[tuple[int, int, str]]:
    """Yield where a text cites a document by its number or letter, and that: start, end, number.

    Args:
        text: The text.
        labels: Numbers of documents, and how the prompt writes them where that is no citation elsewhere.

    >>> list(find_labels("At noon [2][1, 3], see source 2; 3 ferries."))
    [(8, 11, '2'), (11, 17, '1'), (11, 17, '3'), (23, 31, '2')]
    >>> list(find_labels("At noon (2).", ["(1)", "(2)"]))
    [(8, 11, '2')]
    """
    for citation in grammar(labels).citations(text):
        for part in _PART.finditer(citation["n"]):
            numbers = _range(part) if part[2] else [_plain(part[0])]
            yield from ((*citation.span(), number) for number in numbers)


def _plain(label: str) -> str:
    """Return a label without leading zeros."""
    return label.lstrip("0") or "0" if label.isdecimal() else label


def _range(part: regex.Match[str]) -> list[str]:
    """Return the numbers of a range; a few at most, else it is something else."""
    first, last = int(part[1]), int(part[3])
    return list(map(str, range(first, last + 1))) if last - first < 100 else []


def without_labels(text: str, labels: Iterable[str] = ()) -> str:
    """Return a text of the same length in which citations by number are blank.

    >>> without_labels("At noon [2].")
    'At noon    .'
    """
    for citation in grammar(labels).citations(text):
        text = text[: citation.start()] + " " * len(citation[0]) + text[citation.end() :]
    return text


def translate_labels(text: str, labels: Labels) -> str:
    """Return a text with the numbers of its citations (`[2]`, `[1, 3]`, `[Doc 2]`, `Source 2`) as the caller gave them.

    >>> translate_labels("At noon [2][1, 3], see source 2; 3 ferries.", {"1": "3", "2": "1", "3": "2"})
    'At noon [1][3, 2], see source 1; 3 ferries.'
    """
    return _translate(text, labels, 0, len(text))[0] if labels else text


def translate_stream(pieces: Iterable[str], labels: Labels) -> Iterator[str]:
    """Yield pieces of a text whose citations are translated; joined, they are `translate_labels` of the whole."""
    translator = LabelTranslator(labels)
    yield from filter(None, map(translator.feed, pieces))
    if rest := translator.finish():
        yield rest


class LabelTranslator:
    """Translates the citations of a text that comes in pieces.

    >>> translator = LabelTranslator({"1": "2", "2": "1"})
    >>> translator.feed("At noon ["), translator.feed("2]."), translator.finish()
    ('At noon ', '[1].', '')

    Args:
        labels: How numbers translate.
    """

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._held = ""
        self._seen = 0  # characters that were returned, and are kept because they tell what a citation is

    def feed(self, piece: str) -> str:
        """Return what is known after another piece: nothing that may still be within a citation."""
        if not self._labels:
            return piece
        self._held += piece
        safe = grammar(self._labels).begun(self._held, self._seen)
        text, stop = _translate(self._held, self._labels, self._seen, safe)
        if text:
            kept = max(stop - _CONTEXT, 0)
            self._held, self._seen = self._held[kept:], stop - kept
        return text

    def finish(self) -> str:
        """Return the rest."""
        return _translate(self._held, self._labels, self._seen, len(self._held))[0]


def _translate(text: str, labels: Labels, start: int, stop: int) -> tuple[str, int]:
    """Return `text[start:stop]` with its citations translated, and `stop`: earlier if it was within a citation."""
    pieces = []
    for citation in grammar(labels).citations(text, start):
        if citation.end() > stop:
            stop = min(stop, citation.start())
            break
        first, last = citation.span("n")
        pieces += [text[start:first], _PART.sub(lambda part: _translated(part, labels), citation["n"])]
        start = last
    return "".join((*pieces, text[start:stop])), stop


def _translated(part: regex.Match[str], labels: Labels) -> str:
    if not part[2]:
        written: str = part[0]
        return labels.get(_plain(written), written)
    numbers = _range(part)
    if not numbers or any(not labels.get(number, "").isdecimal() for number in numbers):
        return str(part[0])
    given = sorted(int(labels[number]) for number in numbers)
    if given[-1] - given[0] == len(given) - 1:
        return f"{given[0]}{part[2]}{given[-1]}"
    return ", ".join(map(str, given))


def translate_object(value: Any, labels: Labels, name: str = "") -> Any:
    """Return an object of dicts, lists and pydantic models with its citations translated, as its JSON would be.

    Args:
        value: The object.
        labels: How numbers translate.
        name: The name of the field that holds it: numbers are citations in a field `source`, and not in one `year`.

    >>> translate_object({"source": 2, "year": 2, "text": "See [2]."}, {"1": "2", "2": "1"})
    {'source': 1, 'year': 2, 'text': 'See [1].'}
    """
    if not labels:
        return value
    if fields := getattr(type(value), "model_fields", None):  # a pydantic model: the core works without pydantic
        return value.model_copy(update={each: translate_object(getattr(value, each), labels, each) for each in fields})
    if isinstance(value, Mapping):
        return {key: translate_object(each, labels, str(key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(translate_object(each, labels, name) for each in value)
    if type(value) in (int, str) and str(value).isdecimal() and NAME.fullmatch(name):
        return type(value)(labels.get(_plain(str(value)), value))
    return translate_labels(value, labels) if isinstance(value, str) else value
