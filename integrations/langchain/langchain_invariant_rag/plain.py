"""Requests to models that know no segments, as LangChain carries them: messages to turns, and turns to messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from invariant_rag.api_models import PlainRequests, Turn
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.prompt_values import PromptValue, StringPromptValue

from langchain_invariant_rag.documents import to_segments
from langchain_invariant_rag.messages import is_document_list, is_segment_block, parse_content, parse_marked_text
from langchain_invariant_rag.prompts import SegmentsPlaceholder

_TEXT_KEYS = {"type", "text", "id"}


def input_requests(requests: PlainRequests, model_input: Any, documents: Iterable[Any] | None = None) -> list[Any]:
    """Return requests: texts for a text, and lists of messages for messages.

    Args:
        requests: The orders in which to list the segments.
        model_input: What language models of LangChain take.
        documents: Further segments: in front of the text, or of the user's last message.
    """
    if isinstance(model_input, str | StringPromptValue):
        text = model_input if isinstance(model_input, str) else model_input.text
        return list(requests.of_text([*to_segments(documents or []), *parse_marked_text(text)]))
    given = model_input.to_messages() if isinstance(model_input, PromptValue) else convert_to_messages(model_input)
    return list(message_requests(requests, given, documents))


def message_requests(
    requests: PlainRequests, messages: Sequence[BaseMessage], documents: Iterable[Any] | None = None
) -> list[list[BaseMessage]]:
    """Return requests as lists of messages; see `input_requests`. Messages without segments stay as they are."""
    if documents is not None:
        messages = _with_documents(messages, documents)
    turns = [Turn(_role(message), tuple(_parts(message))) for message in messages]
    return [list(map(_message, messages, turns, request)) for request in requests.of_turns(turns)]


def _with_documents(messages: Sequence[BaseMessage], documents: Iterable[Any]) -> list[BaseMessage]:
    """Put documents in front of the user's last message."""
    asked = [index for index, message in enumerate(messages) if isinstance(message, HumanMessage)]
    place = asked[-1] if asked else len(messages)
    placed = SegmentsPlaceholder("documents").format_messages(documents=documents)
    return [*messages[:place], *placed, *messages[place:]]


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, HumanMessage):
        return "user"
    return "tool" if isinstance(message, ToolMessage | FunctionMessage) else message.type


def _parts(message: BaseMessage) -> Iterator[Any]:
    """Yield texts, segments, and other content blocks. What the assistant said is never changed, so it has no parts."""
    if isinstance(message, AIMessage):
        return
    if isinstance(message, ToolMessage) and is_document_list(message.artifact):
        yield from to_segments(message.artifact)
    else:
        yield from _content(message.content)


def _content(content: str | Sequence[str | Mapping[str, Any]]) -> Iterator[Any]:
    for block in [content] if isinstance(content, str) else content:
        if isinstance(block, str) or is_segment_block(block):
            yield from parse_content([block])
        elif block.get("type") == "text":
            found = list(parse_content([block]))
            marked = found != [block["text"]]
            yield from found if marked or set(block) <= _TEXT_KEYS else [block]
        else:
            yield block


def _text(content: Iterable[Any]) -> str:
    texts = (each.get("text", "") if isinstance(each, Mapping) else each for each in content)
    return "".join(text for text in texts if isinstance(text, str))


def _message(message: BaseMessage, turn: Turn, request: Turn) -> BaseMessage:
    """Return a message with the content of a request: a string where there is only text, else content blocks."""
    given = [message.content] if isinstance(message.content, str) else message.content
    if isinstance(message, AIMessage) or not (turn.has_segments or _text(turn.parts) != _text(given)):
        return message
    whole = request.parts[0] if len(request.parts) == 1 and isinstance(request.parts[0], str) else None
    blocks = [{"type": "text", "text": part} if isinstance(part, str) else part for part in request.parts]
    changed: dict[str, Any] = {"content": blocks if whole is None else whole}
    if isinstance(message, ToolMessage):
        changed["artifact"] = None  # it lists the documents too
    return message.model_copy(update=changed)
