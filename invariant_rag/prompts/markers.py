"""Segments inside a string, between marks: for frameworks that can only pass text to a model.

A mark starts with a random number of this process, so that no document can forge one, and says how many segments its
set has, so that missing ones are noticed. Its private-use characters survive JSON, `str.strip()` and Unicode
normalisation; a Python or JSON dump that escapes them is parsed too:
`U+ECA0 nonce;size;set;score U+ECA1 [title U+ECA2] text U+ECA3`.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from invariant_rag.errors import InvalidSegment
from invariant_rag.segments import Segment

_BEGIN, _HEADER_END, _TITLE_END, _END = "\ueca0", "\ueca1", "\ueca2", "\ueca3"
_NONCE = secrets.token_hex(4)
_CHARACTERS = re.compile(f"[{_BEGIN}-{_END}]")
_NUMBER = r"-?(?:inf|\d+(?:\.\d+)?(?:e[-+]\d+)?)"
_HEADER = rf"(?P<nonce>[0-9a-f]*);(?P<size>\d*);(?P<group>[0-9a-f]*);(?P<score>(?:{_NUMBER})?)"


def _pattern(begin: str, header_end: str, title_end: str, end: str, text: str) -> re.Pattern[str]:
    return re.compile(f"{begin}{_HEADER}{header_end}(?:(?P<title>{text}){title_end})?(?P<text>{text}){end}", re.DOTALL)


_MARKED = _pattern(_BEGIN, _HEADER_END, _TITLE_END, _END, f"[^{_BEGIN}-{_END}]*")
_ESCAPES = [rf"\\u{ord(each):04x}" for each in (_BEGIN, _HEADER_END, _TITLE_END, _END)]
_ESCAPED_TEXT = r"(?:[^\\]|\\(?!ueca[0-3]).)*"  # pairs of a backslash and what it escapes
_SLASHES = r"(?<!\\)(?P<slashes>(?:\\\\)*)"
_ESCAPED = _pattern(_SLASHES + _ESCAPES[0], _ESCAPES[1], _ESCAPES[2], _ESCAPES[3], _ESCAPED_TEXT)
_REST = re.compile(
    rf"(?:{_BEGIN}|(?<!\\)\\+ueca0)(?P<nonce>[0-9a-f]{{4,}});[0-9a-f;.+in-]*(?:{_HEADER_END}|\\+ueca1)?"
    rf"|[{_HEADER_END}-{_END}]"
)
_QUOTES = ("'", '"')


@dataclass(frozen=True)
class Marked:
    """A segment that was marked inside a string.

    Attributes:
        segment: The segment.
        size: Number of segments of its set; None if the mark does not say.
        group: Digest of the contents of its set; empty if the mark does not say.
        quote: What stands on both sides of a mark in a Python or JSON dump, and belongs to the segment: Python chooses
            it by what the text holds.
    """

    segment: Segment
    size: int | None = None
    group: str = ""
    quote: str = ""

    @property
    def text(self) -> str:
        """The text of the segment, with quotes if it has them."""
        return self.quote + self.segment.text + self.quote


def mark(segment: Segment | str, size: int | None = None, *, group: str = "", nonce: str = _NONCE) -> str:
    """Write a segment as a string with marks around it, from which `split_marked` restores title, text and score.

    The characters of marks in its own title and text are removed. Metadata is not written.

    Args:
        segment: The segment.
        size: Number of segments of its set, so that missing ones are noticed. None: not said.
        group: Digest that tells the set from its neighbours; see `mark_set`.
        nonce: Proof that this process wrote the mark.

    Raises:
        InvalidSegment: The segment holds token ids.
    """
    segment = Segment.of(segment)
    if segment.token_ids is not None:
        raise InvalidSegment("expected a segment with text, got one with token ids, which cannot be written as text")
    header = f"{nonce};{'' if size is None else size};{group};{'' if segment.score is None else float(segment.score)}"
    title = "" if segment.title is None else _CHARACTERS.sub("", segment.title) + _TITLE_END
    return f"{_BEGIN}{header}{_HEADER_END}{title}{_CHARACTERS.sub('', segment.text)}{_END}"


def mark_set(segments: Iterable[Segment | str], *, nonce: str = _NONCE) -> str:
    """Write a set of segments as a string: `mark` of each, with the size and a digest of the set.

    Raises:
        InvalidSegment: A segment holds token ids.
    """
    listed = [Segment.of(each) for each in segments]
    contents = repr(sorted(each.canonical_key for each in listed)).encode("utf-8", "surrogatepass")
    group = hashlib.sha256(contents).hexdigest()[:8]
    return "".join(mark(each, len(listed), group=group, nonce=nonce) for each in listed)


def split_marked(text: str, *, nonce: str = _NONCE) -> tuple[list[str | Marked], bool]:
    """Split a string with marks into texts and segments.

    >>> [part if isinstance(part, str) else part.segment.text for part in split_marked("a " + mark("b") + " c")[0]]
    ['a ', 'b', ' c']

    Returns:
        The parts in the order of the string, without empty texts; and whether there were other marks: of another
        process, or cut in two. Those are removed, and the text next to them is not a segment.
    """
    if _BEGIN not in text and "ueca0" not in text:
        return [text] if text else [], False
    texts: list[str] = []
    marked: list[Marked] = []
    position = 0
    found = [*_MARKED.finditer(text), *_ESCAPED.finditer(text)]
    for match in sorted(found, key=re.Match.start):
        start, stop = match.span()
        if match["nonce"] != nonce or start < position:
            continue
        quote = ""
        if "slashes" in match.re.groupindex:
            start = match.end("slashes")
            around = text[max(start - 1, position) : start], text[stop : stop + 1]
            quote = around[0] if around[0] == around[1] and around[0] in _QUOTES else ""
        texts.append(text[position : start - len(quote)])
        marked.append(_marked(match, quote))
        position = stop + len(quote)
    texts.append(text[position:])
    rest = any(map(has_marks, texts))
    if rest:
        texts = [_without_rest(each) for each in texts]
    parts: list[str | Marked] = [texts[0]]
    for each, after in zip(marked, texts[1:], strict=True):
        parts += [each, after]
    return [part for part in parts if part], rest


def without_marks(text: str) -> str:
    """Return a text without marks: with the texts of marked segments, and without their titles."""
    parts, _ = split_marked(text)
    return "".join(part if isinstance(part, str) else part.text for part in parts)


def _without_rest(text: str) -> str:
    """Remove what is left of marks; where what stood around it would be a mark then, a space takes its place."""
    removed = _REST.sub("", text)
    return _REST.sub(" ", text) if has_marks(removed) else removed


def has_marks(text: str) -> bool:
    """Return whether a text holds marks, of this process or another one.

    The characters of marks alone are none: fonts use them for icons.
    """
    return any(match["nonce"] for match in _REST.finditer(text))


def _marked(match: re.Match[str], quote: str) -> Marked:
    score = float(match["score"]) if match["score"] else None
    return Marked(
        Segment(match["text"], title=match["title"], score=score),
        int(match["size"]) if match["size"] else None,
        match["group"],
        quote,
    )
