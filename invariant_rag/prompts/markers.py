"""Segments inside a string, between marker characters: for frameworks that can only pass text to a model.

The markers are private-use characters, which JSON, `str.strip()` and Unicode normalisation keep:
`U+E200 [title U+E202] text U+E201`.
"""

from __future__ import annotations

import logging
import re

from invariant_rag.errors import InvalidSegment
from invariant_rag.segments import Prompt, Segment, SegmentSet, document_rendering

_logger = logging.getLogger(__name__)

_BEGIN, _END, _TITLE_END = "\ue200", "\ue201", "\ue202"
_NO_MARKER = f"[^{_BEGIN}{_END}{_TITLE_END}]*"
_MARKED_SEGMENT = re.compile(f"{_BEGIN}(?:({_NO_MARKER}){_TITLE_END})?({_NO_MARKER}){_END}")
_MARKER = re.compile(f"[{_BEGIN}{_END}{_TITLE_END}]")


def mark(segment: Segment | str) -> str:
    """Write a segment as a string with markers around it, from which `parse_marked` restores title and text.

    Markers inside the segment's own title and text are removed. Metadata and score are not written.

    >>> parse_marked("Documents: " + mark("one") + mark("two") + " Which?").sets
    (SegmentSet([Segment(text='one', title=None, score=None, token_ids=None), \
Segment(text='two', title=None, score=None, token_ids=None)]),)

    Raises:
        InvalidSegment: The segment holds token ids.
    """
    segment = Segment.of(segment)
    if segment.token_ids is not None:
        raise InvalidSegment("expected a segment with text, got one with token ids, which cannot be written as text")
    title = "" if segment.title is None else _MARKER.sub("", segment.title) + _TITLE_END
    return f"{_BEGIN}{title}{_MARKER.sub('', segment.text)}{_END}"


def parse_marked(text: str) -> Prompt:
    """Parse a string with segments written by `mark` into a prompt.

    Segments with nothing but white space between them form one set. Unpaired markers are removed, with a warning in
    the log; the text next to them is not a segment.
    """
    parts: list[str | SegmentSet] = []
    current_set: list[Segment] = []
    position = 0
    for match in _MARKED_SEGMENT.finditer(text):
        between = _remove_unpaired(text[position : match.start()])
        if between.strip() or not current_set:
            parts += [SegmentSet(current_set), between] if current_set else [between]
            current_set = []
        current_set.append(Segment(match[2], title=match[1]))
        position = match.end()
    if current_set:
        parts.append(SegmentSet(current_set))
    return Prompt.of(*parts, _remove_unpaired(text[position:]), rendering=document_rendering)


def _remove_unpaired(text: str) -> str:
    clean = _MARKER.sub("", text)
    if clean != text:
        _logger.warning("removed segment markers that do not pair up; the text next to them is not parsed as a segment")
    return clean
