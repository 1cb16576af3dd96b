"""Say that an answer may depend on the order of documents. Text is never changed here."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from invariant_rag.errors import OrderWarning
from invariant_rag.prompts.run_retrievals import Retrieval
from invariant_rag.words import split_words

FIXES: dict[str, str] = {
    "no_segments": "Pass the documents as segments, each by itself.",
    "separate": "Write the same text around each segment, or none.",
    "incomplete": "Pass all documents of a question in one call.",
    "marks": "Format the documents in the process that runs the model, and pass the text on unchanged.",
    "stated": 'Leave the sentence out, or keep the order: ordering="given", or one segment with several texts.',
    "routing": 'Use with_routing(plain_order="canonical").',
}
"""What to do about each kind of finding, where no framework has a better answer."""


@dataclass(frozen=True)
class Finding:
    """Why an answer may depend on the order of documents: a key of `FIXES`, or of the caller's own, and a message."""

    kind: str
    message: str


def report(findings: Iterable[Finding], *, fixes: Mapping[str, str] = FIXES, strict: bool = False) -> None:
    """Warn of every finding with what to do about it, here or in `FIXES`; with `strict`, raise the first one."""
    for finding in findings:
        fix = {**FIXES, **fixes}[finding.kind]
        warning = OrderWarning(f"The answer may depend on the order of the documents: {finding.message} {fix}", hint="")
        if strict:
            raise warning
        warnings.warn(warning, stacklevel=3)


_PHRASE, _BEGINNING = 5, 3  # words that two texts hardly share by chance, and first words of a document that was cut


def holds_documents(text: str, retrieval: Retrieval) -> bool:
    """Return whether a text holds documents of a retrieval, whole or in part, or names them all by title or source.

    White space, letter case, punctuation and the query do not matter. One of several documents is enough if it is
    a phrase: the template may have picked the first.
    """
    documents = list(dict.fromkeys(each.text for each in retrieval.segments))
    if len(documents) < 2:
        return False
    if len(split_words(retrieval.query)) >= _BEGINNING:  # a shorter one is no phrase of a document, but may be in it
        text = text.replace(retrieval.query.strip(), " ")
    words = split_words(text)
    phrases = {phrase for length in range(1, _PHRASE + 1) for phrase in _phrases(words, length)}
    own = [_phrases(each, _PHRASE) | _phrases(each, _BEGINNING, most=1) for each in map(split_words, documents)]
    shared = Counter(phrase for each in own for phrase in each)
    held = sum(
        any(shared[phrase] == 1 and phrase in phrases for phrase in each) or (not each and document.strip() in text)
        for each, document in zip(own, documents, strict=True)
    )
    named = sum(_names(text, column) for column in zip(*retrieval.columns, strict=True))
    whole = any(len(each.split()) >= _PHRASE and each.strip() in text for each in documents)
    return held > 1 or named == len(retrieval.segments) or (whole and not retrieval.one_by_one)


def _phrases(words: Sequence[str], length: int, most: int | None = None) -> set[tuple[str, ...]]:
    """Return the first phrases of `length` words; all words, if there are fewer."""
    starts = range(max(len(words) - length, 0) + 1)[:most]
    return {tuple(words[at : at + length]) for at in starts} - {()}


def _names(text: str, values: Sequence[str]) -> bool:
    names = (each for each in values if len(each) > 2 and any(map(str.isalpha, each)) and each in text)
    return any(re.search(rf"(?<!\w){re.escape(each)}(?!\w)", text) for each in names)


_FLAGS = re.IGNORECASE | re.MULTILINE
_LABELLED = re.compile(
    r"^[ \t>*#-]*\(?\[?(?:document|source|passage|chunk|context|snippet|excerpt|search result)s?"
    r"[ \t#:([]*(\d{1,9})\b[\])]?[ \t]*(?:[:.)\-\n(]|$)",
    _FLAGS,
)
_TAGGED = re.compile(
    r"<(doc|document|source|passage|chunk|context|snippet|search_result)\b[^<>]*>\s*(?:[^<\s]+\s+){2}[^<\s][^<]*</\1>",
    re.IGNORECASE,
)
_ANNOUNCED = re.compile(
    r"\b(?:following|provided|given|retrieved)(?: (?:pieces|parts|of|the|retrieved|provided|relevant|text)){0,4} "
    r"(?:context|documents?|passages|sources|excerpts|snippets|search results)\b(?! (?:class|manager|menu|window)s?\b)"
    r"(?! that (?:I|my|our|we)\b)[^\n:]*:?[ \t]*\n|<(?:context|documents|sources)>",
    re.IGNORECASE,
)
_CONTEXT = re.compile(r"^[^\w\n]*(?:context|documents|sources|search results)[^\w\n]*:", _FLAGS)
_CLOSED = re.compile(
    r"</(?:context|documents|sources)>|^[^\w\n]*(?:user |standalone )?(?:question|query|input|answer|q)\b.{0,3}:",
    _FLAGS,
)
_CODE = re.compile(r"```.*?```", re.DOTALL)
_INSTRUCTION = re.compile(
    r"\W*given (?:the|this|these) (?:\w+ )?(?:context|documents?|information|sources)\b", re.IGNORECASE
)


def looks_listed(text: str, *, introduced: bool = False) -> bool:
    """Return whether a text plainly holds several documents of three words or more: labelled by numbers, or in tags.

    With `introduced`, it is enough that a context is announced and two paragraphs that are no question follow.
    """
    labels = list(_LABELLED.finditer(text))
    stops = [*map(re.Match.start, labels[1:]), len(text)]
    numbers = {int(one[1]) for one, stop in zip(labels, stops, strict=False) if len(text[one.end() : stop].split()) > 2}
    counted = not numbers.isdisjoint(map((1).__add__, numbers))
    if counted or len(_TAGGED.findall(text)) > 1:
        return True
    text = _CODE.sub("", text)
    announced = _ANNOUNCED.search(text) if introduced else None
    if announced is None:
        return False
    inside = text[(_CONTEXT.search(text, announced.end()) or announced).end() :]
    closed = _CLOSED.search(inside)
    paragraphs = re.split(r"\n[ \t]*\n", inside[: closed.start()] if closed else inside)
    stated = (each for each in paragraphs if len(each.split()) > 2 and not _INSTRUCTION.match(each))
    return sum(not each.rstrip().endswith("?") for each in stated) > 1


_STATED = re.compile(
    r"\b(?:newest|oldest|latest|earliest|most (?:recent|relevant|important)|best|highest|lowest|cheapest) (?:\w+ )?"
    r"(?:first|last|at the (?:top|bottom|end))\b"
    r"|\b(?:ranked|sorted|ordered|listed|arranged) (?:by|from|in|according)\b"
    r"|\b(?:chronological|descending|ascending|alphabetical|reverse|decreasing|increasing) order\b"
    r"|\bin order of \w+"
    r"|\b(?:first|last|second|third|final|top|earlier|later|preceding|following) (?:\w+ )?"
    r"(?:document|passage|source|chunk|snippet|excerpt|(?<!final )result)\b",
    re.IGNORECASE,
)


def states_order(text: str, retrievals: Iterable[Retrieval] = ()) -> bool:
    """Return whether a text says that documents are in an order. Queries of retrievers do not count."""
    for query in sorted({each.query.strip() for each in retrievals} - {""}, key=len, reverse=True):
        text = text.replace(query, " ")
    return _STATED.search(text) is not None
