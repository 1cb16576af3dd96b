"""Recognise a slot that is a set: nothing but the texts of one retrieval, each once, in one constant template.

A slot is the value of one variable of a prompt template, the content of one tool message, or one content block. Nothing
else is looked at, and what is not recognised stays as it is written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from string import ascii_lowercase, ascii_uppercase

from invariant_rag.segments import Segment, SegmentSet, Slot

_TELLING = re.compile(r"(?=.*\d|\S.*\w.*\S)\S(?:.*\S)?", re.DOTALL)


@dataclass(frozen=True)
class Retrieval:
    """What one call of a retriever returned.

    Attributes:
        segments: The documents, in the order in which they were listed.
        query: What it was asked; "" if that is not known. A slot with this text is the user's question, and no set.
        fields: For each document, further texts that a template may write beside it, by name. Its title, its metadata
            and each value of them, by `str()`, are fields anyway.
        one_by_one: Whether a model may be asked about a single document: it runs inside of the retriever.
        is_set: Whether their order means nothing. A list that no retriever returned is only a reason to warn.
    """

    segments: tuple[Segment, ...]
    query: str = ""
    fields: tuple[Mapping[str, str], ...] = ()
    one_by_one: bool = False
    is_set: bool = True

    @property
    def rows(self) -> list[dict[str, str]]:
        """The fields of each document."""
        rows = []
        for place, each in enumerate(self.segments):
            row = {"title": each.title} if each.title else {}
            if each.metadata:
                row["metadata"] = str(dict(each.metadata))
                row.update((f"metadata.{key}", str(value)) for key, value in each.metadata.items())
            rows.append({**row, **(self.fields[place] if place < len(self.fields) else {})})
        return rows

    @property
    def columns(self) -> list[tuple[str, ...]]:
        """The fields that tell documents apart, each with its text for every document; "" where one has none.

        Fields with running numbers or letters are left out: a template may count.
        """
        rows = self.rows
        names = sorted({name for row in rows for name in row})
        columns = dict.fromkeys(tuple(row.get(name, "") for row in rows) for name in names)
        return [each for each in columns if len(set(each)) > 1 and not _counts(each)]


def _counts(values: Sequence[str]) -> bool:
    """Return whether values are those of a count of documents from 0, 1 or A on, in any order.

    >>> _counts(["2", "1", "3"]), _counts(["b", "a"]), _counts(["2019", "2020"])
    (True, True, False)
    """
    listed = sorted(each.lstrip("0") or "0" if each.isdecimal() else each for each in values)
    numbers = [sorted(map(str, range(first, first + len(values)))) for first in (0, 1)]
    return listed in (*numbers, *(list(alphabet[: len(values)]) for alphabet in (ascii_lowercase, ascii_uppercase)))


@dataclass(frozen=True)
class _Parsed:
    """A slot as units with a separator between them; a unit is a document with the same text before and after each."""

    segments: tuple[Segment, ...]
    before: str
    after: str
    separator: str

    @property
    def units(self) -> list[str]:
        return [self.before + each.text + self.after for each in self.segments]

    @property
    def key(self) -> tuple[list[str], str]:
        """What two parses share if they render alike in any order."""
        return sorted(self.units), self.separator


def find_set(slot: str, retrievals: Iterable[Retrieval]) -> SegmentSet | None:
    r"""Return the set that a slot is; None if it is text.

    A slot is a set if it is nothing but the texts of one retrieval, each exactly once, in one constant template: equal
    texts before, between and behind them, where a document's own fields are fields of the template. What a template
    writes beside a document from its fields is part of the segment. Text that counts is no field. White space around a
    document is the template's, so it has to be the same for all of them.

    Law: `set_text` of the set is the slot. The same template with the documents in another order gives an equal set,
    or None for each order.

    >>> known = [Retrieval((Segment("Ferries.", metadata={"year": 2021}), Segment("Mills.", metadata={"year": 1987})))]
    >>> [each.text for each in find_set("1987: Mills.\n2021: Ferries.", known)]
    ['1987: Mills.', '2021: Ferries.']
    >>> find_set("[1] Mills.\n[2] Ferries.", known) is None
    True
    """
    listed = list(retrievals)
    parses = [found for each in listed if (found := _parse(slot, each)) is not None]
    most = max((len(each.segments) for each in parses), default=0)
    largest = [each for each in parses if len(each.segments) == most]
    if not largest or any(each.key != largest[0].key for each in largest):
        return None
    found = largest[0]
    around = found.before + found.after if most == 1 else ""
    if any(each.text.strip() and each.text.strip() in around for one in listed for each in one.segments):
        return None  # other documents stand beside the only one
    for query in {each.query for each in listed} - {""}:
        asked = [parsed.key for each in listed if (parsed := _parse(query, each)) is not None]
        if slot.strip() == query.strip() or found.key in asked:
            return None  # the user's question, if in another order
    behind = [found.after + found.separator] * (most - 1) + [found.after]
    return SegmentSet(found.segments, slots=[Slot(found.before, each) for each in behind])


def _parse(slot: str, retrieval: Retrieval) -> _Parsed | None:
    """Return the parse of a slot; None if there is none, or if there were none with the documents in another order."""
    texts = [each.text.strip() for each in retrieval.segments]
    padding = {tuple(each.text.split(text, 1)) for each, text in zip(retrieval.segments, texts, strict=True) if text}
    if not all(text and text in slot for text in texts) or len(padding) != 1:
        return None
    pairs = zip(retrieval.segments, texts, strict=True)
    segments = [each if each.text == text else replace(each, text=text) for each, text in pairs]
    if len(segments) == 1:
        return _parse_single(slot, segments[0], retrieval.rows[0])
    columns = retrieval.columns
    rows = [(text, *(column[index] for column in columns)) for index, text in enumerate(texts)]
    places = _places(slot, texts) if len(set(rows)) == len(set(texts)) else []
    if not places:  # or: which of the equal texts has which fields?
        return None
    starts, stops, order = zip(*places, strict=True)
    first, *inner, last = (slot[stop:start] for stop, start in zip((0, *stops), (*starts, len(slot)), strict=True))
    fields = [_Fields(rows[index][1:]) for index in order]
    front, back = fields[0].taken_out(first), fields[-1].taken_out(last)
    befores, afters = [each.put_in(front) for each in fields], [each.put_in(back) for each in fields]
    gaps = list(zip(inner, afters, befores[1:], strict=False))
    separator = gaps[0][0][len(gaps[0][1]) : len(gaps[0][0]) - len(gaps[0][2])]
    constant = not any(
        (each.taken_out(before), each.taken_out(after)) != (front, back) or each.occur_in(front, separator, back)
        for each, before, after in zip(fields, befores, afters, strict=True)
    )
    once = len(segments) == 2 and any(map(str.isalnum, separator))  # words that are written once are no template
    if once or not constant or any(gap != after + separator + before for gap, after, before in gaps):
        return None
    listed = [segments[index] for index in order]
    if len(set(befores)) == len(set(afters)) == 1:
        found = _Parsed(tuple(listed), befores[0], afters[0], separator)
    else:
        units = zip(befores, listed, afters, strict=True)
        found = _Parsed(tuple(replace(each, text=b + each.text + a) for b, each, a in units), "", "", separator)
    return None if _meet(found.units, separator, texts) else found


def _parse_single(slot: str, segment: Segment, row: Mapping[str, str]) -> _Parsed | None:
    """Return the parse of a single document, alone or beside a field of its own: no other shows the template."""
    before, _, after = slot.partition(segment.text)
    beside = any(value and (value in before or value in after) for value in row.values())
    fits = segment.text not in after and (beside or not (before + after).strip())
    return _Parsed((segment,), before, after, "") if fits else None


class _Fields:
    """The fields of a document that its template may write: those that hardly stand in other text by chance."""

    def __init__(self, values: Iterable[str]) -> None:
        self.values = list(filter(None, values))
        named = [(each, chr(0xF0000 + column)) for column, each in enumerate(values) if _TELLING.fullmatch(each)]
        self.signs = sorted(named, key=lambda each: -len(each[0]))

    def taken_out(self, text: str) -> str:
        """Return a text with a sign in the place of each value."""
        for value, sign in self.signs:
            text = text.replace(value, sign)
        return text

    def put_in(self, text: str) -> str:
        """Return a text with the values in the place of their signs."""
        for value, sign in self.signs:
            text = text.replace(sign, value)
        return text

    def occur_in(self, before: str, separator: str, after: str) -> bool:
        """Return whether a value is in a separator, or one for which there is no sign in what is beside documents."""
        named = {value for value, _ in self.signs}
        return any(each in separator or (each not in named and each in before + after) for each in self.values)


def _places(slot: str, texts: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return where each document starts and stops, and its index, from the first to the last.

    Nothing if a text does not occur as often as it is listed, also where it is a part of another one.
    """
    places: list[tuple[int, int, int]] = []
    for text, count in Counter(texts).items():
        starts = [match.start() for match in re.finditer(f"(?={re.escape(text)})", slot)]
        if len(starts) != count:
            return []
        indices = (index for index, each in enumerate(texts) if each == text)
        places += [(start, start + len(text), index) for start, index in zip(starts, indices, strict=True)]
    places.sort()
    return places if all(stop <= start for (_, stop, _), (start, _, _) in pairwise(places)) else []


def _meet(units: Sequence[str], separator: str, texts: Iterable[str]) -> bool:
    """Return whether a document may occur across the end of a unit and the start of another, in some order."""
    for ends, starts in (
        (units, [separator + each for each in units]),
        ([each + separator for each in units], units),
    ):
        lasts, firsts = {each[-1] for each in ends}, {each[0] for each in starts}
        for text in set(texts):
            for cut in range(1, len(text)):
                if text[cut - 1] in lasts and text[cut] in firsts:  # else no need to look at the rest
                    head, tail = text[:cut], text[cut:]
                    if any(each.endswith(head) for each in ends) and any(each.startswith(tail) for each in starts):
                        return True
    return False
