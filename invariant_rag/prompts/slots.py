"""Recognise slots that are sets: values of template variables, tool messages, content blocks; nothing else."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from invariant_rag.prompts.run_retrievals import Retrieval
from invariant_rag.segments import SegmentSet, Slot

_TELLING = re.compile(r"(?=.*\d|\S.*\w.*\S)\S(?:.*\S)?", re.DOTALL)


def find_set(slot: str, retrievals: Iterable[Retrieval]) -> SegmentSet | None:
    """Return the set that a slot is; None if it is text.

    A slot is a set if it is nothing but the texts of one retrieval, each exactly once, in one constant template: equal
    texts before, between and after them, once a document's own fields are put back as fields. These are part of the
    segment. Text that counts is no field. White space around documents is the template's: the same for all of them.

    Law: `set_text` of the set is the slot. The same template with the documents in another order gives an equal set,
    or None for each order.
    """
    listed = list(retrievals)
    parses = [parsed for each in listed if (parsed := _parse(slot, each)) is not None]
    most = max(map(len, parses), default=0)
    largest = [each for each in parses if len(each) == most]
    if not largest or any(_key(each) != _key(largest[0]) for each in largest):
        return None
    segments = largest[0]
    around = "".join(each.before + each.after for each in segments.slots or ()) if most == 1 else ""
    if any(each.text.strip() and each.text.strip() in around for one in listed for each in one.segments):
        return None  # there are other documents beside the only one
    for query in {each.query for each in listed} - {""}:
        queried = [_key(parsed) for each in listed if (parsed := _parse(query, each)) is not None]
        if slot.strip() == query.strip() or _key(segments) in queried:
            return None  # the user's question, if in another order
    return segments


def _key(segments: SegmentSet) -> tuple[list[str], str]:
    """Return a key that is equal for two sets if their texts differ in the order of the documents only."""
    slots = segments.slots or (Slot(),)
    before, after, separator = slots[-1].before, slots[-1].after, slots[0].after.removeprefix(slots[-1].after)
    return sorted(before + each.text + after for each in segments), separator


def _parse(slot: str, retrieval: Retrieval) -> SegmentSet | None:
    """Parse a slot as a set; None if it is text, or would be text with its documents in another order."""
    texts = [each.text.strip() for each in retrieval.segments]
    pairs = list(zip(retrieval.segments, texts, strict=True))
    padding = {tuple(each.text.split(text, 1)) for each, text in pairs if text}
    if not all(text and text in slot for text in texts) or len(padding) != 1:
        return None
    segments = [each if each.text == text else replace(each, text=text) for each, text in pairs]
    if len(segments) == 1:  # no other shows the template: it is alone, or beside a field of its own
        before, _, after = slot.partition(texts[0])
        beside = any(value and (value in before or value in after) for value in retrieval.rows[0].values())
        fits = texts[0] not in after and (beside or not (before + after).strip())
        return SegmentSet(segments, slots=[Slot(before, after)]) if fits else None
    columns = retrieval.columns
    rows = {(text, *(column[index] for column in columns)) for index, text in enumerate(texts)}
    locations = _locate(slot, texts) if len(rows) == len(set(texts)) else []
    if not locations:  # or: which of the equal texts has which fields?
        return None
    starts, stops, order = zip(*locations, strict=True)
    first, *inner, last = (slot[stop:start] for stop, start in zip((0, *stops), (*starts, len(slot)), strict=True))
    fields = [_Fields([column[index] for column in columns]) for index in order]
    head, tail = fields[0].mask(first), fields[-1].mask(last)
    befores, afters = [each.unmask(head) for each in fields], [each.unmask(tail) for each in fields]
    separator = inner[0][len(afters[0]) : len(inner[0]) - len(befores[1])]
    joint = tail + separator + head
    varies = any(
        (each.mask(before), each.mask(after)) != (head, tail) or any(value in joint for value in each.values)
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
    afters = [after + separator] * (len(listed) - 1) + [after]
    return SegmentSet(listed, slots=[Slot(before, each) for each in afters])


class _Fields:
    """The fields of a document that its template may write: those unlikely to occur in other text by chance."""

    def __init__(self, values: Iterable[str]) -> None:
        self.values = list(filter(None, values))
        named = [(each, chr(0xF0000 + column)) for column, each in enumerate(values) if _TELLING.fullmatch(each)]
        self.placeholders = sorted(named, key=lambda each: -len(each[0]))

    def mask(self, text: str) -> str:
        """Replace each value in a text by its placeholder."""
        for value, placeholder in self.placeholders:
            text = text.replace(value, placeholder)
        return text

    def unmask(self, text: str) -> str:
        """Replace each placeholder in a text by its value."""
        for value, placeholder in self.placeholders:
            text = text.replace(placeholder, value)
        return text


def _locate(slot: str, texts: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return where each document starts and stops, and its index; nothing if one occurs more or less often."""
    locations: list[tuple[int, int, int]] = []
    for text, count in Counter(texts).items():
        starts = [match.start() for match in re.finditer(f"(?={re.escape(text)})", slot)]
        if len(starts) != count:
            return []
        indices = (index for index, each in enumerate(texts) if each == text)
        locations += [(start, start + len(text), index) for start, index in zip(starts, indices, strict=True)]
    locations.sort()
    return locations if all(stop <= start for (_, stop, _), (start, _, _) in pairwise(locations)) else []


def _meet(units: Sequence[str], separator: str, texts: Iterable[str]) -> bool:
    """Return whether a document may occur across the end of a unit and the start of another, in some order."""
    for ends, starts in ((units, [separator + each for each in units]), ([each + separator for each in units], units)):
        lasts, firsts = {each[-1] for each in ends}, {each[0] for each in starts}
        for text in set(texts):
            for cut in range(1, len(text)):
                if text[cut - 1] in lasts and text[cut] in firsts:  # else the rest need not be compared
                    head, tail = text[:cut], text[cut:]
                    if any(each.endswith(head) for each in ends) and any(each.startswith(tail) for each in starts):
                        return True
    return False
