"""Segments inside a string, between marks: for frameworks that can only pass text to a model.

A mark starts with a random number of this process, so that no document can forge one, and says how many segments its
set has, so that missing ones are noticed. Its private-use characters survive JSON, `str.strip()` and Unicode
normalisation: `U+ECA0 nonce;size;set;score U+ECA1 [title U+ECA2] text U+ECA3`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from invariant_rag.errors import InvalidSegment
from invariant_rag.segments import Segment

_BEGIN, _HEADER_END, _TITLE_END, _END = "\ueca0\ueca1\ueca2\ueca3"
_NONCE = secrets.token_hex(4)
_CHARACTERS = re.compile(f"[{_BEGIN}-{_END}]")
_TEXT = f"[^{_BEGIN}-{_END}]*"
_NUMBER = r"-?(?:inf|\d+(?:\.\d+)?(?:e[-+]\d+)?)"
_MARKED = re.compile(
    rf"{_BEGIN}(?P<nonce>[0-9a-f]*);(?P<size>\d*);(?P<group>[0-9a-f]*);(?P<score>(?:{_NUMBER})?){_HEADER_END}"
    rf"(?:(?P<title>{_TEXT}){_TITLE_END})?(?P<text>{_TEXT}){_END}"
)
_REST = re.compile(  # what is left of marks that were cut in two, or whose characters a dump has escaped
    rf"(?:{_BEGIN}|(?<!\\)\\+ueca0)(?P<nonce>[0-9a-f]{{4,}});[0-9a-f;.+in-]*(?:{_HEADER_END}|\\+ueca1)?"
    rf"|[{_HEADER_END}-{_END}]|\\+ueca[23]"
)


@dataclass(frozen=True)
class Marked:
    """A segment that was marked inside a string."""

    segment: Segment
    size: int | None = None  # of its set, and a digest of that
    group: str = ""


def mark(segment: Segment | str, size: int | None = None, *, group: str = "", nonce: str = _NONCE) -> str:
    """Write title and text of a segment with marks around them, from which `split_marked` restores them.

    `size` is the number of segments of its set, and `group` identifies that set: see `mark_set`.
    """
    segment = Segment.of(segment)
    if segment.token_ids is not None:
        raise InvalidSegment("expected a segment with text, got one with token ids, which cannot be written as text")
    header = f"{nonce};{'' if size is None else size};{group};{'' if segment.score is None else float(segment.score)}"
    title = "" if segment.title is None else _CHARACTERS.sub("", segment.title) + _TITLE_END
    return f"{_BEGIN}{header}{_HEADER_END}{title}{_CHARACTERS.sub('', segment.text)}{_END}"


def mark_set(segments: Iterable[Segment | str], *, nonce: str = _NONCE) -> str:
    """Write a set of segments as a string: `mark` of each, with the size and a digest of the set."""
    listed = [Segment.of(each) for each in segments]
    contents = repr(sorted(each.canonical_key for each in listed)).encode("utf-8", "surrogatepass")
    group = hashlib.sha256(contents).hexdigest()[:8]
    return "".join(mark(each, len(listed), group=group, nonce=nonce) for each in listed)


def split_marked(text: str, *, nonce: str = _NONCE) -> tuple[list[str | Marked], bool]:
    """Split a string with marks into texts and segments, without empty texts.

    Also return whether there were other marks, which are removed: of another process, cut in two, or escaped.
    """
    if not has_marks(text):
        return [text] if text else [], False
    parts: list[str | Marked] = []
    rest, position = False, 0
    matches = [match for match in _MARKED.finditer(text) if match["nonce"] == nonce]
    for match in [*matches, None]:
        between = text[position:] if match is None else text[position : match.start()]
        rest = rest or has_marks(between)
        parts.append(between)
        if match is not None:
            segment = Segment(match["text"], match["title"], score=float(match["score"]) if match["score"] else None)
            parts.append(Marked(segment, int(match["size"]) if match["size"] else None, match["group"]))
            position = match.end()
    if rest:
        parts = [_without_rest(part) if isinstance(part, str) else part for part in parts]
    return [part for part in parts if part], rest


def without_marks(text: str) -> str:
    """Return a text without marks: with the texts of marked segments, and without their titles."""
    parts, _ = split_marked(text)
    return "".join(part if isinstance(part, str) else part.segment.text for part in parts)


def _without_rest(text: str) -> str:
    """Remove fragments of marks; leave a space where the text around one would form a mark."""
    removed = _REST.sub("", text)
    return _REST.sub(" ", text) if has_marks(removed) else removed


def has_marks(text: str) -> bool:
    """Return whether a text holds marks, also of another process or escaped; not just characters, fonts' icons."""
    return (_BEGIN in text or "ueca0" in text) and any(match["nonce"] for match in _REST.finditer(text))
