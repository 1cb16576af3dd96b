"""Text that plainly holds several documents, though nothing is known of them: labels, tags, or words before them."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

_LABELLED = re.compile(
    r"^[ \t>*#-]*\(?\[?(?:document|source|passage|chunk|context|snippet|excerpt|search result)s?"
    r"[ \t#:([]*(\d{1,9})\b[\])]?[ \t]*(?:[:.)\-\n(]|$)",
    re.IGNORECASE | re.MULTILINE,
)
_CODE = re.compile(r"```[a-z][\w+-]*(?:\n|\\n).*?```", re.DOTALL | re.IGNORECASE)
_TELLING_WORDS = 3
_TAG = re.compile(r"<(/?)(doc|document|source|passage|chunk|context|snippet|search_result)\b[^<>]*>", re.IGNORECASE)

# A context manager is no context, and neither is "given the context that I am new here".
_OTHER_SENSE = (
    r"(?! (?:class|consumer|folder|hook|list|manager|menu|object|page|policy|processor|provider|switch|table|variable"
    r"|window)(?:e?s)?\b| that (?:I|my|our|we)\b)"
)
_INTRODUCED = re.compile(
    r"\b(?:following|provided|given|retrieved)"
    r"(?: (?:pieces|parts|of|the|retrieved|provided|relevant|extracted|text)){0,4} "
    r"(?:context|documents?|passages|sources|excerpts|snippets|search results)\b" + _OTHER_SENSE + r"[^\n:]*:?[ \t]*\n"
    r"|\bcontext information is below\b[^\n]*\n|<(?:context|documents|sources)>",
    re.IGNORECASE,
)
_SOURCED = re.compile(
    r"^[^\w\n]*(?:source|title|file|url|metadata)[^\w\n]*:[^\n]*\n"
    r"[^\w\n]*(?:page[ _])?(?:content|text|excerpt)[^\w\n]*:",
    re.IGNORECASE | re.MULTILINE,
)
_CONTEXT = re.compile(r"^[^\w\n]*(?:context|documents|sources|search results)[^\w\n]*:", re.IGNORECASE | re.MULTILINE)
_CLOSED = re.compile(
    r"</(?:context|documents|sources)>|^[^\w\n]*(?:(?:user |standalone )?(?:question|query|input)\b.{0,3}:|q:|"
    r"helpful answer|answer\b.{0,3}:)",
    re.IGNORECASE | re.MULTILINE,
)
_RULE = re.compile(r"^[\W_]*$")


def looks_labelled(text: str) -> bool:
    """Return whether a text holds at least two documents that are labelled as such, with running numbers or tags.

    What follows a label has to say something: `Document 1: the contract` is a list of documents, and not their text.
    """
    text = _CODE.sub("", text)
    labels = list(_LABELLED.finditer(text))
    stops = [*(match.start() for match in labels[1:]), len(text)]
    telling = [int(match[1]) for match, stop in zip(labels, stops, strict=False) if _says_something(text, match, stop)]
    if any(b == a + 1 for a, b in pairwise(telling)):
        return True
    if len(_SOURCED.findall(text)) > 1:
        return True
    opened: dict[str, re.Match[str]] = {}
    closed: Counter[str] = Counter()
    for match in _TAG.finditer(text):
        name = match[2].lower()
        if not match[1]:
            opened[name] = match
        elif name in opened and _says_something(text, opened.pop(name), match.start()):
            closed[name] += 1
    return any(count > 1 for count in closed.values())


def _says_something(text: str, label: re.Match[str], stop: int) -> bool:
    return len(text[label.end() : stop].split()) >= _TELLING_WORDS


def looks_introduced(text: str) -> bool:
    r"""Return whether a text announces a context, and at least two paragraphs without a question follow.

    >>> looks_introduced(
    ...     "Use the following context:\n\nFerries leave at noon.\n\nMills grind barley.\n\nQuestion: when?"
    ... )
    True
    """
    text = _CODE.sub("", text)
    announced = _INTRODUCED.search(text)
    if announced is None:
        return False
    labelled = _CONTEXT.search(text, announced.end())
    inside = text[(labelled or announced).end() :]
    closed = _CLOSED.search(inside)
    paragraphs = [each.strip() for each in re.split(r"\n[ \t]*\n", inside[: closed.start() if closed else None])]
    if not closed and "?" in paragraphs[-1]:
        paragraphs.pop()
    return sum(not _RULE.match(each) and len(each.split()) >= _TELLING_WORDS for each in paragraphs) > 1
