"""Segments inside a string: the library's in-band codec, and a check that a response mode left them whole.

Behind each marked segment stands the size of the set it belongs to, and its score if it has one. So a prompt that
holds fewer segments than its set had, or a piece of one, is noticed where it arrives, whatever happened to it on the
way.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

from invariant_rag.prompts import mark, parse_marked
from invariant_rag.segments import Prompt, Segment, SegmentSet

_BEGIN, _END = tuple(mark(""))
_SIZE_MARK = "\ue205"
_NUMBER = r"-?(?:inf|\d+(?:\.\d+)?(?:e[-+]\d+)?)"
_SIZE = re.compile(f"{_SIZE_MARK}(?:(\\d+)(?::({_NUMBER}))?)?{_SIZE_MARK}?")
_ENDED = re.compile(f"{_END}(?:{_SIZE.pattern})?")
_PRINTED = (_BEGIN.encode("unicode_escape").decode(), _END.encode("unicode_escape").decode())
_FIX = (
    "Use response_synthesizer=InvariantSynthesizer(llm), which reads every node in one call, or retrieve so few nodes "
    'that response_mode="compact" needs one call.'
)


class OrderWarning(UserWarning):
    """The answer may depend on the order of the segments; the message says why, and what to do."""


def mark_in_set(segment: Segment | str, size: int) -> str:
    """Write a segment of a set of `size` into a string, so that `read_marked` finds its boundaries and score again."""
    segment = Segment.of(segment)
    score = "" if segment.score is None else f":{float(segment.score)!r}"
    return f"{mark(Segment(segment.text.replace(_SIZE_MARK, ''), segment.title))}{_SIZE_MARK}{size}{score}{_SIZE_MARK}"


def unmarked(text: str) -> str:
    """Return a text without any mark."""
    return _SIZE.sub("", text).replace(_BEGIN, "").replace(_END, "")


def read_marked(text: str) -> list[str | SegmentSet]:
    """Return the texts and the sets of a string, in reading order.

    Warns (`OrderWarning`) where segments were cut, printed, or spread over several calls.
    """
    sizes = [int(size) for size, _ in _SIZE.findall(text) if size]
    clean = _SIZE.sub("", text)
    prompt = parse_marked(clean)
    _check(clean, len(prompt.segments), max(sizes, default=0))
    parts: list[str | SegmentSet] = [str(prompt.prefix)]
    for each, behind in zip(_scored(prompt, text), prompt.texts[1:], strict=True):
        parts += [each, str(behind)]
    return parts


def _scored(prompt: Prompt, text: str) -> list[SegmentSet]:
    """Return the sets with the scores that stand behind the segments; as they are, where marks do not pair up."""
    found = _ENDED.findall(text)
    if len(found) != len(prompt.segments):
        return list(prompt.sets)
    scores = (float(score) if score else None for _, score in found)
    return [SegmentSet(replace(segment, score=next(scores)) for segment in each) for each in prompt.sets]


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
