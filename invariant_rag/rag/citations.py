"""Citations: the chunks that contain the words of an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

from invariant_rag.checks import check_items, check_number, check_text
from invariant_rag.generation.citations import best_first
from invariant_rag.segments import Segment, plain_rendering
from invariant_rag.words import split_words


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
    return sorted(cited, key=lambda each: (-recall[each.index], *best_first(each)))
