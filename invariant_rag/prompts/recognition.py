"""Conversations in which every segment is in a set. Text is split around a set in it, and never changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import attrgetter
from typing import Any

from invariant_rag.prompts.markers import Marked, split_marked
from invariant_rag.prompts.order_warnings import Finding, holds_documents, looks_listed, states_order
from invariant_rag.prompts.run_retrievals import Retrieval
from invariant_rag.prompts.slots import find_set
from invariant_rag.prompts.turns import Turn, merge_texts
from invariant_rag.segments import Prompt, Segment, SegmentSet, Slot, document_rendering


@dataclass(frozen=True)
class Recognition:
    """A conversation in which every segment is in a set, and why its answer may depend on their order all the same."""

    turns: tuple[Turn, ...]
    findings: tuple[Finding, ...]
    texts: tuple[str, ...] = ()  # what is neither in a set nor an assistant's, and the documents of the sets
    sets: tuple[SegmentSet, ...] = ()


def recognize(turns: Sequence[Turn], retrievals: Iterable[Retrieval] = (), slots: Iterable[str] = ()) -> Recognition:
    """Put the segments of a conversation into sets, and report what is ambiguous.

    Neighbouring segments of a turn are a set, if nothing but white space, or the same text, is between them. A slot
    that `find_set` recognises in the retrievals of the run becomes a set there, if it occurs once. The text of an
    assistant is never a slot, and never causes a warning.
    """
    known = list(retrievals)
    findings: list[Finding] = []
    changed = list(map(_with_sets, turns, repeat(known), repeat(findings)))
    for slot in sorted(set(slots), key=len, reverse=True):
        segments = find_set(slot, [each for each in known if each.is_set]) if slot else None
        if segments is not None and sum(text.count(slot) for text in _free_texts(changed)) == 1:
            changed = [turn if turn.role == "assistant" else _replace_slot(turn, slot, segments) for turn in changed]
    texts, sets = _free_texts(changed), [each for turn in changed for each in turn.sets]
    findings += _check(changed, known, "\n".join(texts), sets)
    documents = [each.text for segments in sets for each in segments] if known else []
    return Recognition(tuple(changed), tuple(dict.fromkeys(findings)), (*texts, *documents), tuple(sets))


def parse_marked(text: str) -> Prompt:
    """Parse a string with segments written by `mark` into a prompt; nothing is reported."""
    (turn,) = recognize([Turn("user", (text,))]).turns
    return Prompt.of(*turn.parts, rendering=document_rendering)


def _free_texts(turns: Iterable[Turn]) -> list[str]:
    """Return the texts that no assistant wrote."""
    return [part for turn in turns if turn.role != "assistant" for part in turn.parts if isinstance(part, str)]


def _replace_slot(turn: Turn, slot: str, segments: SegmentSet) -> Turn:
    parts: list[Any] = []
    for part in turn.parts:
        before, found, after = part.partition(slot) if isinstance(part, str) else (part, "", "")
        parts += [before, segments, after] if found else [part]
    return replace(turn, parts=tuple(merge_texts(parts)))


def _with_sets(turn: Turn, known: Sequence[Retrieval], findings: list[Finding]) -> Turn:
    parts: list[Any] = []
    marked: list[Marked] = []
    for part in turn.parts:
        pieces, torn = split_marked(part) if isinstance(part, str) else ([part], False)
        if torn:
            findings.append(Finding("marks", "the prompt holds marks that were cut in two, or of another process."))
        if pieces == [part]:
            parts.append(part)  # the same object: a framework may use its own kind of str
        else:
            parts += pieces
            marked += [each for each in pieces if isinstance(each, Marked)]
    arrived = Counter(map(attrgetter("group"), marked))
    partial = ((arrived[each.group], each.size) for each in marked if each.size and arrived[each.group] % each.size)
    messages = (f"a call got {count} of the {size} segments of a set." for count, size in partial)
    findings += map(Finding, repeat("incomplete"), messages)
    joined: list[Any] = []
    segments: list[Segment] = []  # of the set that is being put together
    gaps: list[str] = []  # the text after each of them
    group = ""
    for part in parts:
        own = part.group if isinstance(part, Marked) else ""
        is_segment = isinstance(part, Segment | Marked)
        if gaps and isinstance(part, str) and not gaps[-1]:
            gaps[-1] = part
            continue
        if gaps and not (is_segment and own == group):
            joined += _join_neighbours(segments, gaps, findings)
            segments, gaps = [], []
        if is_segment:
            segments.append(_restore_metadata(part.segment, known) if isinstance(part, Marked) else part)
            gaps.append("")
            group = own
        else:
            joined.append(part)
    joined += _join_neighbours(segments, gaps, findings) if segments else []
    return replace(turn, parts=tuple(merge_texts(joined)))


def _join_neighbours(segments: list[Segment], gaps: list[str], findings: list[Finding]) -> list[Any]:
    """Return neighbours as one set, or as one set each if the texts between them differ."""
    *inner, last = gaps
    if not any(map(str.strip, inner)):
        return [SegmentSet(segments), last]
    with_text = all(each.token_ids is None for each in segments)
    if with_text and len(set(inner)) == 1 and (len(inner) > 1 or not any(map(str.isalnum, inner[0]))):
        return [SegmentSet(segments, slots=[*(Slot(after=gap) for gap in inner), Slot()]), last]
    findings.append(Finding("separate", f"{len(segments)} segments are separated by different texts."))
    return [part for each, gap in zip(segments, gaps, strict=True) for part in (SegmentSet([each]), gap)]


def _restore_metadata(segment: Segment, known: Sequence[Retrieval]) -> Segment:
    """Return a marked segment with the metadata, and a missing score, of its document."""
    alike = (each for one in known for each in one.segments if each.text == segment.text)
    document = min(alike, key=attrgetter("canonical_key"), default=segment)
    score = document.score if segment.score is None else segment.score
    return replace(segment, metadata=document.metadata, score=score)


def _check(turns: Iterable[Turn], known: Sequence[Retrieval], free: str, sets: Sequence[SegmentSet]) -> list[Finding]:
    """Return why the answer may depend on the order: documents outside of sets, or text that states an order."""
    findings: list[Finding] = []
    if known and any(holds_documents(free, each) for each in known):
        findings.append(Finding("no_segments", "the prompt holds retrieved documents as text, and not as a set."))
    elif looks_listed(free, introduced=not sets):
        findings.append(Finding("no_segments", "the prompt holds a list of documents as text."))
    sizes = list(map(len, sets))
    if sizes.count(1) > 1:
        findings.append(Finding("incomplete", "several sets hold one document each; their order is that given."))
    above = ""
    for turn in turns if max(sizes, default=0) > 1 else ():
        for part in turn.parts if turn.role != "assistant" else ():
            if isinstance(part, str):
                above += part + "\n"
            elif isinstance(part, SegmentSet) and above and len(part) > 1 and states_order(above, known):
                message = "the prompt says in which order the documents are, above a set, which has none."
                return [*findings, Finding("stated", message)]
    return findings
