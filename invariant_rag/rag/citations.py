"""Citations: which of the retrieved chunks an answer can be found in, by one rule that anyone can check."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from invariant_rag.rag.text import words
from invariant_rag.segments import Segment, plain_rendering


@dataclass(frozen=True)
class Citation:
    """A chunk in which an answer was found.

    Attributes:
        index: Index of the chunk in the retrieved segments.
        segment: The chunk.
        exact: Whether the chunk holds the whole answer word for word. Otherwise it holds at least half of the words
            that tell this answer from others.
    """

    index: int
    segment: Segment
    exact: bool


def cite(answer: str, question: str, segments: Sequence[Segment], read: Iterable[int] | None = None) -> list[Citation]:
    """Return the chunks in which `answer` was found, best first.

    A chunk is cited if its title and text hold the answer word for word; case, spacing and punctuation are ignored.
    If no chunk does, those are cited that hold at least half of the answer's *telling* words: the ones that are
    neither in the question nor, where there are several chunks, in more than half of them. The rule looks at words
    only. It does not ask the model, and a citation does not prove the answer; no citation means that the words were not
    found.

    Args:
        answer: The answer.
        question: The question.
        segments: The retrieved chunks.
        read: Indices of the chunks that the model read; only they are looked at. None: all of them.

    Law: the same chunks in another order are cited in the same order.

    >>> chunks = [Segment("Mills grind grain."), Segment("The ferry to Oss leaves at noon.")]
    >>> [(each.index, each.exact) for each in cite("at noon", "When does the ferry leave?", chunks)]
    [(1, True)]
    >>> [(each.index, each.exact) for each in cite("Noon, I think.", "When does the ferry leave?", chunks)]
    []
    """
    wanted = words(answer)
    if not wanted:
        return []
    looked_at = range(len(segments)) if read is None else sorted(read)
    chunks = {index: words(plain_rendering(segments[index])) for index in looked_at}
    spaced = f" {' '.join(wanted)} "
    exact = {index: spaced in f" {' '.join(chunk)} " for index, chunk in chunks.items()}
    if any(exact.values()):
        share = {index: float(found) for index, found in exact.items()}
    else:
        frequency = Counter(word for chunk in chunks.values() for word in set(chunk))
        everywhere = {word for word in wanted if len(chunks) > 1 and 2 * frequency[word] > len(chunks)}
        telling = set(wanted) - everywhere - set(words(question))
        share = {index: len(telling & set(chunk)) / len(telling) if telling else 0.0 for index, chunk in chunks.items()}

    def best_first(index: int) -> tuple[object, ...]:
        score = segments[index].score
        return (-share[index], math.inf if score is None else -score, segments[index].canonical_key)

    cited = sorted((index for index in chunks if share[index] >= 0.5), key=best_first)
    return [Citation(index, segments[index], exact[index]) for index in cited]
