"""From LangChain messages to the core's: every segment as a segment, however it travelled."""

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


def core_messages(messages: Sequence[BaseMessage], documents: Iterable[Any] | None = None) -> list[Message]:
    """Return messages as the core renders them: neighbours of one role merged, and only text and segments inside.

    What a tool returned is read as the user's: its artifact where that is a list of documents, else its content. An
    assistant's message that only calls tools says nothing, and is left out.

    Args:
        messages: The conversation.
        documents: Further segments, put in front of what the user said last.

    Raises:
        InvalidPrompt: A content block is neither text nor a document, or nothing is left.
    """
    turns: list[tuple[str, list[Part]]] = []
    for message in map(message_chunk_to_message, messages):  # a streamed answer is a sum of chunks
        role, parts = _role(message), message_parts(message)
        if not parts and isinstance(message, AIMessage):
            continue
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(["\n", *parts])
        else:
            turns.append((role, parts))
    if documents is not None:
        found = to_segments(documents)
        if not turns or turns[-1][0] != "user":
            turns.append(("user", []))
        turns[-1][1][:0] = found
    if not turns:
        raise InvalidPrompt("expected at least one message, got none")
    return [{"role": role, "content": together(parts)} for role, parts in turns]


def question(messages: Sequence[Message]) -> str:
    """The text of the user's last message without its segments: what relevance orderings compare segments with."""
    for message in reversed(messages):
        if message["role"] == "user":
            return "".join(part for part in message["content"] if isinstance(part, str)).strip()
    return ""


def marked_parts(text: str) -> Iterator[Part]:
    """Yield the texts and the segments of a text that was written with marks."""
    prompt = parse_marked(text)
    for before, segments in zip(prompt.texts, [*prompt.sets, ()], strict=True):
        if before:
            yield str(before)
        yield from segments


def content_parts(content: str | Sequence[str | Mapping[str, Any]]) -> Iterator[Part]:
    """Yield the texts and the segments of a message's content.

    Raises:
        InvalidPrompt: A block is neither text nor a document.
    """
    for block in [content] if isinstance(content, str) else content:
        if isinstance(block, str):
            yield from marked_parts(block)
        elif is_segment(block):
            yield to_segment(block)
        elif block.get("type") == "text":
            yield from marked_parts(block["text"])
        else:
            raise InvalidPrompt(
                f"expected text and documents, got a content block of type {block.get('type')!r}",
                hint='This model reads text. A document is a block of type "text-plain".',
            )


def is_segment(block: object) -> bool:
    """Whether a content block is a segment: `text-plain`, or text whose `extras` say `"segment": True`."""
    if not isinstance(block, Mapping):
        return False
    extras = block.get("extras") or {}
    return block.get("type") == BLOCK_TYPE or (block.get("type") == "text" and extras.get("segment") is True)


def together(parts: Iterable[Part]) -> list[Part]:
    """Return parts without empty texts and without white space between two segments: they are of one set."""
    kept: list[Part] = []
    for part in parts:
        if part == "":
            continue
        if isinstance(part, Segment) and len(kept) > 1 and isinstance(kept[-2], Segment):
            between = kept[-1]
            if isinstance(between, str) and not between.strip():
                kept.pop()
        if isinstance(part, str) and kept and isinstance(kept[-1], str):
            kept[-1] += part
        else:
            kept.append(part)
    return kept


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if message.type not in _ROLES:
        raise InvalidPrompt(f"expected a message of {', '.join(sorted(_ROLES))}, got {message.type!r}")
    return _ROLES[message.type]


def message_parts(message: BaseMessage) -> list[Part]:
    """Return the texts and the segments of a message.

    Raises:
        InvalidPrompt: A content block is neither text nor a document.
    """
    if isinstance(message, ToolMessage) and are_documents(message.artifact):
        return list(to_segments(message.artifact))
    if isinstance(message, AIMessage):
        return [message.text] if message.text else []
    return list(content_parts(message.content))


def are_documents(artifact: object) -> bool:
    """Whether a tool's artifact is a list of documents, or of what a checkpoint makes of them."""
    return isinstance(artifact, list | tuple) and bool(artifact) and all(map(_is_document, artifact))


def _is_document(value: object) -> bool:
    return isinstance(value, Document) or (isinstance(value, Mapping) and "page_content" in value)
