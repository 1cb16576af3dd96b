"""Recognise sets of segments in conversations that frameworks have put together, and say what is not understood.

Segments arrive as parts of a turn, between marks inside text, or as the plain text of documents that are known from a
retrieval of the same run. What belongs to one set is decided by what stands between them; see `decorations`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from invariant_rag.prompts.known_documents import (
    KnownDocument,
    Retrieval,
    contain_one_another,
    count_held,
    differ_in_space,
    forms_of,
    holds_as_words,
    holds_more,
    holds_part,
    holds_several,
    occurrences,
)
from invariant_rag.prompts.labels import find_labels, spellings_of
from invariant_rag.prompts.markers import Marked, split_marked
from invariant_rag.prompts.mentions import repeated, singles_out, tells_order, without
from invariant_rag.prompts.order_warnings import Finding
from invariant_rag.prompts.other_orders import is_order_free
from invariant_rag.prompts.retrieved_text import looks_introduced, looks_labelled
from invariant_rag.prompts.rewritten import count_rewritten
from invariant_rag.prompts.set_runs import Chain, Found, Gap, runs_of, stand_apart, understand
from invariant_rag.segments import Prompt, Segment, SegmentSet, Slot, document_rendering


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
        documents = [document for retrieval in known for document in retrieval.documents]
        self._documents = sorted(documents, key=lambda each: each.segment.canonical_key)
        self._retrieved = Counter[str]()  # how often each text was retrieved at once
        for retrieval in known:
            self._retrieved |= Counter(each.segment.text for each in retrieval.documents)
        self._dealt = Counter[str]()
        self._elsewhere = elsewhere
        self._parts: list[list[Any]] = [[] for _ in turns]
        self._sets: list[list[Found]] = []
        self._findings: dict[Finding, None] = {}

    def run(self) -> Recognition:
        walls, chains = self._chains()
        for chain in chains:
            chain.runs = runs_of(chain)
        in_sets = Counter(
            chain.found[index].origin
            for chain in chains
            for start, stop in chain.runs
            for index in range(start, stop)
            if stop - start > 1
        )
        self._check_equal(Counter(each.origin for chain in chains for each in chain.found))
        for chain, wall in zip(chains, walls, strict=True):
            self._place_chain(chain, in_sets)
            if wall is not None:
                turn, part = wall
                self._parts[turn].append(part)
        self._check_sizes()
        self._check_known()
        self._check_repeated(Counter(each.origin for chain in chains for each in chain.found))
        self._check_tool_results()
        self._check_texts()
        self._check_mentions()
        self._check_history()
        turns = [
            replace(turn, parts=tuple(merge_texts(parts))) for turn, parts in zip(self._turns, self._parts, strict=True)
        ]
        return Recognition(tuple(turns), tuple(self._findings))

    def _find(self, kind: Any, message: str) -> None:
        self._findings[Finding(kind, message)] = None

    # --- finding segments ---

    def _chains(self) -> tuple[list[tuple[int, Any] | None], list[Chain]]:
        """Return chains, and the part after each that is neither text nor a segment, with the index of its turn."""
        walls: list[tuple[int, Any] | None] = []
        chains = [Chain([], [[]])]

        def end_chain(wall: tuple[int, Any] | None = None) -> None:
            walls.append(wall)
            chains.append(Chain([], [[]]))

        role = None
        for index, turn in enumerate(self._turns):
            if turn.role != role or turn.role == "tool":
                end_chain()
            role = turn.role
            for part in turn.parts:
                if isinstance(part, Segment):
                    self._add(chains[-1], Found(part, index, part.text), index)
                elif isinstance(part, str) and turn.role != "assistant":
                    for each in self._split(part, index):
                        self._add(chains[-1], each, index)
                else:
                    end_chain((index, part))
        walls.append(None)
        return walls, chains

    @staticmethod
    def _add(chain: Chain, part: str | Found, turn: int) -> None:
        if isinstance(part, Found):
            chain.found.append(part)
            chain.gaps.append([])
        else:
            chain.gaps[-1].append((turn, part))

    def _split(self, text: str, turn: int) -> Iterator[str | Found]:
        parts, rest = split_marked(text)
        if rest:
            self._find("marks", "the prompt holds marks that were cut in two, or written by another process.")
        if parts == [text] and not occurrences(text, self._documents):
            yield text  # the same object: a framework may use its own kind of str
            return
        for part in parts:
            if isinstance(part, Marked):
                segment = replace(self._with_metadata(part.segment), text=part.text)
                yield Found(segment, turn, part.segment.text, size=part.size, group=part.group)
                continue
            position = 0
            for each in occurrences(part, self._documents):
                yield part[position : each.start]
                written = replace(each.document.segment, text=part[each.start : each.stop])
                yield Found(written, turn, each.document.segment.text, each.document)
                position = each.stop
            yield part[position:]

    def _with_metadata(self, segment: Segment) -> Segment:
        """Return a marked segment with the metadata of the document, which marks do not carry, if it is known."""
        known = [each for each in self._documents if segment.text in forms_of(each)]
        # A mark is of this process, wherever it retrieved.
        alike = known or [each for each in self._elsewhere if segment.text == each.segment.text]
        if segment.metadata or not alike:
            return segment
        document = alike[self._dealt[segment.text] % len(alike)]  # equal texts may differ in metadata
        self._dealt[segment.text] += 1
        score = document.segment.score if segment.score is None else segment.score
        return replace(segment, metadata=document.segment.metadata, score=score)

    # --- forming sets ---

    def _place_chain(self, chain: Chain, in_sets: Counter[str]) -> None:
        """Write a chain to the parts of its turns, with its segments in sets.

        A known document that stands alone is text if it stands in a set, too: the question names it.
        """
        gaps = [list(gap) for gap in chain.gaps]
        for start, stop in chain.runs:
            member = chain.found[start]
            often = in_sets[member.origin] >= self._retrieved[member.origin] > 0
            if stop - start == 1 and member.document is not None and often:
                gaps[stop][:0] = [*gaps[start], (member.turn, member.segment.text)]
                gaps[start] = []
                continue
            self._place(chain.found[start:stop], gaps[start : stop + 1], gaps, stop)
        self._write(gaps[-1])
        if stand_apart(chain):
            self._find("separate", f"{len(chain.found)} segments stand apart, with different text between them.")

    def _place(self, members: list[Found], around: list[Gap], gaps: list[Gap], stop: int) -> None:
        """Write a run of segments as a set, or each by itself if what the run before left of the text is too little."""
        understood = understand(members, around)
        if understood is None:
            for index, member in enumerate(members):
                self._write(around[index])
                slots = None if member.document is None else [Slot()]  # text of a prompt stays as it is written
                self._parts[member.turn].append(SegmentSet([member.segment], slots=slots))
                self._sets.append([member])
            return
        self._write(understood.before)
        self._parts[members[0].turn].append(understood.segments)
        self._sets.append(members)
        gaps[stop] = understood.after
        if understood.doubt:
            self._find("separate", understood.doubt)
        elif not is_order_free(members, understood, self._documents):
            self._find("separate", "in another order, the text around the documents could be understood otherwise.")

    def _write(self, gap: Iterable[tuple[int, str]]) -> None:
        for turn, text in gap:
            self._parts[turn].append(text)

    # --- what is not understood ---

    def _check_equal(self, counts: Counter[str]) -> None:
        """Check that documents with equal text, but other metadata, stand only where they were listed."""
        for retrieval in self._known:
            segments = {each.segment for each in retrieval.documents}
            several = [text for text, count in Counter(each.text for each in segments).items() if count > 1]
            listed = Counter(each.segment.text for each in retrieval.documents)
            if any(counts[text] > listed[text] for text in several):
                self._find("split", "retrieved documents with equal text stand elsewhere in the prompt, too.")

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
        counts = Counter(each.origin for each in self._all_found())
        free = self._unasked("\n".join(self._free_texts()))

        def found(retrieval: Retrieval) -> list[KnownDocument]:
            return [each for each in retrieval.documents if count_held([each], counts)]

        whole = [_texts(one.documents) for one in self._known if len(found(one)) == len(one.documents)]
        for retrieval in self._known:
            arrived = found(retrieval)
            missing = [each for each in retrieval.documents if each not in arrived]
            in_one_set = [count_held(arrived, Counter(each.origin for each in members)) for members in self._sets]
            if max(in_one_set, default=0) < count_held(arrived, counts):
                self._find("separate", "documents that were retrieved together have different text between them.")
            if arrived and retrieval.doubt:
                self._find("written", retrieval.doubt)
            cut = any(holds_part(free, each) for each in missing) or holds_more(free, retrieval, counts)
            if cut or (not arrived and (count_rewritten(free, missing) > 1 or holds_as_words(free, missing))):
                self._find("split", "the prompt holds parts of retrieved documents, without their boundaries.")
            elif len(arrived) == 1 and retrieval.chosen_from:
                continue
            elif arrived and missing and not any(_texts(arrived) <= other for other in whole):
                count = f"{len(arrived)} of {len(retrieval.documents)}"
                self._find("incomplete", f"a call got {count} documents that were retrieved together.")
            elif arrived and contain_one_another(retrieval, counts):
                self._find("split", "retrieved documents contain one another, and cannot be told apart.")
            elif arrived and differ_in_space(retrieval):
                self._find("split", "retrieved documents differ in white space alone, and cannot be told apart.")

    def _check_repeated(self, counts: Counter[str]) -> None:
        asked = "\n".join(query for each in self._known for query in each.queries)
        if any(len(text.split()) > 1 and text.strip() not in asked for text in repeated(counts, self._known)):
            self._find("named", "the prompt holds a retrieved document once more, outside of the others.")

    def _check_tool_results(self) -> None:
        """Look for neighbouring results of tools that hold one document each."""
        alone = {_texts(each.documents) for each in self._known if len(each.documents) == 1}
        single = []
        for turn, parts in zip(self._turns, self._parts, strict=True):
            sets = [part for part in parts if isinstance(part, SegmentSet)] if turn.role == "tool" else []
            is_single = [len(each) for each in sets] == [1] and frozenset({sets[0][0].text.strip()}) not in alone
            single.append(is_single)
        if any(one and other for one, other in pairwise(single)):
            self._find("separate", "neighbouring results of tools hold one document each.")

    def _check_texts(self) -> None:
        free = list(self._free_texts())
        for example in self._examples:  # templates are filled in with other white space
            pattern = r"\s+".join(map(re.escape, example.split()))
            free = [re.sub(pattern, "", text) for text in free]
        if self._elsewhere and holds_several("\n".join(free), self._elsewhere):
            self._find("elsewhere", "the prompt holds documents that were retrieved in another run.")
        elif any(map(looks_labelled, free)):
            self._find("no_segments", "the prompt holds labelled documents, but they are no segments.")
        elif not self._sets and any(map(looks_introduced, free)):
            self._find("no_segments", "the prompt announces a context of several texts, but they are no segments.")

    def _check_mentions(self) -> None:
        """Look for what names or quotes documents in the order given, outside of the sets."""
        everywhere = self._unasked("\n".join(self._free_texts()))
        asked = [_texts(each.documents) for each in self._known if each.queries]
        for parts in self._parts:
            sets = [part for part in parts if isinstance(part, SegmentSet) and len(part) > 1]
            near = self._unasked("\n".join(part for part in parts if isinstance(part, str))) if sets else ""
            for each in sets:
                if tells_order(everywhere, each):
                    self._find("named", "the prompt lists titles, sources or scores of documents in the order given.")
                elif any(_texts(each) <= texts for texts in asked) and singles_out(near, each):
                    self._find("named", "the prompt names the document that was listed first or last.")

    def _check_history(self) -> None:
        """Look for what an earlier answer cites by numbers that are given anew, or holds of documents."""
        sets = [part for parts in self._parts for part in parts if isinstance(part, SegmentSet) and len(part) > 1]
        answers = [turn for turn in self._turns if turn.role == "assistant"]
        said = [part for turn in answers for part in turn.parts if isinstance(part, str)]
        names = {name for each in sets for slot in each.slots or () for name in spellings_of(slot)} if said else set()
        if names and any(label in names for text in said for *_, label in find_labels(text, names)):
            self._find("named", "an earlier answer cites documents by numbers that are given anew.")
        arrived = _texts(each.segment for each in self._all_found())
        for retrieval in self._known:
            texts = [text for text in _texts(retrieval.documents) if len(text.split()) > 1]
            if arrived.isdisjoint(texts) and any(sum(each in text for each in texts) > 1 for text in said):
                self._find("split", "a message of the assistant holds retrieved documents.")

    def _unasked(self, text: str) -> str:
        return without(text, (query for each in self._known for query in each.queries))

    def _free_texts(self) -> Iterator[str]:
        """Yield the texts outside of sets."""
        for turn, parts in zip(self._turns, self._parts, strict=True):
            if turn.role != "assistant":
                yield from (part for part in parts if isinstance(part, str))

    def _all_found(self) -> list[Found]:
        return [each for members in self._sets for each in members]


def merge_texts(parts: Iterable[Any]) -> list[Any]:
    """Join neighbouring texts, and leave out empty ones. Texts of a framework's own kind of str stay by themselves."""
    merged: list[Any] = []
    for part in parts:
        if type(part) is str and merged and type(merged[-1]) is str:
            merged[-1] += part
        elif part != "":
            merged.append(part)
    return merged


def _texts(documents: Iterable[KnownDocument | Segment]) -> frozenset[str]:
    segments = (each if isinstance(each, Segment) else each.segment for each in documents)
    return frozenset(each.text.strip() for each in segments)
