"""Recognise a slot that is a set: the value of one variable of a prompt template, one tool message, or content block.

Nothing else is looked at, and what is not recognised stays as it is written.
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
    """What one call of a retriever returned."""

    segments: tuple[Segment, ...]  # in the order in which they were listed
    query: str = ""  # what was asked, if that is known: a slot with this text is the user's question, and no set
    fields: tuple[Mapping[str, str], ...] = ()  # texts of templates beside title and metadata, for each document
    one_by_one: bool = False  # whether a model may be asked about one document: it runs inside of the retriever
    is_set: bool = True  # whether their order means nothing; a list that no retriever returned is a reason to warn

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
    """Return whether values are those of a count of documents from 0, 1 or A on, in any order."""
    listed = sorted(each.lstrip("0") or "0" if each.isdecimal() else each for each in values)
    numbers = [sorted(map(str, range(first, first + len(values)))) for first in (0, 1)]
    return listed in (*numbers, *(list(alphabet[: len(values)]) for alphabet in (ascii_lowercase, ascii_uppercase)))


def find_set(slot: str, retrievals: Iterable[Retrieval]) -> SegmentSet | None:
    """Return the set that a slot is; None if it is text.

    A slot is a set if it is nothing but the texts of one retrieval, each exactly once, in one constant template: equal
    texts before, between and behind them, once a document's own fields are put back as fields. These are part of the
    segment. Text that counts is no field. White space around documents is the template's: the same for all of them.

    Law: `set_text` of the set is the slot. The same template with the documents in another order gives an equal set,
    or None for each order.
    """
    listed = list(retrievals)
    parses = [found for each in listed if (found := _parse(slot, each)) is not None]
    most = max(map(len, parses), default=0)
    largest = [each for each in parses if len(each) == most]
    if not largest or any(_key(each) != _key(largest[0]) for each in largest):
        return None
    found = largest[0]
    around = "".join(each.before + each.after for each in found.slots or ()) if most == 1 else ""
    if any(each.text.strip() and each.text.strip() in around for one in listed for each in one.segments):
        return None  # other documents stand beside the only one
    for query in {each.query for each in listed} - {""}:
        asked = [_key(parsed) for each in listed if (parsed := _parse(query, each)) is not None]
        if slot.strip() == query.strip() or _key(found) in asked:
            return None  # the user's question, if in another order
    return found


def _key(found: SegmentSet) -> tuple[list[str], str]:
    """Return a key that is equal for two sets if their texts differ in the order of the documents only."""
    slots = found.slots or (Slot(),)
    before, after, separator = slots[-1].before, slots[-1].after, slots[0].after.removeprefix(slots[-1].after)
    return sorted(before + each.text + after for each in found), separator


def _parse(slot: str, retrieval: Retrieval) -> SegmentSet | None:
    """Parse a slot as a set; None if it is text, or would be text with its documents in another order."""
    texts = [each.text.strip() for each in retrieval.segments]
    pairs = list(zip(retrieval.segments, texts, strict=True))
    padding = {tuple(each.text.split(text, 1)) for each, text in pairs if text}
    if not all(text and text in slot for text in texts) or len(padding) != 1:
        return None
    segments = [each if each.text == text else replace(each, text=text) for each, text in pairs]
    if len(segments) == 1:  # no other shows the template: it stands alone, or beside a field of its own
        before, _, after = slot.partition(texts[0])
        beside = any(value and (value in before or value in after) for value in retrieval.rows[0].values())
        fits = texts[0] not in after and (beside or not (before + after).strip())
        return SegmentSet(segments, slots=[Slot(before, after)]) if fits else None
    columns = retrieval.columns
    rows = {(text, *(column[index] for column in columns)) for index, text in enumerate(texts)}
    places = _places(slot, texts) if len(rows) == len(set(texts)) else []
    if not places:  # or: which of the equal texts has which fields?
        return None
    starts, stops, order = zip(*places, strict=True)
    first, *inner, last = (slot[stop:start] for stop, start in zip((0, *stops), (*starts, len(slot)), strict=True))
    fields = [_Fields([column[index] for column in columns]) for index in order]
    front, back = fields[0].taken_out(first), fields[-1].taken_out(last)
    befores, afters = [each.put_in(front) for each in fields], [each.put_in(back) for each in fields]
    separator = inner[0][len(afters[0]) : len(inner[0]) - len(befores[1])]
    joint = back + separator + front
    varies = any(
        (each.taken_out(before), each.taken_out(after)) != (front, back) or any(value in joint for value in each.values)
        for each, before, after in zip(fields, befores, afters, strict=True)
    )
    once = len(segments) == 2 and any(map(str.isalnum, separator))  # words that are written once are no template
    if once or varies or inner != [a + separator + b for a, b in zip(afters, befores[1:], strict=False)]:
        return None
    units = [before + texts[index] + after for before, index, after in zip(befores, order, afters, strict=True)]
    if _meet(units, separator, texts):
        return None
    before, after, listed = befores[0], afters[0], [segments[index] for index in order]
    if len({*befores}) > 1 or len({*afters}) > 1:
        before, after, listed = "", "", [replace(each, text=unit) for each, unit in zip(listed, units, strict=True)]
    behind = [after + separator] * (len(listed) - 1) + [after]
    return SegmentSet(listed, slots=[Slot(before, each) for each in behind])


class _Fields:
    """The fields of a document that its template may write: those unlikely to occur in other text by chance."""

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


def _places(slot: str, texts: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return where each document starts and stops, and its index; nothing if one occurs more or less often."""
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
    for ends, starts in ((units, [separator + each for each in units]), ([each + separator for each in units], units)):
        lasts, firsts = {each[-1] for each in ends}, {each[0] for each in starts}
        for text in set(texts):
            for cut in range(1, len(text)):
                if text[cut - 1] in lasts and text[cut] in firsts:  # else no need to look at the rest
                    head, tail = text[:cut], text[cut:]
                    if any(each.endswith(head) for each in ends) and any(each.startswith(tail) for each in starts):
                        return True
    return False
