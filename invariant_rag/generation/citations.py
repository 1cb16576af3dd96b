"""Citations: match an answer to the retrieved chunks that contain its words."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from invariant_rag.checks import check_items, check_number, check_text
from invariant_rag.prompts.labels import Labels, find_labels, spellings_of, without_labels
from invariant_rag.segments import Prompt, Segment, plain_rendering
from invariant_rag.words import split_words

_SENTENCE = re.compile(r"\S.*?(?:[.!?]+(?=\s|$)|[。\uff01\uff1f]|$)", re.MULTILINE)  # and full-width signs


@dataclass(frozen=True)
class Citation:
    """A chunk that contains an answer.

    Attributes:
        index: Index of the chunk in the retrieved segments.
        segment: The chunk.
        exact: Whether the chunk contains the whole answer word for word. Otherwise it contains at least half of the
            distinctive words of the answer.
    """

    index: int
    segment: Segment
    exact: bool


def cite(
    answer: str, question: str, segments: Sequence[Segment], included: Iterable[int] | None = None
) -> list[Citation]:
    """Return the chunks that contain the words of an answer, best first.

    A chunk is cited if its title and text contain the answer word for word, ignoring case, spacing and punctuation.
    If there is no such chunk, those are cited that contain at least half of the distinctive words of the answer: the
    words that are neither in the question nor, with several chunks, in more than half of them. The rule compares words
    and does not use the model: a citation does not prove the answer.

    Args:
        answer: The answer.
        question: The question.
        segments: The retrieved chunks.
        included: Indices of the chunks that were in the prompt, the only ones to be cited. None: all.

    Law: every permutation of the chunks gives the same citations in the same order.

    >>> chunks = [Segment("Mills grind grain."), Segment("The ferry to Oss leaves at noon.")]
    >>> [(each.index, each.exact) for each in cite("at noon", "When does the ferry leave?", chunks)]
    [(1, True)]
    >>> [(each.index, each.exact) for each in cite("Noon, I think.", "When does the ferry leave?", chunks)]
    []
    """
    check_text("answer", answer)
    check_text("question", question)
    segments = check_items("segments", segments, Segment)
    if included is not None:
        most = len(segments) - 1
        included = [check_number("included", each, 0, most) for each in check_items("included", included, Integral)]
    answer_words = split_words(answer)
    if not answer_words:
        return []
    indices = range(len(segments)) if included is None else sorted(included)
    chunks = {index: split_words(plain_rendering(segments[index])) for index in indices}
    phrase = f" {' '.join(answer_words)} "
    exact = {index: phrase in f" {' '.join(chunk)} " for index, chunk in chunks.items()}
    if any(exact.values()):
        recall = {index: float(found) for index, found in exact.items()}
    else:
        document_frequency = Counter(word for chunk in chunks.values() for word in set(chunk))
        common = {word for word in answer_words if len(chunks) > 1 and 2 * document_frequency[word] > len(chunks)}
        distinctive = set(answer_words) - common - set(split_words(question))
        recall = {index: len(distinctive & set(chunk)) / max(len(distinctive), 1) for index, chunk in chunks.items()}

    def best_first(index: int) -> tuple[object, ...]:
        score = segments[index].score
        return (-recall[index], math.inf if score is None else -score, segments[index].canonical_key)

    cited = sorted((index for index in chunks if recall[index] >= 0.5), key=best_first)
    return [Citation(index, segments[index], exact[index]) for index in cited]


@dataclass(frozen=True)
class CitedSpan:
    """A part of an answer, and a chunk that contains it or that it names.

    Attributes:
        start: Where the part begins in the answer.
        end: Where it ends.
        index: Index of the chunk in the retrieved segments.
        segment: The chunk.
    """

    start: int
    end: int
    index: int
    segment: Segment


def cite_spans(
    answer: str,
    question: str,
    segments: Sequence[Segment],
    included: Iterable[int] | None = None,
    numbers: Mapping[str, int] | None = None,
) -> list[CitedSpan]:
    """Return the parts of an answer that have a source, in the order of the answer.

    These are the sentences that a chunk contains word for word, as in `cite`, and the numbers of chunks, such as `[2]`.

    Args:
        answer: The answer.
        question: The question.
        segments: The retrieved chunks. Of equal ones, the first is cited.
        included: Indices of the chunks that were in the prompt, the only ones to be cited. None: all.
        numbers: Number of a chunk -> its index, where chunks had numbers.

    Law: every permutation of the chunks, with their numbers, gives the same spans and segments in the same order.

    >>> chunks = [Segment("Mills grind grain."), Segment("The ferry to Oss leaves at noon.")]
    >>> spans = cite_spans("At noon [2]. Or so.", "When does the ferry leave?", chunks, numbers={"1": 0, "2": 1})
    >>> [(each.start, each.end, each.index) for each in spans]
    [(0, 12, 1), (8, 11, 1)]
    """
    indices = range(len(segments)) if included is None else sorted(included)
    found: dict[tuple[Any, ...], CitedSpan] = {}
    for sentence in _SENTENCE.finditer(answer):
        for each in cite(without_labels(sentence[0], numbers or ()), question, segments, indices):
            if each.exact:
                span = CitedSpan(*sentence.span(), each.index, each.segment)
                found.setdefault((span.start, span.end, each.segment.canonical_key), span)
    for start, end, number in find_labels(answer, numbers or ()):
        index = (numbers or {}).get(number)
        if index is not None and index in indices:
            found.setdefault((start, end, segments[index].canonical_key), CitedSpan(start, end, index, segments[index]))
    return sorted(found.values(), key=lambda each: (each.start, -each.end))


def cited_numbers(prompt: Prompt, labels: Labels) -> dict[str, int]:
    """Return which number names which segment in an answer, as the model wrote it: index in `prompt.segments`.

    Args:
        prompt: The prompt.
        labels: `labels` of the generation: the numbers that the model got, and those of the prompt as given.
    """
    numbers = numbers_of(prompt)
    return {label: numbers[given] for label, given in labels.items() if given in numbers} if labels else numbers


def numbers_of(prompt: Prompt) -> dict[str, int]:
    """Return which running number of a prompt names which segment; none that two segments have.

    Numbers that the prompt writes in a way of its own, such as `(1)`, are there in that way, too.

    >>> from invariant_rag.segments import SegmentSet, Slot
    >>> slots = [Slot(("[1] ",), number="1"), Slot(("[2] ",), number="2")]
    >>> numbers_of(Prompt("", SegmentSet(["a", "b"], slots=slots), ""))
    {'1': 0, '2': 1}
    """
    slots = [slot for each in prompt.sets for slot in (each.slots or [None] * len(each))]
    listed = [None if slot is None else slot.number for slot in slots]
    return {
        name: index
        for index, slot in enumerate(slots)
        if slot is not None and listed.count(slot.number) == 1
        for name in spellings_of(slot)
    }
