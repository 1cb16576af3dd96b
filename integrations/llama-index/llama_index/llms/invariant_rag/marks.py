"""Segments inside a string: the library's in-band codec, and a check that a response mode left them whole.

Behind each marked segment stands the size of the set it belongs to. So a prompt that holds fewer segments than its
set had, or a piece of one, is noticed where it arrives, whatever happened to it on the way.
"""

from __future__ import annotations

import re
import warnings

from invariant_rag.prompts import mark, parse_marked
from invariant_rag.segments import Segment, SegmentSet

_BEGIN, _END = tuple(mark(""))
_SIZE_MARK = "\ue205"
_SIZE = re.compile(f"{_SIZE_MARK}(\\d*){_SIZE_MARK}?")
_PRINTED = (_BEGIN.encode("unicode_escape").decode(), _END.encode("unicode_escape").decode())
_FIX = (
    "Use response_synthesizer=InvariantSynthesizer(llm), which reads every node in one call, or retrieve so few nodes "
    'that response_mode="compact" needs one call.'
)


class OrderWarning(UserWarning):
    """The answer may depend on the order of the segments; the message says why, and what to do."""


def mark_in_set(segment: Segment | str, size: int) -> str:
    """Write a segment of a set of `size` into a string, so that `read_marked` finds its boundaries again."""
    segment = Segment.of(segment)
    return f"{mark(Segment(segment.text.replace(_SIZE_MARK, ''), segment.title))}{_SIZE_MARK}{size}{_SIZE_MARK}"


def unmarked(text: str) -> str:
    """Return a text without any mark."""
    return _SIZE.sub("", text).replace(_BEGIN, "").replace(_END, "")


def read_marked(text: str) -> list[str | SegmentSet]:
    """Return the texts and the sets of a string, in reading order.

    Warns (`OrderWarning`) where segments were cut, printed, or spread over several calls.
    """
    sizes = [int(size) for size in _SIZE.findall(text) if size]
    clean = _SIZE.sub("", text)
    prompt = parse_marked(clean)
    _check(clean, len(prompt.segments), max(sizes, default=0))
    parts: list[str | SegmentSet] = [str(prompt.prefix)]
    for each, behind in zip(prompt.sets, prompt.texts[1:], strict=True):
        parts += [each, str(behind)]
    return parts


def _check(text: str, found: int, expected: int) -> None:
    problem = ""
    if any(printed in text for printed in _PRINTED):
        problem = (
            "The nodes arrived as a printed Python list, in which their boundaries are gone: "
            'response_mode="simple_summarize" does that.'
        )
    elif text.count(_BEGIN) != found or text.count(_END) != found:
        problem = "A node was cut in two: the response mode splits what does not fit into the context window at once."
    elif found < expected:
        problem = (
            f"A call got {found} of {expected} nodes: the response mode asks several times, and what it makes of the "
            "answers depends on the order of the nodes."
        )
    if problem:
        warnings.warn(f"{problem} {_FIX}", OrderWarning, stacklevel=2)
