"""Messages of LangChain as the core's turns, for recognition, and as the core's messages, for a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, repeat
from operator import attrgetter
from typing import Any

from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import Message, Turn
from invariant_rag.prompts.turns import merge_texts
from invariant_rag.segments import Segment, SegmentSet, Slot, document_rendering
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    ToolMessage,
    message_chunk_to_message,
)

from langchain_invariant_rag.documents import BLOCK_TYPE, is_segment_block, to_block, to_segment

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}


class BlockText(str):  # noqa: SLOT000 - it has an attribute
    """The text of a content block that says more than its text, such as `cache_control`."""

    block: Mapping[str, Any]


def to_turn(message: BaseMessage) -> Turn:
    """Return a message as a turn of texts, segments, and other content blocks: of an assistant, without the last."""
    if isinstance(message, AIMessage):
        blocks = [message.content] if isinstance(message.content, str) else message.content
        said = [part for part in map(_part, blocks) if isinstance(part, str | Segment)]
        return Turn("assistant", tuple(merge_texts(said)))
    message = message_chunk_to_message(message)
    role = message.role if isinstance(message, ChatMessage) else _ROLES.get(message.type)
    if role is None:
        raise InvalidPrompt(f"expected a message of type {', '.join(sorted(_ROLES))}, got {message.type!r}")
    content = message.content
    return Turn(role, (content,) if isinstance(content, str) else tuple(map(_part, content)))


def _part(block: str | Mapping[str, Any]) -> Any:
    if is_segment_block(block):
        return to_segment(block)
    if isinstance(block, str) or block.get("type") != "text":
        return block
    if set(block) <= {"type", "text", "id"}:
        return block["text"]
    text = BlockText(block["text"])
    text.block = block
    return text


def to_content(parts: Sequence[Any], *, sort: bool = False) -> Any:
    """Return the parts of a turn as the content of a message: one text as a string, else content blocks.

    A set becomes one block for each segment, with the text of its slots between; with `sort` they are listed by
    content, so that the same set in another order gives an equal message.
    """
    if len(parts) == 1 and type(parts[0]) is str:
        return parts[0]
    blocks: list[Any] = []
    for part in parts:
        if isinstance(part, SegmentSet):
            listed = sorted(part, key=attrgetter("canonical_key")) if sort else part
            for segment, slot in zip(listed, part.slots or repeat(Slot()), strict=False):
                around = (slot.before, to_block(segment), slot.after)
                blocks += filter(None, around)
        else:
            blocks.append(part.block if isinstance(part, BlockText) else part)
    for index, block in enumerate(blocks):
        if isinstance(block, str):
            blocks[index] = {"type": "text", "text": block}
    return blocks


def in_order_of_calls(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return messages with the results of parallel calls in the order of the calls: tools may end in any order."""
    ordered: list[BaseMessage] = []
    calls: list[str | None] = []
    for kind, run in groupby(messages, type):
        members: list[Any] = list(run)
        if kind is ToolMessage:
            members.sort(key=lambda each: calls.index(each.tool_call_id) if each.tool_call_id in calls else len(calls))
        calls = [call["id"] for call in members[-1].tool_calls] if issubclass(kind, AIMessage) else []
        ordered += members
    return ordered


def chat_messages(messages: Sequence[BaseMessage], turns: Iterable[Turn]) -> tuple[list[Message], str]:
    """Return what a chat template gets, and the text of the last user message: the query of relevance orderings.

    Adjacent messages of one role are merged, but for results of tools. Messages of the assistant without text and calls
    are left out.
    """
    found: list[dict[str, Any]] = []
    for message, turn in zip(messages, turns, strict=True):
        converted = _convert(message, turn)
        before: dict[str, Any] = found[-1] if found else {"role": None}
        if turn.role == "assistant" and not converted["content"] and "tool_calls" not in converted:
            continue
        if before["role"] == turn.role != "tool" and "tool_calls" not in before:
            gap = ["\n"] if before["content"] and converted["content"] else []
            found[-1] = {**before, **converted, "content": [*before["content"], *gap, *converted["content"]]}
        else:
            found.append(converted)
    if not found:
        raise InvalidPrompt("expected at least one message, got none")
    for each in reversed(found):
        if each["role"] == "user":
            return list(found), "".join([part for part in each["content"] if isinstance(part, str)]).strip()
    return list(found), ""


def _convert(message: BaseMessage, turn: Turn) -> dict[str, Any]:
    content = list(turn.parts)
    for index, part in enumerate(content):
        if not isinstance(part, str | Segment | SegmentSet):
            content[index] = _upload(part)
    converted: dict[str, Any] = {"role": turn.role, "content": content}
    if isinstance(message, AIMessage):
        if message.tool_calls:
            converted["tool_calls"] = list(message.tool_calls)
        if reasoning := message.additional_kwargs.get("reasoning_content"):
            converted["reasoning_content"] = reasoning  # many templates write that of the calls before the answer
    elif isinstance(message, ToolMessage | FunctionMessage):
        if isinstance(message, ToolMessage):
            converted["tool_call_id"] = message.tool_call_id
        if message.name:
            converted["name"] = message.name
        if getattr(message, "status", None) == "error" and not turn.text.lstrip().lower().startswith("error"):
            converted["content"].insert(0, "Error: ")  # chat templates have no other way to say it
    return converted


def _upload(part: Any) -> str:
    """Return the text of an upload, whose place is the user's; no other block has a text."""
    if isinstance(part, dict) and part.get("type") == BLOCK_TYPE and isinstance(part.get("text"), str):
        return document_rendering(to_segment(part))
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InvalidPrompt(
        f"expected text and documents, got a content block of type {kind!r}",
        hint="The model takes text only. Pass documents as segments: documents=, SegmentsPlaceholder.",
    )
