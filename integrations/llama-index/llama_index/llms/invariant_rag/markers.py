"""Segments inside a string, with a check that LlamaIndex's response mode kept all of them whole.

Each marked segment is followed by the size of its set, and its score if it has one: `U+E205 size[:score] U+E205`. The
parser can therefore tell that a prompt lacks segments of a set, or that a segment was split.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

from invariant_rag.errors import OrderWarning
from invariant_rag.prompts import mark, parse_marked
from invariant_rag.segments import Prompt, Segment, SegmentSet

_BEGIN, _END = tuple(mark(""))
_SIZE_MARKER = "\ue205"
_NUMBER = r"-?(?:inf|\d+(?:\.\d+)?(?:e[-+]\d+)?)"
_SIZE = re.compile(f"{_SIZE_MARKER}(?:(\\d+)(?::({_NUMBER}))?)?{_SIZE_MARKER}?")
_END_AND_SIZE = re.compile(f"{_END}(?:{_SIZE.pattern})?")
_ESCAPED_MARKERS = (_BEGIN.encode("unicode_escape").decode(), _END.encode("unicode_escape").decode())
_FIX = (
    "Use response_synthesizer=InvariantSynthesizer(llm), which passes all nodes in one call, or retrieve so few nodes "
    'that response_mode="compact" needs one call.'
)


def mark_in_set(segment: Segment | str, size: int) -> str:
    """Write a segment of a set of `size` as a string from which `parse_marked_text` restores title, text and score."""
    segment = Segment.of(segment)
    score = "" if segment.score is None else f":{float(segment.score)!r}"
    marked = mark(Segment(segment.text.replace(_SIZE_MARKER, ""), segment.title))
    return f"{marked}{_SIZE_MARKER}{size}{score}{_SIZE_MARKER}"


def strip_markers(text: str) -> str:
    """Remove all markers from a text."""
    return _SIZE.sub("", text).replace(_BEGIN, "").replace(_END, "")


def parse_marked_text(text: str) -> list[str | SegmentSet]:
    """Parse a string with marked segments into its texts and sets, in the order of the string.

    Warns:
        OrderWarning: Segments were split, printed as a Python list, or spread over several calls.
    """
    sizes = [int(size) for size, _ in _SIZE.findall(text) if size]
    clean = _SIZE.sub("", text)
    prompt = parse_marked(clean)
    _warn_if_incomplete(clean, len(prompt.segments), max(sizes, default=0))
    parts: list[str | SegmentSet] = [str(prompt.prefix)]
    for segments, following in zip(_sets_with_scores(prompt, text), prompt.texts[1:], strict=True):
        parts += [segments, str(following)]
    return parts


def _sets_with_scores(prompt: Prompt, text: str) -> list[SegmentSet]:
    """Return the sets of a prompt with the scores in the text; without them if markers do not pair up."""
    found = _END_AND_SIZE.findall(text)
    if len(found) != len(prompt.segments):
        return list(prompt.sets)
    scores = (float(score) if score else None for _, score in found)
    return [SegmentSet(replace(segment, score=next(scores)) for segment in each) for each in prompt.sets]


def _warn_if_incomplete(text: str, found: int, expected: int) -> None:
    problem = ""
    if any(marker in text for marker in _ESCAPED_MARKERS):
        problem = (
            "The nodes are in the prompt as a printed Python list, without their boundaries: "
            'response_mode="simple_summarize" does that.'
        )
    elif text.count(_BEGIN) != found or text.count(_END) != found:
        problem = "A node was cut in two: the response mode splits text that does not fit into the context window."
    elif found < expected:
        problem = (
            f"A call got {found} of {expected} nodes: the response mode makes several calls, and how it combines their "
            "answers depends on the order of the nodes."
        )
    if problem:
        warnings.warn(f"{problem} {_FIX}", OrderWarning, stacklevel=2)
