"""Citations: the parts of an answer that have a source among the chunks of its prompt."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from invariant_rag.citation_labels import find_labels, without_labels
from invariant_rag.segments import Segment, plain_rendering
from invariant_rag.words import split_words

_SENTENCE = re.compile(r"\S.*?(?:[.!?]+(?=\s|$)|[。\uff01\uff1f]|$)", re.MULTILINE)  # and full-width signs


def best_first(cited: Any) -> tuple[object, ...]:
    """Return a sort key of citations: by the scores of their segments, and the same for every order of equal ones."""
    segment: Segment = cited.segment
    return (math.inf if segment.score is None else -segment.score, segment.canonical_key)


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
        for span in sorted(holding, key=best_first):
            found.setdefault((span.start, span.end, span.segment.canonical_key), span)
    for start, end, number in find_labels(answer):
        named = (numbers or {}).get(number)
        if named is not None and named in indices:
            found.setdefault((start, end, segments[named].canonical_key), CitedSpan(start, end, named, segments[named]))
    return sorted(found.values(), key=lambda each: (each.start, -each.end))
