"""Convert LangChain messages to the core's messages, with segments from blocks, marked text and tool artifacts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import Message, parse_marked
from invariant_rag.segments import Segment
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, ToolMessage, message_chunk_to_message

from langchain_invariant_rag.documents import BLOCK_TYPE, to_segment, to_segments

Part: TypeAlias = str | Segment

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "user", "function": "user"}


def convert_messages(messages: Sequence[BaseMessage], documents: Iterable[Any] | None = None) -> list[Message]:
    """Convert messages for `render_chat`: contents of text and segments, adjacent messages of one role merged.

    Tool messages become user messages with the tool's artifact, if that is a list of documents, or else its content.
    Assistant messages without text (tool calls only) are left out.

    Args:
        messages: The conversation.
        documents: Further documents, inserted at the start of the last user message.

    Raises:
        InvalidPrompt: A content block is neither text nor a document, or no message is left.
    """
    turns: list[tuple[str, list[Part]]] = []
    for message in map(message_chunk_to_message, messages):  # a streamed answer in a history is a chunk
        role, parts = _role(message), parse_message(message)
        if not parts and isinstance(message, AIMessage):
            continue
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(["\n", *parts])
        else:
            turns.append((role, parts))
    if documents is not None:
        segments = to_segments(documents)
        if not turns or turns[-1][0] != "user":
            turns.append(("user", []))
        turns[-1][1][:0] = segments
    if not turns:
        raise InvalidPrompt("expected at least one message, got none")
    return [{"role": role, "content": merge_parts(parts)} for role, parts in turns]


def last_user_text(messages: Sequence[Message]) -> str:
    """Return the text of the last user message without its segments: the query of relevance orderings."""
    for message in reversed(messages):
        if message["role"] == "user":
            return "".join(part for part in message["content"] if isinstance(part, str)).strip()
    return ""


def parse_marked_text(text: str) -> Iterator[Part]:
    """Yield the texts and the segments of a string with segment markers."""
    prompt = parse_marked(text)
    for before, segments in zip(prompt.texts, [*prompt.sets, ()], strict=True):
        if before:
            yield str(before)
        yield from segments


def parse_content(content: str | Sequence[str | Mapping[str, Any]]) -> Iterator[Part]:
    """Yield the texts and the segments of the content of a message.

    Raises:
        InvalidPrompt: A block is neither text nor a document.
    """
    for block in [content] if isinstance(content, str) else content:
        if isinstance(block, str):
            yield from parse_marked_text(block)
        elif is_segment_block(block):
            yield to_segment(block)
        elif block.get("type") == "text":
            yield from parse_marked_text(block["text"])
        else:
            raise InvalidPrompt(
                f"expected text and documents, got a content block of type {block.get('type')!r}",
                hint='The model takes text only. Pass a document as a block of type "text-plain".',
            )


def is_segment_block(block: object) -> bool:
    """Return whether a content block is a segment: `text-plain`, or `text` with `"segment": True` in its `extras`."""
    if not isinstance(block, Mapping):
        return False
    extras = block.get("extras") or {}
    return block.get("type") == BLOCK_TYPE or (block.get("type") == "text" and extras.get("segment") is True)


def merge_parts(parts: Iterable[Part]) -> list[Part]:
    """Join adjacent texts, and drop white space between segments so that they form one set."""
    merged: list[Part] = []
    for part in parts:
        if part == "":
            continue
        if isinstance(part, Segment) and len(merged) > 1 and isinstance(merged[-2], Segment):
            between = merged[-1]
            if isinstance(between, str) and not between.strip():
                merged.pop()
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        else:
            merged.append(part)
    return merged


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if message.type not in _ROLES:
        raise InvalidPrompt(f"expected a message of type {', '.join(sorted(_ROLES))}, got {message.type!r}")
    return _ROLES[message.type]


def parse_message(message: BaseMessage) -> list[Part]:
    """Return the texts and the segments of a message, or of the documents in its artifact.

    Raises:
        InvalidPrompt: A content block is neither text nor a document.
    """
    if isinstance(message, ToolMessage) and is_document_list(message.artifact):
        return list(to_segments(message.artifact))
    if isinstance(message, AIMessage):
        return [message.text] if message.text else []
    return list(parse_content(message.content))


def is_document_list(artifact: object) -> bool:
    """Return whether a tool's artifact is a list of documents, possibly as the dicts of a LangGraph checkpoint."""
    return isinstance(artifact, list | tuple) and bool(artifact) and all(map(_is_document, artifact))


def _is_document(value: object) -> bool:
    return isinstance(value, Document) or (isinstance(value, Mapping) and "page_content" in value)
