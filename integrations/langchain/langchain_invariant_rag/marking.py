"""Mark known documents inside text, for chains that join documents into the prompt before the model gets it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from invariant_rag.prompts import mark
from invariant_rag.segments import Segment
from langchain_core.messages import AIMessage, BaseMessage

from langchain_invariant_rag.documents import to_segments
from langchain_invariant_rag.messages import is_segment_block, parse_marked_text


def mark_documents(text: str, documents: Iterable[Any]) -> str:
    """Put segment markers around every document whose whole text occurs in a text outside of a marked segment.

    Of two overlapping occurrences the longer one is marked.

    >>> from invariant_rag.prompts import parse_marked
    >>> [segment.text for segment in parse_marked(mark_documents("Text: a b, c d.", ["c d", "a b", "b"])).segments]
    ['a b', 'c d']
    """
    texts = {segment.text for segment in to_segments(documents) if segment.text.strip()}
    parts = parse_marked_text(text)
    return "".join(mark(part) if isinstance(part, Segment) else _mark_occurrences(part, texts) for part in parts)


def _mark_occurrences(text: str, texts: Iterable[str]) -> str:
    spans: list[tuple[int, int]] = []
    for each in sorted(texts, key=lambda each: (-len(each), each)):
        start = text.find(each)
        while start >= 0:
            stop = start + len(each)
            if all(stop <= a or b <= start for a, b in spans):
                spans.append((start, stop))
            start = text.find(each, start + 1)
    for start, stop in sorted(spans, reverse=True):
        text = text[:start] + mark(text[start:stop]) + text[stop:]
    return text


def mark_documents_in_messages(messages: Sequence[BaseMessage], documents: Sequence[Any]) -> list[BaseMessage]:
    """Mark the documents in the texts of all messages except the assistant's."""
    return [message if isinstance(message, AIMessage) else _mark_in_message(message, documents) for message in messages]


def _mark_in_message(message: BaseMessage, documents: Sequence[Any]) -> BaseMessage:
    content = message.content
    if isinstance(content, str):
        return message.model_copy(update={"content": mark_documents(content, documents)})
    return message.model_copy(update={"content": [_mark_in_block(block, documents) for block in content]})


def _mark_in_block(block: str | Mapping[str, Any], documents: Sequence[Any]) -> Any:
    if isinstance(block, str):
        return mark_documents(block, documents)
    if block.get("type") == "text" and not is_segment_block(block):
        return {**block, "text": mark_documents(block["text"], documents)}
    return block
