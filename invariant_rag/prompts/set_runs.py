"""Runs of neighbouring segments that form a set: what stands between them is the same for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import pairwise
from numbers import Real

from invariant_rag.prompts.decorations import slots_of
from invariant_rag.prompts.known_documents import KnownDocument
from invariant_rag.segments import Field, Segment, SegmentSet, value_of


@dataclass(frozen=True)
class Found:
    """A segment, and how it came.

    Attributes:
        segment: The segment.
        turn: Index of its turn.
        origin: The text of the document, which may be written otherwise: escaped, or with quotes.
        document: The known document; None if it came as a segment. Its text is to stay as it is.
        size: Declared number of segments of its set.
        group: Declared set.
    """

    segment: Segment
    turn: int
    origin: str
    document: KnownDocument | None = None
    size: int | None = None
    group: str = ""


Gap = list[tuple[int, str]]
"""Texts between two segments, by turn."""


@dataclass
class Chain:
    """Segments with text around and between them, and nothing else.

    Attributes:
        found: The segments.
        gaps: The texts before each of them, and after the last.
        runs: Which of them form a set, by start and stop; set when all chains are known.
    """

    found: list[Found]
    gaps: list[Gap]
    runs: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class SetRun:
    """A run of segments that is a set.

    Attributes:
        segments: The set.
        before: What is left of the text before it.
        after: What is left of the text after it.
        doubt: Why the same segments in another order may be understood otherwise; empty if they are not.
    """

    segments: SegmentSet
    before: Gap
    after: Gap
    doubt: str = ""


def runs_of(chain: Chain) -> list[tuple[int, int]]:
    """Return start and stop of the sets of a chain: the longest first, then the longest of what is left.

    Part of a set is a set. So a run need only be tried where no earlier one reaches as far.
    """
    count = len(chain.found)

    @cache
    def is_set(start: int, stop: int) -> bool:
        return stop - start == 1 or understand(chain.found[start:stop], chain.gaps[start : stop + 1]) is not None

    def longest(start: int, reach: int) -> int:
        """Return where the longest set from here stops, at `reach` at the latest."""
        if is_set(start, reach):
            return reach
        low = start + 1
        while low + 1 < reach:
            middle = (low + reach) // 2
            low, reach = (middle, reach) if is_set(start, middle) else (low, middle)
        return low

    if count and is_set(0, count):
        return [(0, count)]
    candidates: list[tuple[int, int]] = []
    reach = furthest = 0
    for start in range(count):
        reach = max(reach, start + 1)
        while reach < count and is_set(max(start, reach - 2), reach + 1):  # a look at the last three is cheap
            reach += 1
        if reach > furthest:
            furthest = longest(start, reach)
            candidates.append((start - furthest, start))
    return _disjoint(candidates, count, longest)


def _disjoint(
    candidates: list[tuple[int, int]], count: int, longest: Callable[[int, int], int]
) -> list[tuple[int, int]]:
    """Return start and stop of runs that do not overlap, the longest first, and of what they leave of others.

    Args:
        candidates: Runs as their negative length and their start.
        count: Number of segments.
        longest: Returns where the longest set from a start stops, at a limit at the latest.
    """
    heapify(candidates)
    taken = bytearray(count)
    runs = []
    while candidates:
        size, start = heappop(candidates)
        stop = start - size
        if not any(taken[start:stop]):
            taken[start:stop] = b"\1" * (stop - start)
            runs.append((start, stop))
            continue
        while start < stop:  # what is left of it
            limit = next((index for index in range(start, stop) if taken[index]), stop)
            if limit > start:
                limit = longest(start, limit)
                heappush(candidates, (start - limit, start))
            start = max(limit, start + 1)
    return sorted(runs)


def stand_apart(chain: Chain) -> bool:
    """Return whether neighbouring segments that came as such look like one set that was not understood."""
    for (start, middle), (_, stop) in pairwise(chain.runs):
        if any(chain.found[index].document is not None for index in (middle - 1, middle)):
            continue  # what was retrieved together is checked by itself
        if chain.found[middle - 1].group != chain.found[middle].group:
            continue  # declared as two sets
        inner = [_skeleton(chain, index) for index in range(start + 1, stop) if index != middle]
        if stop - start == 2 or _skeleton(chain, middle) in inner:
            return True
    return False


def _skeleton(chain: Chain, index: int) -> str:
    """Return the text before a segment, without metadata and numbers."""
    text = "".join(text for _, text in chain.gaps[index])
    neighbours = [each.segment for each in chain.found[index - 1 : index + 1]]
    values = {
        str(value_of(segment, key, "")) for segment in neighbours for key in ("title", "score", *segment.metadata)
    }
    for value in sorted(values, key=len, reverse=True):
        if value:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "\0", text)
    return re.sub(r"\d+|(?<!\w)[A-Za-z](?!\w)|\0", "\0", text)


def understand(members: Sequence[Found], gaps: Sequence[Gap]) -> SetRun | None:
    """Return a run of segments as a set; None if what stands between them does not allow it.

    Args:
        members: The segments.
        gaps: The texts before, between and after them.
    """
    inner = gaps[1:-1]
    across_turns = len({each.turn for each in members}) > 1
    if len({each.group for each in members}) > 1 or (
        across_turns and any(text.strip() for gap in inner for _, text in gap)
    ):
        return None
    texts = ["".join(text for _, text in gap) for gap in gaps]
    segments = [each.segment for each in members]
    documents = [each.document for each in members if each.document is not None]
    blank = not documents and not any(map(str.strip, texts[1:-1]))
    if blank or any(each.token_ids is not None for each in segments):
        return SetRun(SegmentSet(segments), gaps[0], gaps[-1]) if blank else None
    stripped = _in_slots(texts, segments, gaps)
    unstripped = None
    if len(members) > 1 and len({(each.leading, each.trailing) for each in documents}) > 1:
        with_space = _with_own_space(texts, members)  # the template may have stripped the documents, or not
        unstripped = None if with_space is None else _in_slots(*with_space, gaps)
    understood = stripped or unstripped
    doubt = ""
    if understood is not None and _shows_which(understood.segments):
        doubt = "documents with equal text have numbers that may be their own."
    elif stripped is not None and unstripped is not None:
        doubt = "white space at the ends of documents cannot be told from that between them."
    return replace(understood, doubt=doubt) if understood is not None and doubt else understood


def _shows_which(segments: SegmentSet) -> bool:
    """Return whether text in the slots, other than their fields, may be metadata that tells equal texts apart."""
    slots = segments.slots or ()
    by_text: dict[str, list[Segment]] = {}
    for segment in segments:
        by_text.setdefault(segment.text, []).append(segment)
    alike = [each for group in by_text.values() if len(set(group)) > 1 for each in group]
    if not alike or not any(slot.before or slot.after for slot in slots):
        return False
    shown = "\n".join(slot.render(replace(each, text="")) for slot, each in zip(slots, segments, strict=True))
    fields = {each.key for slot in slots for each in (*slot.before, *slot.after) if isinstance(each, Field)}
    keys = {"title", "score"}.union(*(each.metadata for each in alike)) - fields
    values = {str(value) for each in alike for key in keys if isinstance(value := value_of(each, key), str | Real)}
    return any(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", shown) for value in values if value and value in shown)


def _in_slots(texts: Sequence[str], segments: Sequence[Segment], gaps: Sequence[Gap]) -> SetRun | None:
    found = slots_of(texts, segments)
    if found is None:
        return None
    (before, after), slots = found
    return SetRun(
        SegmentSet(segments, slots=slots),
        _cut(gaps[0], before, from_end=True),
        _cut(gaps[-1], after, from_end=False),
    )


def _with_own_space(texts: Sequence[str], members: Sequence[Found]) -> tuple[list[str], list[Segment]] | None:
    """Return texts and segments with the white space at the ends of the documents in the segments, if it is there."""
    texts, segments = list(texts), []
    for index, member in enumerate(members):
        leading, trailing = ("", "") if member.document is None else (member.document.leading, member.document.trailing)
        before, after = texts[index], texts[index + 1]
        if not before.endswith(leading) or not after.startswith(trailing):
            return None
        texts[index], texts[index + 1] = before[: len(before) - len(leading)], after[len(trailing) :]
        segments.append(replace(member.segment, text=leading + member.segment.text + trailing))
    return texts, segments


def _cut(gap: Sequence[tuple[int, str]], kept: str, *, from_end: bool) -> list[tuple[int, str]]:
    """Return texts by turn, shortened to `kept` at their end or at their start."""
    excess = sum(len(text) for _, text in gap) - len(kept)
    shortened = []
    for turn, text in reversed(gap) if from_end else gap:
        by = min(excess, len(text))
        excess -= by
        kept_text = text[: len(text) - by] if from_end else text[by:]
        shortened.append((turn, kept_text if by else text))
    return shortened[::-1] if from_end else shortened
