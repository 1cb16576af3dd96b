r"""Text between the segments of a set that is the same for each: numbers, bullets, tags, separators, `Source: a.txt`.

It belongs to the places of the set. What is the same for each becomes a `Slot`: it stays in its place, with its running
number, when the segments change places. What shows a segment's own title or metadata is a field of the slot, and goes
with the segment.

>>> texts, slots = slots_of(["Read:\n[1] ", "\n[2] ", "\nWhy?"], [Segment("a"), Segment("b")])
>>> texts, [slot.before + slot.after for slot in slots]
(('Read:\n', '\nWhy?'), [('[1] ', '\n'), ('[2] ',)])
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real

from invariant_rag.segments import Field, Segment, Slot, value_of

_LABEL = re.compile(r"\d+|(?<![A-Za-z0-9])[A-Za-z](?=[):\]]|\.(?!\w))")
_NUMBER = "\U0010fffd"  # stands for one running number
_FIELDS = range(0xF0000, 0xF0800)  # each stands for one field; like `_NUMBER`, private-use characters
_PLACEHOLDERS = re.compile(f"[{chr(_FIELDS[0])}-{chr(_FIELDS[-1])}{_NUMBER}]")
_NUMBERED = re.compile(r"(.*?)(\d+|(?<![A-Za-z0-9])[A-Za-z])(\W*)", re.DOTALL)
_LAST_WORD = re.compile(r"[^\W\d]*\W*$")
_ESCAPED_BREAK = re.compile(r"\\[ntr]")
_ARROW = re.compile(r"[<>]")
_MARGIN = 16  # characters by which one running number may be longer than another
_LONGEST_LABEL = 100
_LABEL_BEFORE = re.compile(r"(?:^|\n|[\[({#>]|[-*]\s)\s*$")
_LABEL_AFTER = re.compile(r"\s*[\])}.:<>/]")
_LABEL_WORD = re.compile(
    r"(?:document|doc|source|passage|chunk|context|result|item|excerpt|snippet|example|no\.?|number|nr|index|\bid)"
    r"[\s:#=\"'_\[(-]*$",
    re.IGNORECASE,
)


def slots_of(texts: Sequence[str], segments: Sequence[Segment]) -> tuple[tuple[str, str], list[Slot]] | None:
    """Return the slots of segments with text between them, if that text is the same for each.

    Args:
        texts: The text before the first segment, those between two, and the text after the last: one more than there
            are segments.
        segments: The segments, in the order of the prompt.

    Returns:
        What is left of the first and of the last text, and one slot per segment. None if the text between differs in
        more than a running number and the segments' own metadata, or says something that is not said of each.
    """
    inner_texts = texts[1:-1]
    if not any(map(str.strip, inner_texts)):
        if len(set(inner_texts)) > 1:
            return None
        slots = [Slot(after=(text,) if text else ()) for text in [*inner_texts, ""]]
        return (texts[0], texts[-1]), slots
    # What is said of a segment is no longer than the longest text between two of them, but for its own fields.
    own = _own_fields(segments)
    longest = max(map(len, inner_texts)) + _MARGIN
    sizes = [longest + sum(len(values[index]) for _, values in own) for index in (0, -1)]
    head = texts[0][: max(len(texts[0]) - sizes[0], 0)]
    tail = texts[-1][sizes[1] :]
    near = [texts[0][len(head) :], *inner_texts, texts[-1][: sizes[1]]]
    understood = None if any(map(_PLACEHOLDERS.search, near)) else _slots_near(near, own)
    if understood is None:
        return None
    around, slots = understood
    return None if _may_be_own(slots, segments) else ((head + around[0], around[1] + tail), slots)


def _slots_near(
    texts: Sequence[str], own: Sequence[tuple[str, list[str]]]
) -> tuple[tuple[str, str], list[Slot]] | None:
    """Do what `slots_of` does, with only that of the first and of the last text that may belong to a segment."""
    keys = _replace_fields(texts, own)
    if keys is None:
        return None
    shapes = [_Shape.of(text) for text in keys.texts]
    inner = shapes[1:-1]
    if any(shape.text != inner[0].text for shape in inner):
        return None
    running = _running_columns(inner)
    return None if running is None else _split(shapes, running, keys.names)


@dataclass(frozen=True)
class _Fields:
    """Texts with a character in place of each field, and the names of these characters."""

    texts: list[str]
    names: dict[str, str] = field(default_factory=dict)


def _replace_fields(texts: Sequence[str], own: Iterable[tuple[str, list[str]]]) -> _Fields | None:
    """Replace, in every text, the values of fields that are shown for each segment. None: they may be numbers too."""
    replaced = _Fields(list(texts))
    inner = texts[1:-1]

    def is_named(key: str) -> bool:
        return all(re.search(re.escape(key), text, re.IGNORECASE) for text in inner)

    for key, values in sorted(own, key=lambda each: (-min(map(len, each[1])), not is_named(each[0]))):
        after = False
        found = _occurrences(replaced.texts[:-1], values, key, last=True)
        if found is None:
            after = True
            found = _occurrences(replaced.texts[1:], values, key, last=False)
        if found is None:
            continue
        places = found.spans
        running, first = _count_of(values)
        if running is not None and first in (0, 1):
            worded = not all(value.isdecimal() or len(value) == 1 for value in values)  # such as `Source 2`
            labels, named = worded or _are_labels(replaced.texts[int(after) :], places), is_named(key)
            if running and worded and not named:
                continue
            told = found.told_apart or _is_dumped(key, replaced.texts[int(after) :], places)
            if not told and (running or (labels and not named)):
                return None  # a running number, or not; another order of the segments would show which
        character = chr(_FIELDS[len(replaced.names)])
        replaced.names[character] = key
        for index, (start, stop) in enumerate(places, start=int(after)):
            text = replaced.texts[index]
            replaced.texts[index] = text[:start] + character + text[stop:]
    return replaced


def _is_dumped(key: str, texts: Sequence[str], places: Sequence[tuple[int, int]]) -> bool:
    """Return whether texts show metadata as Python and JSON write it, under a name that is no label: `'page': 3`."""
    shown = re.compile(rf"""(?P<quote>['"]){re.escape(key)}(?P=quote): ['"]?$""")
    before = (text[:start] for text, (start, _) in zip(texts, places, strict=False))
    return not _LABEL_WORD.search(key) and all(map(shown.search, before))


def _are_labels(texts: Sequence[str], places: Sequence[tuple[int, int]]) -> bool:
    """Return whether these places of texts look like those of running numbers: `[1]`, `2.`, `Document 3`."""
    return all(
        (_LABEL_BEFORE.search(text[:start]) and _LABEL_AFTER.match(text[stop:])) or _LABEL_WORD.search(text[:start])
        for text, (start, stop) in zip(texts, places, strict=False)
    )


def _may_be_own(slots: Sequence[Slot], segments: Sequence[Segment]) -> bool:
    """Return whether a number that changes from place to place may tell a value of the segments, in any form.

    A page may be counted from 0 and shown from 1; a date may be written in another way.
    """
    keys = set.union(*({*segment.metadata, "title", "score"} for segment in segments))
    for side in ("before", "after"):
        texts = ["".join(each for each in getattr(slot, side) if isinstance(each, str)) for slot in slots]
        rows = [list(_LABEL.finditer(text)) for text in texts]
        for column in zip(*(row for row in rows if row), strict=False):
            owners = [segment for segment, row in zip(segments, rows, strict=True) if row]
            labels = [match[0] for match in column]
            if len(set(labels)) < 2:
                continue
            if _place_in_count(labels[0]) in (0, 1) and _are_labels(
                [match.string for match in column], [match.span() for match in column]
            ):
                continue
            if any(_tell(labels, [str(value_of(each, key)) for each in owners]) for key in keys):
                return True
    return False


def _tell(labels: Sequence[str], values: Sequence[str]) -> bool:
    """Return whether labels may be parts of values, or numbers that are counted from another start."""
    if not all(map(str.isdecimal, labels)):
        return list(labels) == list(values)
    numbers = [set(map(int, re.findall(r"\d{1,9}", value))) for value in values]
    steps = (-1, 0, 1) if all(map(str.isdecimal, values)) else (0,)
    return any(all(int(label) + by in own for label, own in zip(labels, numbers, strict=True)) for by in steps)


def _own_fields(segments: Sequence[Segment]) -> list[tuple[str, list[str]]]:
    """Return fields that every segment has, and that are not the same for all."""
    found = []
    for key in sorted({"title", "score", *segments[0].metadata}):
        values = [value_of(segment, key) for segment in segments]
        if all(isinstance(value, str | Real) and not isinstance(value, bool) and str(value) for value in values):
            listed = [str(value) for value in values]
            if len(set(listed)) > 1:
                found.append((key, listed))
    return found


@dataclass(frozen=True)
class _Places:
    """Where texts hold the values of a field, and whether another number stands beside a place that names the field."""

    spans: list[tuple[int, int]]
    told_apart: bool


def _occurrences(texts: Sequence[str], values: Sequence[str], key: str, *, last: bool) -> _Places | None:
    """Return where each text holds its value as a whole word; None if one does not.

    A page may equal the running number of its own document. So of several places the one counts that has the same word
    before it in every text: the field's name, or else what is nearest to the segments.
    """
    found: list[dict[str, tuple[int, int]]] = []
    for text, value in zip(texts, values, strict=True):
        spans = (
            [match.span() for match in re.finditer(rf"(?<!\w){re.escape(value)}(?!\w)", text)] if value in text else []
        )
        if not spans:
            return None
        leads = {_lead(text[:start]): (start, stop) for start, stop in (spans if last else spans[::-1])}
        found.append(leads)
    nearest = -1 if last else 0
    shared = set(found[0]).intersection(*found[1:])
    named = {each for each in shared if re.search(rf"(?<![^\W_]){re.escape(key)}\W*$", each, re.IGNORECASE)}
    if not shared:
        return _Places([sorted(each.values())[nearest] for each in found], told_apart=False)
    lead = sorted(named or shared, key=lambda each: found[0][each])[nearest]
    told_apart = bool(named) and shared != named and not _LABEL_WORD.search(key)
    return _Places([each[lead] for each in found], told_apart)


def _lead(text: str) -> str:
    """Return the last word of a text, with what follows it."""
    return match[0] if (match := _LAST_WORD.search(text[-_LONGEST_LABEL:])) else ""


def counts_up(values: Sequence[str]) -> bool:
    """Return whether values are running numbers, letters or labels with them, in this order."""
    return _count_of(values)[0] is True


def _count_of(values: Sequence[str]) -> tuple[bool | None, int]:
    """Return whether values run on like numbers, letters or labels with them (`Source 2`), and from where.

    True: in this order. False: in another one. None: in no order.
    """
    labels = [match for value in values if len(value) < _LONGEST_LABEL and (match := _NUMBERED.fullmatch(value))]
    if len(labels) < len(values) or len({(label[1], label[3]) for label in labels}) > 1:
        return None, 0
    numbers = [_place_in_count(label[2]) for label in labels]
    count = list(range(min(numbers), min(numbers) + len(numbers)))
    return (numbers == count if sorted(numbers) == count else None), min(numbers)


def _place_in_count(label: str) -> int:
    return int(label) if label.isdecimal() else ord(label) - ord("A" if label.isupper() else "a")


@dataclass(frozen=True)
class _Shape:
    """A text with a character in place of each number or letter that may count; and these labels."""

    text: str
    labels: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> _Shape:
        return cls(_LABEL.sub(_NUMBER, text), tuple(_LABEL.findall(text)))

    def restored(self, start: int, stop: int) -> str:
        """Return `text[start:stop]` with its labels."""
        labels = iter(self.labels[self.text[:start].count(_NUMBER) :])
        return "".join(next(labels) if each == _NUMBER else each for each in self.text[start:stop])


def _follows(label: str, before: str) -> bool:
    """Return whether a label counts on from another one: 2 from 1, b from a."""
    if label.isdecimal() and before.isdecimal():
        return int(label) == int(before) + 1
    return not label.isdecimal() and not before.isdecimal() and ord(label) == ord(before) + 1


def _running_columns(inner: Sequence[_Shape]) -> list[bool | None] | None:
    """Return which labels of the texts between segments count (None: one text alone does not say). None: neither."""
    columns: list[bool | None] = []
    for labels in zip(*(shape.labels for shape in inner), strict=True):
        pairs = list(pairwise(labels))
        if not pairs:
            columns.append(None)
        elif all(a == b for a, b in pairs):
            columns.append(False)
        elif all(_follows(b, a) for a, b in pairs):
            columns.append(True)
        else:
            return None
    return columns


def _split(
    shapes: Sequence[_Shape], running: Sequence[bool | None], names: dict[str, str]
) -> tuple[tuple[str, str], list[Slot]] | None:
    """Split what stands between two segments into what belongs to the one before and to the one after it."""
    first, last, between = shapes[0], shapes[-1], shapes[1].text
    size = len(between)
    tail = _common(first, shapes[1], running, backwards=True)
    head = _common(shapes[-2], last, running, backwards=False)
    if tail + head < size:
        rest = _ESCAPED_BREAK.sub("", between[head : size - tail])
        if _ARROW.search(rest) or any(each.isalnum() or _PLACEHOLDERS.match(each) for each in rest):
            return None  # it says something that is not said of the first or of the last segment
        cut = size - tail
    else:
        line = between.rfind("\n", 0, head) + 1
        cut = max(line, size - tail)
    if not between[cut:].strip():
        cut = size
    begin = len(first.text) - (size - cut)
    end = min(head, cut) if between[: min(head, cut)].strip() else 0
    spans_before = [(first, begin, len(first.text)), *((shape, cut, size) for shape in shapes[1:-1])]
    spans_after = [*((shape, 0, cut) for shape in shapes[1:-1]), (last, 0, end)]
    before = [shape.restored(start, stop) for shape, start, stop in spans_before]
    after = [shape.restored(start, stop) for shape, start, stop in spans_after]
    around = first.restored(0, begin), last.restored(end, len(last.text))
    if any(_PLACEHOLDERS.search(text) for text in around):
        return None
    numbers: Sequence[str | None] = _numbers(before) or _numbers(after) or [None] * len(before)
    slots = [
        Slot(_with_fields(one, names), _with_fields(other, names), number)
        for one, other, number in zip(before, after, numbers, strict=True)
    ]
    return around, slots


def _common(first: _Shape, second: _Shape, running: Sequence[bool | None], *, backwards: bool) -> int:
    """Return how many characters two texts share at their ends, or at their starts, if labels count as they should.

    The shared text does not begin or end within a word.
    """
    step = -1 if backwards else 1
    texts = [shape.text[::step] for shape in (first, second)]
    labels = [shape.labels[::step] for shape in (first, second)]
    columns = running[::step]
    length = label = 0
    for a, b in zip(*texts, strict=False):
        if a != b:
            break
        if a == _NUMBER:
            one, two, counts = labels[0][label], labels[1][label], columns[label]
            if not ((one == two and counts is not True) or (_follows(two, one) and counts is not False)):
                break
            label += 1
        length += 1
    while length and any(text[length - 1].isalnum() and text[length : length + 1].isalnum() for text in texts):
        length -= 1
    return length


def _numbers(texts: Sequence[str]) -> list[str] | None:
    """Return the label that counts from text to text; None if there is none."""
    for column in zip(*(_LABEL.findall(text) for text in texts), strict=False):
        if len(column) > 1 and all(_follows(b, a) for a, b in pairwise(column)):
            return list(column)
    return None


def _with_fields(text: str, names: dict[str, str]) -> tuple[str | Field, ...]:
    """Split a text at the characters that stand for fields."""
    pieces: Iterable[str] = re.split(f"([{''.join(names)}])", text) if names else [text]
    return tuple(Field(names[piece]) if piece in names else piece for piece in pieces if piece)
