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
from invariant_rag.labels import find_labels, without_labels
from invariant_rag.segments import Segment, plain_rendering
from invariant_rag.words import split_words

_SENTENCE = re.compile(r"\S.*?(?:[.!?]+(?=\s|$)|[。\uff01\uff1f]|$)", re.MULTILINE)  # and full-width signs


@dataclass(frozen=True)
class Citation:
    """A chunk that contains an answer: word for word if it is `exact`, else half of its distinctive words."""

    index: int  # in the retrieved segments
    segment: Segment
    exact: bool


def cite(
    answer: str, question: str, segments: Sequence[Segment], included: Iterable[int] | None = None
) -> list[Citation]:
    """Return the chunks that contain the words of an answer, best first; in the same order for every order of theirs.

    A chunk is cited if its title and text contain the answer word for word, ignoring case, spacing and punctuation.
    If there is no such chunk, those are cited that contain at least half of the distinctive words of the answer: the
    words that are neither in the question nor, with several chunks, in more than half of them. The rule compares words
    and does not use the model: a citation does not prove the answer.

    `included` are the indices of the chunks that were in the prompt, the only ones to be cited. None: all.

    >>> chunks = [Segment("Mills grind grain."), Segment("The ferry to Oss leaves at noon.")]
    >>> [(each.index, each.exact) for each in cite("at noon", "When does the ferry leave?", chunks)]
    [(1, True)]
    """
    check_text("answer", answer)
    check_text("question", question)
    segments = check_items("segments", segments, Segment)
    indices: Sequence[int] = range(len(segments))
    if included is not None:
        most = len(segments) - 1
        indices = [check_number("included", each, 0, most) for each in check_items("included", included, Integral)]
    answer_words = split_words(answer)
    if not answer_words:
        return []
    phrase = f" {' '.join(answer_words)} "
    chunks, exact = {}, {}
    for index in sorted(indices):
        chunks[index] = split_words(plain_rendering(segments[index]))
        exact[index] = phrase in f" {' '.join(chunks[index])} "
    recall: Mapping[int, float] = exact
    if not any(exact.values()):
        document_frequency = Counter(word for chunk in chunks.values() for word in set(chunk))
        common = {word for word in answer_words if len(chunks) > 1 and 2 * document_frequency[word] > len(chunks)}
        distinctive = set(answer_words) - common - set(split_words(question))
        recall = {index: len(distinctive & set(chunk)) / max(len(distinctive), 1) for index, chunk in chunks.items()}
    cited = [Citation(index, segments[index], exact[index]) for index in chunks if recall[index] >= 0.5]
    return sorted(cited, key=lambda each: (-recall[each.index], *_best_first(each)))


def _best_first(cited: Citation | CitedSpan) -> tuple[object, ...]:
    score = cited.segment.score
    return (math.inf if score is None else -score, cited.segment.canonical_key)


@dataclass(frozen=True)
class CitedSpan:
    """A part of an answer, from `start` to `end`, and a chunk that contains it or that it names."""

    start: int
    end: int
    index: int  # of the chunk in the retrieved segments
    segment: Segment


def cite_spans(
    answer: str,
    segments: Iterable[Segment],
    included: Iterable[int] | None = None,
    numbers: Mapping[str, int] | None = None,
) -> list[CitedSpan]:
    """Return the parts of an answer that have a source, in its order; the same for every order of the chunks.

    These are the sentences that a chunk contains word for word, as in `cite`, and the labels of chunks, such as `[2]`,
    with the index of each in `numbers` (`Generation.labels`). Of equal chunks, the first is cited.

    >>> chunks = [Segment("Mills grind grain."), Segment("The ferry to Oss leaves at noon.")]
    >>> spans = cite_spans("At noon [2]. Or so.", chunks, numbers={"1": 0, "2": 1})
    >>> [(each.start, each.end, each.index) for each in spans]
    [(0, 12, 1), (8, 11, 1)]
    """
    segments = list(segments)
    indices = range(len(segments)) if included is None else sorted(included)
    found: dict[tuple[Any, ...], CitedSpan] = {}
    chunks: dict[int, str] = {}  # their words, looked up once for all sentences
    for sentence in _SENTENCE.finditer(answer):
        words, holding = split_words(without_labels(sentence[0])), []
        for index in indices if words else ():
            if index not in chunks:
                chunks[index] = f" {' '.join(split_words(plain_rendering(segments[index])))} "
            if f" {' '.join(words)} " in chunks[index]:
                holding.append(CitedSpan(*sentence.span(), index, segments[index]))
        for span in sorted(holding, key=_best_first):
            found.setdefault((span.start, span.end, span.segment.canonical_key), span)
    for start, end, number in find_labels(answer):
        named = (numbers or {}).get(number)
        if named is not None and named in indices:
            found.setdefault((start, end, segments[named].canonical_key), CitedSpan(start, end, named, segments[named]))
    return sorted(found.values(), key=lambda each: (each.start, -each.end))
