"""Find documents again in a text that a chain made of them: for chains that join documents before the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from invariant_rag.prompts import mark
from invariant_rag.segments import Segment
from langchain_core.messages import AIMessage, BaseMessage

from langchain_invariant_rag.documents import to_segments
from langchain_invariant_rag.messages import is_segment, marked_parts


def mark_known(text: str, documents: Iterable[Any]) -> str:
    """Return a text with marks around every whole document text in it that has none yet.

    Of two that overlap, the longer one counts.

    >>> from invariant_rag.prompts import parse_marked
    >>> [segment.text for segment in parse_marked(mark_known("Read: a b, c d.", ["c d", "a b", "b"])).segments]
    ['a b', 'c d']
    """
    texts = {segment.text for segment in to_segments(documents) if segment.text.strip()}
    parts = marked_parts(text)
    return "".join(mark(part) if isinstance(part, Segment) else _mark_texts(part, texts) for part in parts)


def _mark_texts(text: str, texts: Iterable[str]) -> str:
    taken: list[tuple[int, int]] = []
    for each in sorted(texts, key=lambda each: (-len(each), each)):
        start = text.find(each)
        while start >= 0:
            stop = start + len(each)
            if all(stop <= a or b <= start for a, b in taken):
                taken.append((start, stop))
            start = text.find(each, start + 1)
    for start, stop in sorted(taken, reverse=True):
        text = text[:start] + mark(text[start:stop]) + text[stop:]
    return text


def mark_known_in(messages: Sequence[BaseMessage], documents: Sequence[Any]) -> list[BaseMessage]:
    """Return messages with marks around every document in their texts, but for what the assistant said."""
    return [message if isinstance(message, AIMessage) else _marked(message, documents) for message in messages]


def _marked(message: BaseMessage, documents: Sequence[Any]) -> BaseMessage:
    content = message.content
    if isinstance(content, str):
        return message.model_copy(update={"content": mark_known(content, documents)})
    return message.model_copy(update={"content": [_marked_block(block, documents) for block in content]})


def _marked_block(block: str | Mapping[str, Any], documents: Sequence[Any]) -> Any:
    if isinstance(block, str):
        return mark_known(block, documents)
    if block.get("type") == "text" and not is_segment(block):
        return {**block, "text": mark_known(block["text"], documents)}
    return block
