"""What a prompt says of documents outside of their set, and what shows the order in which they were listed.

"Best match: ..." above the documents, a list of their titles or scores below them: such text stays as it is when the
documents are put in order, so it tells the model which of them came first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from invariant_rag.prompts.known_documents import Retrieval
from invariant_rag.prompts.rewritten import documents_in_part
from invariant_rag.segments import Segment, value_of

_NAME = 4
"""Characters of a title or a source that hardly occurs in other text by chance."""
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w]|\.\d)")
_BETWEEN_NUMBERS = re.compile(r"[^\w\n]{1,4}")
_MOST_VALUES = 100


def repeated(counts: Counter[str], known: Sequence[Retrieval]) -> list[str]:
    """Return texts that a prompt holds more often than the retrievals that it holds as a whole list them.

    Args:
        counts: How often each text of a document was found.
        known: The retrievals. A prompt may hold each of them several times, such as once for each turn.
    """
    left, whole = Counter(counts), set[str]()
    listed = [Counter(each.segment.text for each in retrieval.documents) for retrieval in known]
    found = True
    while found:
        found = False
        for each in listed:
            if each and all(left[text] >= count for text, count in each.items()):
                left -= each
                whole |= set(each)
                found = True
    return [text for text, count in left.items() if count > 0 and text in whole]


def tells_order(text: str, segments: Sequence[Segment]) -> bool:
    """Return whether a text names segments in the order in which they come, or in its reverse.

    By title, metadata or score: a list of sources below the documents, for example.
    """
    for key in _keys(segments):
        values = [value_of(segment, key) for segment in segments]
        if _lists_names(text, values) or _lists_numbers(text, values):
            return True
    return False


def singles_out(text: str, segments: Sequence[Segment]) -> bool:
    """Return whether a text names or quotes the first segment or the last one, and no other.

    By title, metadata or score that no other segment has; or by the words with which it begins.
    """
    for key in _keys(segments):
        values = [value_of(segment, key) for segment in segments]
        if len(set(map(str, values))) == len(values):
            named = [index for index, value in enumerate(values) if _names(text, value)]
            if named in ([0], [len(values) - 1]):
                return True
    quoted = documents_in_part(text, [each.text for each in segments])
    return quoted in ([0], [len(segments) - 1])


def _keys(segments: Sequence[Segment]) -> list[str]:
    return sorted({"title", "score"}.union(*(each.metadata for each in segments)))


def _names(text: str, value: object) -> bool:
    if isinstance(value, str):
        return len(value) >= _NAME and any(map(str.isalpha, value)) and _place(text, value) is not None
    if isinstance(value, float):
        return any("." in each and _is_rounded(each, value) for each in _NUMBER.findall(text))
    return False


def _place(text: str, value: str) -> int | None:
    match = re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) if value in text else None
    return match.start() if match else None


def _lists_names(text: str, values: Sequence[object]) -> bool:
    counts = Counter(map(str, values))
    names = [each for each in values if isinstance(each, str) and each and counts[each] == 1]
    telling = [each for each in names if len(each) >= _NAME]
    places = [place for name in telling if (place := _place(text, name)) is not None]
    if len(places) > 1 and sorted(places) in (places, places[::-1]):
        return True
    if len(names) < len(values) or len(names) < 2 or any(name not in text for name in names):
        return False
    for listed in (names, names[::-1]):  # short ones, such as ids, tell if nothing stands between them
        if re.search(r"(?<!\w)" + r"[^\w\n]{1,4}".join(map(re.escape, listed)) + r"(?!\w)", text):
            return True
    return False


def _lists_numbers(text: str, values: Sequence[object]) -> bool:
    """Return whether numbers, such as scores, stand one behind the other, rounded or in percent."""
    numbers = [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
    if len(numbers) < len(values) or len(set(numbers)) < 2 or len(numbers) > _MOST_VALUES:
        return False
    found = list(_NUMBER.finditer(text))
    for start in range(len(found) - len(numbers) + 1):
        run = found[start : start + len(numbers)]
        apart = any(not _BETWEEN_NUMBERS.fullmatch(text[one.end() : other.start()]) for one, other in pairwise(run))
        if not apart and any(
            all(_is_rounded(each[0], value) for each, value in zip(run, listed, strict=True))
            for listed in (numbers, numbers[::-1])
        ):
            return True
    return False


def _is_rounded(written: str, value: float) -> bool:
    digits = len(written.partition(".")[2])
    return any(abs(float(written) - float(value) * scale) <= 0.5000001 * 10**-digits for scale in (1, 100)) and (
        digits > 0 or isinstance(value, int) or float(value) >= 1 or abs(float(written)) >= 1
    )


def without(text: str, asked: Iterable[str]) -> str:
    """Return a text without what was asked of retrievers: a question that names a document tells nothing of order.

    >>> without("Compare a and b. So?", ["Compare A and b"])
    ' . So?'
    """
    for each in sorted(set(asked), key=len, reverse=True):
        if each.strip():
            text = re.sub(r"\s+".join(map(re.escape, each.split())), " ", text, flags=re.IGNORECASE)
    return text
