"""Convert LlamaIndex messages to the core's messages: blocks become texts and segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    DocumentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
)

from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import Message
from invariant_rag.segments import Segment, SegmentSet
from llama_index.llms.invariant_rag.markers import parse_marked_text

_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}


class SegmentBlock(CitableBlock):
    """A content block with one segment. For LLMs other than `InvariantLLM` it is an ordinary `CitableBlock`.

    Attributes:
        score: The retriever's score, used by the `score` ordering.
    """

    score: float | None = None

    @classmethod
    def of(cls, segment: Segment | str) -> SegmentBlock:
        """Build a block from a segment with text."""
        segment = Segment.of(segment)
        return cls(
            title=segment.title or "",
            source=segment.content_hash,
            content=[TextBlock(text=segment.text)],
            score=segment.score,
        )


def convert_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Convert messages for `InvariantModel.chat_prompt`; adjacent messages of one role are merged.

    Citable blocks, plain-text document blocks and marked segments in text blocks become segments. Cache points and
    thinking blocks are left out.

    Raises:
        InvalidPrompt: A block is neither text nor a segment.
    """
    converted: list[dict[str, Any]] = []
    for message in messages:
        role = _ROLES.get(message.role, message.role.value)
        content = list(_parse_blocks(message))
        if converted and converted[-1]["role"] == role:
            converted[-1]["content"] += ["\n\n", *content]
        else:
            converted.append({"role": role, "content": content})
    return list(converted)


def _parse_blocks(message: ChatMessage) -> Iterator[str | Segment | SegmentSet]:
    previous: object = None
    for block in message.blocks:
        if isinstance(block, TextBlock):
            if isinstance(previous, TextBlock):
                yield "\n"  # as ChatMessage.content joins them
            yield from parse_marked_text(block.text)
        elif is_segment_block(block):
            yield to_segment(block)
        elif not isinstance(block, CachePoint | ThinkingBlock):
            raise InvalidPrompt(
                f"expected text, citable or plain-text document blocks, got a block of type {block.block_type!r}",
                hint="The model takes text only. Remove the block, or describe its content in a TextBlock.",
            )
        previous = block


def is_segment_block(block: object) -> TypeGuard[CitableBlock | DocumentBlock]:
    """Return whether a block is a segment: a citable block, or a document block of plain text."""
    if isinstance(block, DocumentBlock):
        return (block.document_mimetype or "").startswith("text/")
    return isinstance(block, CitableBlock)


def to_segment(block: CitableBlock | DocumentBlock) -> Segment:
    """Convert a block to a segment.

    Raises:
        InvalidPrompt: A citable block contains something other than text.
    """
    if isinstance(block, DocumentBlock):
        return Segment(block.resolve_document().read().decode("utf-8"), title=block.title or None)
    texts = [each.text for each in block.content if isinstance(each, TextBlock)]
    if len(texts) < len(block.content):
        other = next(each for each in block.content if not isinstance(each, TextBlock))
        raise InvalidPrompt(
            f"expected text blocks in a citable block, got a block of type {other.block_type!r}",
            hint="The model takes text only. Put the text of the source into a TextBlock.",
        )
    score = block.score if isinstance(block, SegmentBlock) else None
    return Segment("\n".join(texts), title=block.title or None, score=score)
