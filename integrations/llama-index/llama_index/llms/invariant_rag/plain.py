"""Messages for LLMs that know of no segments: every set in an order of its own, and segments as plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock

from invariant_rag.api_models import canonical_parts, drawn_orders, plain_text
from invariant_rag.segments import Segment, SegmentSet
from llama_index.llms.invariant_rag.markers import parse_marked_text
from llama_index.llms.invariant_rag.messages import is_segment_block, to_segment


@dataclass(frozen=True)
class Requests:
    """Writes what to ask an LLM, so that the order in which segments were listed does not show.

    Attributes:
        ordering: Which segment stands where, by content.
        votes: How many requests to write, each with the segments in another order.
        seed: What these orders are drawn with. The first is that of the ordering.
    """

    ordering: str = "lexical"
    votes: int = 1
    seed: int = 0

    def of_text(self, text: str, query: str | None = None) -> list[str]:
        """Return texts, for a text in which segments are marked."""
        parts = list(_text_parts(text))
        return ["".join(map(plain_text, listed)) for listed in self._listed(parts, query or _said(parts))]

    def of_messages(self, messages: Sequence[ChatMessage], query: str | None = None) -> list[list[ChatMessage]]:
        """Return lists of messages, for messages with segments in any of them."""
        owned = list(_owned(messages))
        asked = [place for place, each in enumerate(messages) if each.role == MessageRole.USER][-1:]
        said = _said([part for owner, part in owned if owner in asked])
        requests = []
        for listed in self._listed([part for _, part in owned], query or said):
            parts: list[list[Any]] = [[] for _ in messages]
            for (owner, _), part in zip(owned, listed, strict=True):
                if owner is not None:
                    parts[owner].append(part)
            requests.append(list(map(_written, messages, parts)))
        return requests

    def _listed(self, parts: Sequence[Any], query: str) -> list[list[Any]]:
        return drawn_orders(canonical_parts(parts, self.ordering, query), self.votes, self.seed)


class _Wall:
    """Stands between two sets that do not become one."""


def _said(parts: Sequence[Any]) -> str:
    return "".join(part for part in parts if isinstance(part, str)).strip()


def _owned(messages: Sequence[ChatMessage]) -> Iterator[tuple[int | None, Any]]:
    """Yield every part with the place of its message. Sets reach across messages of one role, but for tools."""
    before = None
    for place, message in enumerate(messages):
        if message.role != before or message.role in (MessageRole.TOOL, MessageRole.FUNCTION):
            yield None, _Wall()
        for part in _parts(message):
            yield place, part
        before = message.role


def _parts(message: ChatMessage) -> Iterator[Any]:
    """Yield texts, segments, and whatever else there is in a message."""
    if message.role in (MessageRole.ASSISTANT, MessageRole.CHATBOT, MessageRole.MODEL):
        yield _Wall()
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


def _written(message: ChatMessage, parts: Sequence[Any]) -> ChatMessage:
    """Return a message of these parts, each stretch of text and segments as one block of text."""
    texts = [block.text for block in message.blocks if isinstance(block, TextBlock)]
    unmarked = not any(isinstance(part, Segment) for part in parts) and _said(parts) == "\n".join(texts).strip()
    if unmarked or any(isinstance(part, _Wall) for part in parts):
        return message
    blocks: list[Any] = []
    for part in parts:
        if not isinstance(part, str | Segment):
            blocks.append(part)
        elif blocks and isinstance(blocks[-1], TextBlock):
            blocks[-1] = TextBlock(text=blocks[-1].text + plain_text(part))
        else:
            blocks.append(TextBlock(text=plain_text(part)))
    return ChatMessage(role=message.role, blocks=blocks, additional_kwargs=message.additional_kwargs)
