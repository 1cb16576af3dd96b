"""Documents that are known from a retrieval, found again in the text of a prompt."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations

from invariant_rag.segments import Segment

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_TELLING = 30
"""Characters of a sentence that hardly occurs in two texts by chance."""
_WINDOW = 20
"""Characters that are looked up before a whole piece is searched for."""
_ESCAPED_BREAK = re.compile(r"\\[ntr]")
_SHORT = 8
"""Characters of a phrase that hardly occurs in two texts by chance."""
_LONG = 12
"""Characters that hardly occur within a word by chance."""
_MOST_JOINED = 20
_QUOTES = ("'", '"')
_LABEL_STARTS = frozenset("[(#/\\_=")
_LABEL_END = re.compile(r"[.):\]/\\_=]")


@dataclass(frozen=True)
class KnownDocument:
    """A retrieved document, and the texts that a prompt may hold it as.

    Attributes:
        segment: The document, with its metadata and score.
        texts: Its text in every form that is looked for, such as with and without metadata.
        source: Id of the document that it is a part of; empty if that is not known.
    """

    segment: Segment
    texts: tuple[str, ...]
    source: str = ""

    @classmethod
    def of(cls, segment: Segment, *more: str, source: str = "") -> KnownDocument:
        """Return a document with its text, as it is and as Python and JSON escape it, and with more forms."""
        return cls(segment, _written(segment.text, tuple(each.strip() for each in more if each.strip())), source)

    @property
    def leading(self) -> str:
        """White space at the start of the text."""
        text = self.segment.text
        return text[: len(text) - len(text.lstrip())]

    @property
    def trailing(self) -> str:
        """White space at the end of the text."""
        return self.segment.text[len(self.segment.text.rstrip()) :]

    @cached_property
    def samples(self) -> frozenset[str]:
        """Short pieces of the text, one of which lies within every telling part."""
        whole = self.segment.text
        return frozenset(whole[start : start + _WINDOW] for start in range(0, len(whole), _TELLING - _WINDOW + 1))

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """Telling parts of the text: the whole, and its lines and sentences, of at least 30 characters each."""
        text = self.segment.text.strip()
        sentences = [each.strip() for line in text.splitlines() for each in _SENTENCE_END.split(line)]
        return tuple(each for each in dict.fromkeys((*sentences, text)) if len(each) >= _TELLING)


@lru_cache(maxsize=512)  # documents are handed from run to run
def _written(text: str, more: tuple[str, ...]) -> tuple[str, ...]:
    """Return a text and other forms of it as they are and escaped, the longest first."""
    forms = (*more, text.strip())
    written = {escaped for form in forms if form for escaped in (form, *_escaped(form))}
    written |= {form for form in _escaped(text) if form and form == form.strip()}  # line breaks at its ends
    return tuple(sorted(written, key=lambda form: (-len(form), form)))


def _escaped(text: str) -> Iterable[str]:
    """Yield a text as HTML writes it, and as Python and JSON do between quotes, which they choose by what it holds."""
    yield html.escape(text)
    yield html.escape(text, quote=False)
    yield json.dumps(text)[1:-1]
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    both = repr("\"'" + text)[4:-1]  # with both quotes in the text, Python escapes the single ones
    yield both
    yield both.replace("\\'", "'")


@dataclass(frozen=True)
class Retrieval:
    """The documents that one retriever returned together.

    Attributes:
        documents: The documents, as they were listed.
        queries: What was asked for; empty if that is not known.
        doubt: What shows the order of the documents within themselves; empty if nothing does.
        chosen_from: Whether a model that chooses among them may be asked about one alone.
    """

    documents: tuple[KnownDocument, ...]
    queries: tuple[str, ...] = ()
    doubt: str = ""
    chosen_from: bool = False


@dataclass(frozen=True)
class Occurrence:
    """A place where a text holds a known document.

    Attributes:
        start: Index of its first character.
        stop: Index after its last one.
        document: The document.
    """

    start: int
    stop: int
    document: KnownDocument


def occurrences(text: str, documents: Iterable[KnownDocument]) -> list[Occurrence]:
    """Return where a text holds documents as whole words, in the order of the text.

    Of two overlapping occurrences the longer one counts. Quotes around a document belong to it: Python chooses them by
    what the text holds. A document of one word counts only where a line, a quotation or an item may begin, since it
    may as well be a word of the question or a running number.

    >>> known = [KnownDocument.of(Segment(each)) for each in ("c d", "a b", "b")]
    >>> [each.document.segment.text for each in occurrences("Text: a b, c d.", known)]
    ['a b', 'c d']
    """
    forms: dict[str, list[KnownDocument]] = {}
    for document in sorted(documents, key=lambda each: each.segment.canonical_key):
        for form in document.texts:
            forms.setdefault(form, []).append(document)
    covered = bytearray(len(text))
    found: list[tuple[int, int, str]] = []
    for form in sorted(forms, key=lambda each: (-len(each), each)):
        start = text.find(form) if _says_something(form) else -1
        while start >= 0:
            stop = start + len(form)
            if _whole(text, start, stop) and not any(covered[start:stop]):
                covered[start:stop] = b"\1" * len(form)
                found.append((start, stop, form))
                start = text.find(form, stop)
            else:
                start = text.find(form, start + 1)
    kept: list[Occurrence] = []
    dealt: Counter[str] = Counter()
    for start, stop, form in sorted(found):
        before = kept[-1].stop if kept else -1
        if _is_telling(form) or _is_item(text, start, stop, before):
            alike = forms[form]  # equal texts of several documents, which may differ in metadata
            document = alike[dealt[form] % len(alike)]
            dealt[form] += 1
            kept.append(Occurrence(*_with_quotes(text, start, stop, max(before, 0), covered), document))
    return kept


def _says_something(document: str) -> bool:
    """Return whether a text is more than punctuation: words, or signs such as emoji."""
    return any(each.isalnum() or (each > "\x7f" and not each.isspace()) for each in document)


def _is_telling(document: str) -> bool:
    """Return whether a text is no single word."""
    return len(document) >= _TELLING or any(map(str.isspace, document))


def _is_item(text: str, start: int, stop: int, before: int) -> bool:
    """Return whether a word may be a document: it begins a line, or follows punctuation or the document before it."""
    first = start
    while first > 0 and text[first - 1] in " \t":
        first -= 1
    is_label = stop - start == 1 or text[start:stop].isdecimal()
    if is_label and (_LABEL_END.match(text, stop) or text[max(first - 1, 0) : first] in _LABEL_STARTS):
        return False
    return first in (0, before) or not text[first - 1].isalnum() or text[first - 2 : first] in ("\\n", "\\t", "\\r")


def _with_quotes(text: str, start: int, stop: int, before: int, covered: bytearray) -> tuple[int, int]:
    """Return where a document starts and stops with the quotes around it, if it stands between quotes."""
    if before >= start or stop == len(text) or covered[start - 1] or covered[stop]:
        return start, stop
    quoted = text[start - 1] == text[stop] and text[stop] in _QUOTES
    return (start - 1, stop + 1) if quoted else (start, stop)


def holds_part(text: str, document: KnownDocument) -> bool:
    """Return whether a text holds a telling part of a document: a sentence or line of at least 30 characters."""
    return any(piece in text for piece in document.pieces)


def _holds_words(text: str, document: KnownDocument) -> bool:
    """Return whether a text holds a document in any form, if only among other words or, a longer one, in a word."""
    for form in document.texts:
        if len(form) >= _LONG and form in text:
            return True
        start = text.find(form)
        while start >= 0:
            if _whole(text, start, start + len(form)):
                return True
            start = text.find(form, start + 1)
    return False


def holds_several(text: str, documents: Sequence[KnownDocument]) -> bool:
    """Return whether a text holds at least two of these documents, or telling parts of them.

    >>> known = [KnownDocument.of(Segment(f"A sentence that two documents share. {end}")) for end in "ab"]
    >>> holds_several(known[0].segment.text, [*known, KnownDocument.of(Segment("two documents"))])
    False
    """
    windows = {text[start : start + _WINDOW] for start in range(len(text) - _WINDOW + 1)}
    found: set[frozenset[str]] = set()
    for document in documents:
        if not document.samples.isdisjoint(windows):
            found.add(frozenset(piece for piece in document.pieces if piece in text))
        elif not document.pieces and _is_phrase(document.segment.text) and _holds_words(text, document):
            found.add(frozenset([document.segment.text.strip()]))
    found.discard(frozenset())
    apart: list[frozenset[str]] = []  # what lies within a document that was found is no other one
    for pieces in sorted(found, key=lambda each: -max(map(len, each))):
        if not any(all(any(piece in other for other in larger) for piece in pieces) for larger in apart):
            apart.append(pieces)
    return len(apart) > 1


def _is_phrase(text: str) -> bool:
    """Return whether a short text hardly occurs in another one by chance: it has several words, or ideographs."""
    return len(text.strip()) >= _SHORT and (len(text.split()) > 1 or not text.isascii())


def forms_of(document: KnownDocument) -> set[str]:
    """Return the text of a document, and every form that is looked for."""
    return {document.segment.text, *document.texts}


def count_held(documents: Sequence[KnownDocument], counts: Counter[str]) -> int:
    """Return how many of these documents there are, by text, at most as often as each is listed."""
    held = 0
    for text, often in Counter(each.segment.text for each in documents).items():
        forms = forms_of(next(each for each in documents if each.segment.text == text))
        held += min(often, sum(counts[form] for form in forms))
    return held


def holds_as_words(text: str, documents: Sequence[KnownDocument]) -> bool:
    """Return whether a text holds two of these documents, or the only one, at least among other words."""
    worded = {each.segment.text: each for each in documents if _says_something(each.segment.text)}
    held = sum(_holds_words(text, each) for each in worded.values())
    if worded and held >= min(2, len(worded)):
        return True
    if not worded:  # punctuation, which may be that of the prompt
        return sum(each in text for each in {each.segment.text.strip() for each in documents} if each) > 1
    stripped = [each.strip() for each in worded][:_MOST_JOINED]
    return any(one + other in text for one, other in permutations(stripped, 2))  # joined without a space between


def holds_more(text: str, retrieval: Retrieval, counts: Counter[str]) -> bool:
    """Return whether a text holds a document that was retrieved several times, and was found less often."""
    listed = Counter(each.segment.text for each in retrieval.documents)
    return any(0 < counts[each] < often and each.strip() in text for each, often in listed.items())


def contain_one_another(retrieval: Retrieval, counts: Counter[str]) -> bool:
    """Return whether a document that holds another one was found more or less often than it was retrieved."""
    texts = [each.segment.text.strip() for each in retrieval.documents]
    if len(set(texts)) < 2 or not any(a != b and a in b for a in set(texts) for b in set(texts)):
        return False
    expected, arrived = Counter(texts), Counter[str]()
    for text, count in counts.items():
        arrived[text.strip()] += count
    found = [arrived[text] / count for text, count in expected.items()]
    return len(set(found)) > 1


def differ_in_space(retrieval: Retrieval) -> bool:
    """Return whether two of the documents have the same words, with other white space between or around them."""
    texts = {each.segment.text for each in retrieval.documents}
    return len({" ".join(each.split()) for each in texts}) < len(texts)


def _whole(text: str, start: int, stop: int) -> bool:
    """Return whether `text[start:stop]` does not begin or end within a word. An escaped line break is no word."""
    begins_within = start > 0 and text[start - 1].isalnum() and text[start].isalnum()
    ends_within = stop < len(text) and text[stop - 1].isalnum() and text[stop].isalnum()
    return not ends_within and (not begins_within or _ESCAPED_BREAK.search(text, max(start - 2, 0), start) is not None)
