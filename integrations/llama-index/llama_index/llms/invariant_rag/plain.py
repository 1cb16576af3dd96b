"""Requests to LLMs that know no segments, as LlamaIndex carries them: messages to turns, and turns to messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock

from invariant_rag.api_models import PlainRequests, Turn
from invariant_rag.segments import Segment, SegmentSet
from llama_index.llms.invariant_rag.markers import parse_marked_text
from llama_index.llms.invariant_rag.messages import is_segment_block, to_segment

_ASSISTANT = (MessageRole.ASSISTANT, MessageRole.CHATBOT, MessageRole.MODEL)
_TOOL = (MessageRole.TOOL, MessageRole.FUNCTION)


def text_requests(requests: PlainRequests, text: str, query: str | None = None) -> list[str]:
    """Return requests as texts, for a text with marked segments.

    Args:
        requests: The orders in which to list the segments.
        text: The text.
        query: What relevance orderings compare segments with. None: the text without its segments.
    """
    return requests.of_text(_text_parts(text), query or None)


def message_requests(
    requests: PlainRequests, messages: Sequence[ChatMessage], query: str | None = None
) -> list[list[ChatMessage]]:
    """Return requests as lists of messages, for messages with segments in any of them.

    Messages without segments stay as they are.

    Args:
        requests: The orders in which to list the segments.
        messages: The conversation.
        query: What relevance orderings compare segments with. None: the text of the user's last message.
    """
    turns = [Turn(_role(message), tuple(_parts(message))) for message in messages]
    return [list(map(_message, messages, turns, request)) for request in requests.of_turns(turns, query or None)]


def _role(message: ChatMessage) -> str:
    if message.role in _ASSISTANT:
        return "assistant"
    return "tool" if message.role in _TOOL else message.role.value


def _parts(message: ChatMessage) -> Iterator[Any]:
    """Yield texts, segments, and other blocks. What the assistant said is never changed, so it has no parts."""
    if message.role in _ASSISTANT:
        return
    before: object = None
    for block in message.blocks:
        if isinstance(block, TextBlock):
            if isinstance(before, TextBlock):
                yield "\n"  # as ChatMessage.content joins them
            yield from _text_parts(block.text)
        elif is_segment_block(block):
            yield to_segment(block)
        else:
            yield block
        before = block


def _text_parts(text: str) -> Iterator[str | Segment]:
    for part in parse_marked_text(text):
        if isinstance(part, SegmentSet):
            yield from part
        elif part:
            yield part


def _message(message: ChatMessage, turn: Turn, request: Turn) -> ChatMessage:
    """Return a message with the content of a request, each text as one block."""
    text = "\n".join(block.text for block in message.blocks if isinstance(block, TextBlock))
    if turn.role == "assistant" or not (turn.has_segments or turn.text.strip() != text.strip()):
        return message
    blocks = [TextBlock(text=part) if isinstance(part, str) else part for part in request.parts]
    return ChatMessage(role=message.role, blocks=blocks, additional_kwargs=message.additional_kwargs)
