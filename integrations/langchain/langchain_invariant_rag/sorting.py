"""Sorting segments by content before callbacks and caches see them. The models themselves ignore the order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar

from invariant_rag.prompts import mark
from invariant_rag.segments import Segment
from langchain_core.messages import AIMessage, BaseMessage

from langchain_invariant_rag.documents import to_segment
from langchain_invariant_rag.messages import Part, is_segment_block, merge_parts, parse_marked_text

T = TypeVar("T")


def marked(parts: Iterable[Part]) -> str:
    """Return parts as one text with marked segments. Metadata and scores are lost: marks have no place for them."""
    return "".join(mark(part) if isinstance(part, Segment) else part for part in parts)


def sorted_text(text: str) -> str:
    """Return a text in which the marked segments of every set are listed in the order of their contents."""
    parts = merge_parts(parse_marked_text(text))
    if not any(isinstance(part, Segment) for part in parts):
        return text
    return marked(_sorted_runs(parts, lambda part: isinstance(part, Segment), attrgetter("canonical_key")))


def sorted_messages(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return messages with neighbouring segments sorted by content."""
    return [message if isinstance(message, AIMessage) else _sorted_message(message) for message in messages]


def _sorted_message(message: BaseMessage) -> BaseMessage:
    content = message.content
    if isinstance(content, str):
        arranged: Any = sorted_text(content)
    else:
        blocks = _sorted_runs(content, is_segment_block, lambda block: to_segment(block).canonical_key)
        arranged = [sorted_text(block) if isinstance(block, str) else block for block in blocks]
    return message if arranged == content else message.model_copy(update={"content": arranged})


def _sorted_runs(items: Iterable[T], belongs: Callable[[T], bool], key: Callable[[T], Any]) -> list[T]:
    """Sort every run of neighbours that belong together; leave the others where they are."""
    runs = ((inside, list(run)) for inside, run in groupby(items, belongs))
    return [item for inside, run in runs for item in (sorted(run, key=key) if inside else run)]
