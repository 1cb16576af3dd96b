"""Recognise a slot that is a set: nothing but the texts of one retrieval, each once, in one constant template.

A slot is the value of one variable of a prompt template, the content of one tool message, or one content block. Nothing
else is looked at, and what is not recognised stays as it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from invariant_rag.prompts.retrievals import Retrieval
from invariant_rag.segments import Segment, SegmentSet, Slot

_MOST_STATES = 20_000  # steps of one comparison of templates; that of a usual one takes a few hundred


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

    def write(self, order: Iterable[int]) -> str:
        """Return what the template writes for the documents in another order."""
        units = self.units
        return self.separator.join(units[index] for index in order)

    def to_set(self) -> SegmentSet:
        behind = [self.after + self.separator] * (len(self.segments) - 1) + [self.after]
        return SegmentSet(self.segments, slots=[Slot(self.before, each) for each in behind])


def find_set(slot: str, retrievals: Iterable[Retrieval]) -> SegmentSet | None:
    r"""Return the set that a slot is; None if it is text.

    A slot is a set if it is nothing but the texts of one retrieval, each exactly once, in one constant template: equal
    texts before, between and behind them, where a document's own fields are fields of the template. What a template
    writes beside a document from its fields is part of the segment. Text that counts is no field.

    Law: `set_text` of the set is the slot. The same template with the documents in another order gives an equal set,
    or None for each order.

    >>> known = [Retrieval((Segment("Ferries.", metadata={"year": 2021}), Segment("Mills.", metadata={"year": 1987})))]
    >>> [each.text for each in find_set("1987: Mills.\n2021: Ferries.", known)]
    ['1987: Mills.', '2021: Ferries.']
    >>> find_set("[1] Mills.\n[2] Ferries.", known) is None
    True

    Args:
        slot: The value of a template's variable, the content of a tool message, or a content block.
        retrievals: What was retrieved in this run.
    """
    listed = list(retrievals)
    parses = [found for each in listed if (found := _parse(slot, each)) is not None]
    most = max((len(each.segments) for each in parses), default=0)
    largest = [each for each in parses if len(each.segments) == most]
    if not largest or any(each.key != largest[0].key for each in largest):
        return None
    around = largest[0].before + largest[0].after if most == 1 else ""
    if any(each.text.strip() and each.text.strip() in around for one in listed for each in one.segments):
        return None  # other documents stand beside the only one
    queries = {each.query for each in listed} - {""}
    if any(_is_query(slot, largest[0], each, listed) for each in queries):
        return None
    return largest[0].to_set()


def _is_query(slot: str, found: _Parsed, query: str, retrievals: Iterable[Retrieval]) -> bool:
    """Return whether a slot is the question: the same text, or the same set in another order."""
    if slot.strip() == query.strip():
        return True
    return any((asked := _parse(query, each)) is not None and asked.key == found.key for each in retrievals)


def _parse(slot: str, retrieval: Retrieval) -> _Parsed | None:
    """Return the only parse of a slot; None if there is none, or if the documents in another order had several."""
    segments = retrieval.segments
    if not all(each.text.strip() in slot for each in segments):
        return None
    if len(segments) == 1:
        return _parse_single(slot, segments[0], retrieval.rows[0])
    columns = [each for each in retrieval.columns if all(value in slot for value in each)]
    found = _only_parse(slot, segments, columns)
    if found is None:
        return None
    texts = {text for each in segments for text in (each.text, each.text.strip())}
    joint = found.after + found.separator + found.before
    once = len(segments) == 2 and any(map(str.isalnum, found.separator))  # words that are written once are no template
    if once or _may_be_stripped(segments, joint):
        return None
    fielded = any(each.text not in texts for each in found.segments)
    padded = any(each.text != each.text.strip() for each in segments)
    if fielded or padded or any(all(value in joint for value in each) for each in columns):
        by_content = sorted(range(len(segments)), key=lambda index: found.segments[index].canonical_key)
        for first in range(len(segments)):
            rotated = [*by_content[first:], *by_content[:first]]
            for order in (rotated, rotated[::-1]):
                other = _only_parse(found.write(order), segments, columns)
                if other is None or other.key != found.key:
                    return None
    return None if _meet(found, texts) else found


def _parse_single(slot: str, segment: Segment, row: Mapping[str, str]) -> _Parsed | None:
    """Return the parse of a single document, alone or beside a field of its own: no other shows the template."""
    text = segment.text if segment.text in slot else segment.text.strip()
    before, found, after = slot.partition(text) if text else (slot, "", "")
    beside = any(value and (value in before or value in after) for value in row.values())
    if not found or text in after or ((before or after) and not beside):
        return None
    return _Parsed((replace(segment, text=text),), before, after, "")


def _only_parse(slot: str, segments: Sequence[Segment], columns: Sequence[Sequence[str]]) -> _Parsed | None:
    """Return the parse of a slot; None if there is not one. Documents are looked for as they are, and stripped."""
    stripped = [each if each.text == each.text.strip() else replace(each, text=each.text.strip()) for each in segments]
    if not all(each.text for each in stripped):
        return None
    found = _parses(slot, segments, columns)
    if any(one is not other for one, other in zip(segments, stripped, strict=True)):
        if not _places(slot, stripped):
            return None
        found += _parses(slot, stripped, columns)
    return found[0] if found and all(each.key == found[0].key for each in found) else None


def _parses(slot: str, segments: Sequence[Segment], columns: Sequence[Sequence[str]]) -> list[_Parsed]:
    places = _places(slot, segments)
    if not places:
        return []
    stops = [0, *(start + len(segments[index].text) for start, index in places)]
    gaps = [slot[stop:start] for stop, start in zip(stops, [*(start for start, _ in places), len(slot)], strict=True)]
    order = [index for _, index in places]
    alike = len({each.text for each in segments}) < len(segments)
    if alike and columns:
        return []  # which of the equal texts has which fields?
    first, *inner, last = gaps
    by_left = [[column[index] for index in (order[-1], *order[:-1])] for column in columns]
    by_right = [[column[index][::-1] for index in order] for column in columns]
    parses: list[_Parsed] = []
    for after_last, *after in _written([last, *inner], by_left):
        for before in _written([each[::-1] for each in (first, *inner)], by_right):
            parsed = _parse_gaps(
                slot, [segments[index] for index in order], places, before, [*after, after_last], inner
            )
            parses += [] if parsed is None else [parsed]
    return parses


def _places(slot: str, segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Return where each document starts, and its index, from the first to the last.

    Nothing if a text does not occur as often as it is listed, also where it is a part of another one.
    """
    listed: dict[str, list[int]] = {}
    for index in sorted(range(len(segments)), key=lambda each: segments[each].canonical_key):
        listed.setdefault(segments[index].text, []).append(index)
    places: list[tuple[int, int]] = []
    for text, indices in listed.items():
        starts: list[int] = []
        start = slot.find(text)
        while start >= 0 and len(starts) <= len(indices):
            starts.append(start)
            start = slot.find(text, start + 1)
        if len(starts) != len(indices):
            return []
        places += zip(starts, indices, strict=True)
    places.sort()
    apart = all(start + len(segments[index].text) <= after for (start, index), (after, _) in pairwise(places))
    return places if apart else []


def _written(texts: Sequence[str], columns: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    """Return how much of each text one template may have written: the whole of the first, and as much of the others.

    A template is a sequence of characters and fields; a column holds a field's value for every text.
    """
    found: list[tuple[int, ...]] = []
    seen: set[tuple[int, ...]] = set()
    waiting = [(0,) * len(texts)]
    while waiting and len(seen) < _MOST_STATES:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        if at[0] == len(texts[0]):
            found.append(at)
        letters = {text[index : index + 1] for text, index in zip(texts, at, strict=True)}
        if len(letters) == 1 and "" not in letters:
            waiting.append(tuple(index + 1 for index in at))
        written = [each for each in columns if all(map(str.startswith, texts, each, at))]
        waiting += [tuple(index + len(value) for index, value in zip(at, each, strict=True)) for each in written]
    return [] if waiting else found


def _parse_gaps(
    slot: str,
    segments: Sequence[Segment],
    places: Sequence[tuple[int, int]],
    before: Sequence[int],
    after: Sequence[int],
    inner: Sequence[str],
) -> _Parsed | None:
    """Return the parse in which so many characters before and after each document belong to it."""
    between = {gap[left : len(gap) - right] for gap, left, right in zip(inner, after, before[1:], strict=False)}
    overlap = any(left + right > len(gap) for gap, left, right in zip(inner, after, before[1:], strict=False))
    (separator, *others) = between
    if overlap or others:
        return None
    units = []
    for segment, (start, _), left, right in zip(segments, places, before, after, strict=True):
        stop = start + len(segment.text)
        units.append((slot[start - left : start], segment, slot[stop : stop + right]))
    befores, afters = {unit[0] for unit in units}, {unit[2] for unit in units}
    if len(befores) == len(afters) == 1:
        return _Parsed(tuple(segments), befores.pop(), afters.pop(), separator)
    written = (replace(segment, text=left + segment.text + right) for left, segment, right in units)
    return _Parsed(tuple(written), "", "", separator)


def _may_be_stripped(segments: Sequence[Segment], joint: str) -> bool:
    """Return whether white space beside documents may be the template's in one order, and a document's in another."""
    ends = {(text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]) for text in (s.text for s in segments)}
    leading, trailing = (any(each) for each in zip(*ends, strict=True))
    open_ends = (trailing and not joint[:1].strip()) or (leading and not joint[-1:].strip())
    return len(ends) > 1 and open_ends


def _meet(parsed: _Parsed, texts: set[str]) -> bool:
    """Return whether a document may occur across the end of a unit and the start of another, in some order."""
    separator, units = parsed.separator, parsed.units
    for text in texts:
        for start in _overlaps(text, separator):
            head, tail = text[: max(start, 0)], text[max(start + len(separator), 0) :]
            if any(each.endswith(head) for each in units) and any(each.startswith(tail) for each in units):
                return True
    return False


def _overlaps(text: str, separator: str) -> Iterator[int]:
    """Yield where a separator would stand, if it were a part of a text, or if the text began or ended within it."""
    if not separator:
        yield from range(1, len(text))
        return
    start = text.find(separator)
    while start >= 0:
        yield start
        start = text.find(separator, start + 1)
    for part in range(1, len(separator)):
        if text.startswith(separator[part:]):
            yield -part
        if text.endswith(separator[:part]):
            yield len(text) - part
