"""Messages of LlamaIndex as turns of a conversation, with texts and segments, and as messages of the core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    CitableBlock,
    CitationBlock,
    DocumentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import Message, Turn, without_marks
from invariant_rag.segments import Segment, SegmentSet
from llama_index.llms.invariant_rag.slots import Part, SlotBlock

ASSISTANT = (MessageRole.ASSISTANT, MessageRole.CHATBOT, MessageRole.MODEL)
_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}


class SegmentBlock(CitableBlock):
    """A content block with one segment. For LLMs other than `InvariantLLM` it is an ordinary `CitableBlock`."""

    score: float | None = None
    """The retriever's score, used by the `score` ordering."""

    @classmethod
    def of(cls, segment: Segment | str) -> SegmentBlock:
        """Build a block from a segment with text."""
        segment = Segment.of(segment)
        content: list[Any] = [TextBlock(text=segment.text)]
        return cls(title=segment.title or "", source=segment.content_hash, content=content, score=segment.score)


def to_turns(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Return messages as turns of texts (`Part`s), segments, and any other content block.

    Citable blocks and plain-text document blocks are segments. Only a tool's message and the last message of the user
    may hold a set as text: system prompts and histories are somebody's words.
    """
    return [
        Turn(_ROLES.get(each.role, each.role.value), tuple(_parts(each, is_last=place == len(messages))))
        for place, each in enumerate(messages, start=1)
    ]


def _parts(message: ChatMessage, *, is_last: bool) -> Iterator[Any]:
    may_be_set = message.role.value in ("tool", "function") or (is_last and message.role == MessageRole.USER)
    previous: object = None
    for block in message.blocks:
        if isinstance(block, TextBlock):
            if isinstance(previous, TextBlock):
                yield "\n"  # as ChatMessage.content joins them
            if message.role in ASSISTANT:
                yield without_marks(block.text)
            elif isinstance(block, SlotBlock):
                yield from block._parts
            else:
                yield Part(block.text, "finished", block=block) if may_be_set else block.text
        elif isinstance(block, CitableBlock):
            yield _citable_segment(block)
        elif isinstance(block, DocumentBlock) and (block.document_mimetype or "").startswith("text/"):
            yield Segment(block.resolve_document().read().decode("utf-8"), title=block.title or None)
        else:
            yield block
        previous = block


def _citable_segment(block: CitableBlock) -> Segment:
    texts = [each.text for each in block.content if isinstance(each, TextBlock)]
    if len(texts) < len(block.content):
        other = next(each for each in block.content if not isinstance(each, TextBlock))
        raise InvalidPrompt(
            f"expected text blocks in a citable block, got a block of type {other.block_type!r}",
            hint="The model takes text only. Put the text of the source into a TextBlock.",
        )
    score = block.score if isinstance(block, SegmentBlock) else None
    return Segment("\n".join(texts), title=block.title or None, score=score)


def chat_messages(turns: Sequence[Turn], messages: Sequence[ChatMessage]) -> list[Message]:
    """Convert turns for `render_chat`; adjacent turns of one role are merged, except results of tools.

    Messages say what was called, and which call a result belongs to. Cache points, thinking and citations are left out.
    """
    converted: list[dict[str, Any]] = []
    for turn, message in zip(turns, messages, strict=True):
        content, fields = list(_read(turn.parts)), _tool_fields(message)
        if converted and converted[-1]["role"] == turn.role != "tool":
            last = converted[-1]
            last["content"] += ["\n\n", *content] if content and last["content"] else content
            if fields:
                last["tool_calls"] = [*last.get("tool_calls", ()), *fields["tool_calls"]]
        else:
            converted.append({"role": turn.role, "content": content, **fields})
    return list(converted)


def _read(parts: Sequence[Any]) -> Iterator[str | Segment | SegmentSet]:
    for part in parts:
        if isinstance(part, str | Segment | SegmentSet):
            yield part
        elif not isinstance(part, CachePoint | CitationBlock | ThinkingBlock | ToolCallBlock):
            raise InvalidPrompt(
                f"expected text, citable or plain-text document blocks, got a block of type {part.block_type!r}",
                hint="The model takes text only. Remove the block, or describe its content in a TextBlock.",
            )


def _tool_fields(message: ChatMessage) -> dict[str, Any]:
    """Return what a message says of tools, as `render_chat` takes it: in blocks, or else in `additional_kwargs`."""
    said = message.additional_kwargs
    if message.role.value in ("tool", "function"):
        return {name: said[name] for name in ("tool_call_id", "name") if said.get(name) is not None}
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if message.role not in ASSISTANT:
        if blocks:
            raise InvalidPrompt(
                f"expected calls of tools in the assistant's messages, got one in a message of {message.role.value!r}",
                hint="Set the role of the message to assistant.",
            )
        return {}
    calls: list[Mapping[str, Any]] = [
        {"id": block.tool_call_id, "name": block.tool_name, "arguments": block.tool_kwargs} for block in blocks
    ] or [each if isinstance(each, Mapping) else each.model_dump() for each in said.get("tool_calls") or ()]
    return {"tool_calls": calls} if calls else {}
