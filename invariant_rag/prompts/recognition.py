"""Recognise sets of segments in conversations that frameworks have put together, and say what is not understood.

Segments arrive as parts of a turn, between marks inside text, or as the plain text of documents that are known from a
retrieval of the same run. What belongs to one set is decided by what stands between them; see `decorations`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

from invariant_rag.prompts.decorations import slots_of
from invariant_rag.prompts.known_documents import KnownDocument, Retrieval, holds_part, holds_several, split_known
from invariant_rag.prompts.markers import Marked, split_marked
from invariant_rag.prompts.order_warnings import Finding
from invariant_rag.segments import Prompt, Segment, SegmentSet, document_rendering

_LABELLED = re.compile(
    r"^[ \t>*#-]*\(?\[?(?:document|source|passage|chunk|context|snippet|excerpt|search result|result)s?"
    r"[ \t#:([]*(\d+)\b[\])]?[ \t]*(?:[:.)\-\n(]|$)",
    re.IGNORECASE | re.MULTILINE,
)
_TAGGED = re.compile(
    r"<(doc|document|source|passage|chunk|context|snippet|search_result)\b[^<>]*>.*?</\1>", re.DOTALL | re.IGNORECASE
)


@dataclass(frozen=True)
class Turn:
    """One message of a conversation.

    Attributes:
        role: `user`, `assistant`, `system`, `tool`, or another one.
        parts: Strings, segments, sets of segments, and anything else that a message of a framework holds, such as an
            image.
    """

    role: str
    parts: tuple[Any, ...]

    @property
    def text(self) -> str:
        """The strings of the turn, without its segments."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def has_segments(self) -> bool:
        """Whether a part is a segment or a set."""
        return any(isinstance(part, Segment | SegmentSet) for part in self.parts)


@dataclass(frozen=True)
class Recognition:
    """A conversation in which every segment is in a set.

    Attributes:
        turns: The turns, as many as before, with strings, `SegmentSet`s and other parts.
        findings: Why the answer may depend on the order of the documents all the same.
    """

    turns: tuple[Turn, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class _Found:
    """A segment, how it came, and what stands between it and the one before.

    Attributes:
        segment: The segment.
        written: Whether it is text that somebody else wrote, which is to stay as it is.
        size: Declared number of segments of its set.
        group: Declared set.
        turn: Index of its turn.
        gap: Texts since the segment before, or since the start, by turn.
    """

    segment: Segment
    turn: int
    written: bool = False
    size: int | None = None
    group: str = ""
    gap: list[tuple[int, str]] = field(default_factory=list)


def recognize(
    turns: Sequence[Turn],
    known: Sequence[Retrieval] = (),
    elsewhere: Sequence[KnownDocument] = (),
    *,
    examples: Sequence[str] = (),
) -> Recognition:
    """Find the sets of segments in a conversation.

    What an assistant said is left as it is. Segments of neighbouring turns of one role may form a set; it is put into
    the first of these turns.

    Args:
        turns: The conversation.
        known: What was retrieved in this run: its texts are segments wherever they occur.
        elsewhere: What was retrieved in other runs: its texts are no segments, but a reason to warn.
        examples: Texts of a framework's templates that show what documents look like. They are no reason to warn.
    """
    return _Recognizer(turns, known, elsewhere, examples).run()


def parse_marked(text: str) -> Prompt:
    """Parse a string with segments written by `mark` into a prompt. What is not understood is not reported.

    >>> from invariant_rag.prompts import mark
    >>> parse_marked("Documents: " + mark("one") + mark("two") + " Which?").segments == SegmentSet(["one", "two"])
    True
    """
    (turn,) = recognize([Turn("user", (text,))]).turns
    return Prompt.of(*turn.parts, rendering=document_rendering)


class _Recognizer:
    def __init__(
        self,
        turns: Sequence[Turn],
        known: Sequence[Retrieval],
        elsewhere: Sequence[KnownDocument],
        examples: Sequence[str],
    ) -> None:
        self._turns = turns
        self._examples = examples
        self._known = known
        self._documents = [document for retrieval in known for document in retrieval.documents]
        self._elsewhere = elsewhere
        self._parts: list[list[Any]] = [[] for _ in turns]
        self._sets: list[list[_Found]] = []
        self._findings: dict[Finding, None] = {}

    def run(self) -> Recognition:
        for chain in self._chains():
            self._place_chain(chain)
        self._check_sizes()
        self._check_known()
        self._check_texts()
        turns = [
            replace(turn, parts=tuple(_merge_texts(parts)))
            for turn, parts in zip(self._turns, self._parts, strict=True)
        ]
        return Recognition(tuple(turns), tuple(self._findings))

    def _find(self, kind: str, message: str) -> None:
        self._findings[Finding(kind, message)] = None

    # --- finding segments ---

    def _chains(self) -> Iterator[list[tuple[int, Any]]]:
        """Yield runs of texts and segments, each with the index of its turn; put all other parts where they are."""
        chain: list[tuple[int, Any]] = []
        role = None
        for index, turn in enumerate(self._turns):
            if turn.role != role or turn.role == "tool":
                yield chain
                chain = []
            role = turn.role
            for part in turn.parts:
                if turn.role == "assistant" or not isinstance(part, str | Segment):
                    yield chain
                    chain = []
                    self._parts[index].append(part)
                elif isinstance(part, Segment):
                    chain.append((index, _Found(part, index)))
                else:
                    chain += [(index, each) for each in self._split(part, index)]
        yield chain

    def _split(self, text: str, turn: int) -> Iterator[str | _Found]:
        parts, rest = split_marked(text)
        if rest:
            self._find("marks", "the prompt holds marks that were cut in two, or written by another process.")
        for part in parts:
            if isinstance(part, Marked):
                yield _Found(self._with_metadata(part.segment), turn, size=part.size, group=part.group)
                continue
            for piece in split_known(part, self._documents):
                yield piece if isinstance(piece, str) else _Found(piece, turn, written=True)

    def _with_metadata(self, segment: Segment) -> Segment:
        """Return a marked segment with the metadata of the document, which marks do not carry, if it is known."""
        for document in self._documents:
            if document.segment.text == segment.text and not segment.metadata:
                score = document.segment.score if segment.score is None else segment.score
                return replace(segment, metadata=document.segment.metadata, score=score)
        for document in self._elsewhere:  # a mark is of this process, wherever it retrieved
            if document.segment.text == segment.text and not segment.metadata:
                return replace(segment, metadata=document.segment.metadata)
        return segment

    # --- forming sets ---

    def _place_chain(self, chain: Sequence[tuple[int, Any]]) -> None:
        """Write a chain of texts and segments to the parts of its turns, with the segments in sets."""
        found: list[_Found] = []
        gap: list[tuple[int, str]] = []
        for turn, part in chain:
            if isinstance(part, _Found):
                found.append(replace(part, gap=gap))
                gap = []
            else:
                gap.append((turn, part))
        sizes = []
        start = 0
        while start < len(found):
            stops = range(len(found), start, -1)  # the longest run that is a set
            stop = next(stop for stop in stops if self._place(found[start:stop], found, stop, gap))
            self._sets.append(found[start:stop])
            sizes.append(stop - start)
            start = stop
        for turn, text in gap:
            self._parts[turn].append(text)
        if any(a == b == 1 for a, b in pairwise(sizes)):
            self._find("separate", f"{len(found)} segments stand apart, with different text between them.")

    def _place(self, members: list[_Found], found: list[_Found], stop: int, rest: list[tuple[int, str]]) -> bool:
        """Write neighbouring segments as one set if what stands between them allows it."""
        if len({each.group for each in members}) > 1:
            return False
        inner = [each.gap for each in members[1:]]
        if len({each.turn for each in members}) > 1 and any(text.strip() for gap in inner for _, text in gap):
            return False
        before = members[0].gap
        after = found[stop].gap if stop < len(found) else rest
        texts = ["".join(text for _, text in gap) for gap in (before, *inner, after)]
        segments = [each.segment for each in members]
        written = any(each.written for each in members)
        if all(not text.strip() for text in texts[1:-1]) and not written:
            self._write(before)
            self._parts[members[0].turn].append(SegmentSet(segments))
            return True
        understood = slots_of(texts, segments)
        if understood is None:
            return False
        around, slots = understood
        self._write(_cut(before, around[0], from_end=True))
        self._parts[members[0].turn].append(SegmentSet(segments, slots=slots))
        after[:] = _cut(after, around[1], from_end=False)
        return True

    def _write(self, gap: Iterable[tuple[int, str]]) -> None:
        for turn, text in gap:
            self._parts[turn].append(text)

    # --- what is not understood ---

    def _check_sizes(self) -> None:
        by_group = groupby(sorted(self._all_found(), key=lambda each: each.group), key=lambda each: each.group)
        counts = {group: len(list(members)) for group, members in by_group}
        for members in self._sets:
            for each in members:
                arrived = counts[each.group] if each.group else len(members)
                if each.size is not None and arrived % each.size:
                    self._find("incomplete", f"a call got {arrived} of the {each.size} segments of a set.")
                elif each.size is not None and len(members) < each.size:
                    self._find("separate", f"the {each.size} segments of a set do not stand together.")

    def _check_known(self) -> None:
        texts = {each.segment.text for each in self._all_found()}
        free = "\n".join(self._free_texts())

        def found(retrieval: Retrieval) -> list[KnownDocument]:
            return [each for each in retrieval.documents if not texts.isdisjoint((each.segment.text, *each.texts))]

        whole = [{each.texts for each in one.documents} for one in self._known if len(found(one)) == len(one.documents)]
        for retrieval in self._known:
            arrived = found(retrieval)
            missing = [each for each in retrieval.documents if each not in arrived]
            together = max((self._held(members, arrived) for members in self._sets), default=0)
            if together < self._held(self._all_found(), arrived):
                self._find("separate", "documents that were retrieved together have different text between them.")
            cut = [each for each in missing if holds_part(free, each)]
            if cut:
                self._find("split", "the prompt holds parts of retrieved documents, without their boundaries.")
            elif arrived and missing and not any({each.texts for each in arrived} <= other for other in whole):
                count = f"{len(arrived)} of {len(retrieval.documents)}"
                self._find("incomplete", f"a call got {count} documents that were retrieved together.")

    @staticmethod
    def _held(members: Iterable[_Found], documents: Iterable[KnownDocument]) -> int:
        """Return how many of these documents are among the members."""
        texts = {each.segment.text for each in members}
        return sum(not texts.isdisjoint((each.segment.text, *each.texts)) for each in documents)

    def _check_texts(self) -> None:
        free = list(self._free_texts())
        for example in self._examples:  # templates are filled in with other white space
            pattern = r"\s+".join(map(re.escape, example.split()))
            free = [re.sub(pattern, "", text) for text in free]
        if self._elsewhere and holds_several("\n".join(free), self._elsewhere):
            self._find("elsewhere", "the prompt holds documents that were retrieved in another run.")
        elif any(map(_looks_retrieved, free)):
            self._find("no_segments", "the prompt holds labelled documents, but they are no segments.")

    def _free_texts(self) -> Iterator[str]:
        """Yield the texts outside of sets."""
        for turn, parts in zip(self._turns, self._parts, strict=True):
            if turn.role != "assistant":
                yield from (part for part in parts if isinstance(part, str))

    def _all_found(self) -> list[_Found]:
        return [each for members in self._sets for each in members]


def _cut(gap: Sequence[tuple[int, str]], kept: str, *, from_end: bool) -> list[tuple[int, str]]:
    """Return texts by turn, shortened to `kept` at their end or at their start."""
    excess = sum(len(text) for _, text in gap) - len(kept)
    shortened = []
    for turn, text in reversed(gap) if from_end else gap:
        by = min(excess, len(text))
        excess -= by
        shortened.append((turn, text[: len(text) - by] if from_end else text[by:]))
    return shortened[::-1] if from_end else shortened


def _merge_texts(parts: Iterable[Any]) -> list[Any]:
    """Join neighbouring texts, and leave out empty ones."""
    merged: list[Any] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        elif part != "":
            merged.append(part)
    return merged


def _looks_retrieved(text: str) -> bool:
    """Return whether a text holds at least two documents that are labelled as such, with running numbers or tags."""
    numbers = [int(number) for number in _LABELLED.findall(text)]
    if any(b == a + 1 for a, b in pairwise(numbers)):
        return True
    return len(_TAGGED.findall(text)) > 1
