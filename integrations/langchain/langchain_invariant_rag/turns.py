"""Turns of conversations, as messages of LangChain carry them: texts, segments, sets of segments, and other blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import Turn
from invariant_rag.segments import Field, SegmentSet, Slot
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, ToolMessage, message_chunk_to_message

from langchain_invariant_rag.documents import is_segment_block, to_block, to_segment

_TEXT_KEYS = {"type", "text", "id"}
_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}


def to_turns(messages: Sequence[BaseMessage]) -> list[Turn]:
    """Return messages as turns: texts, segments, sets whose blocks say so, and any other content block.

    Of what the assistant said only the text is a part.

    Raises:
        InvalidPrompt: A message is of no known type.
    """
    return [_to_turn(message_chunk_to_message(message)) for message in messages]  # an answer may come as a chunk


def in_order_of_calls(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return messages in which the results of parallel calls stand in the order of the calls.

    Results belong to calls by their ids, and tools that run at the same time may end in any order.
    """
    ordered: list[BaseMessage] = []
    calls: list[str | None] = []
    for kind, run in groupby(messages, type):
        members: list[Any] = list(run)
        if kind is ToolMessage:
            members.sort(key=lambda each: calls.index(each.tool_call_id) if each.tool_call_id in calls else len(calls))
        calls = [call["id"] for call in members[-1].tool_calls] if issubclass(kind, AIMessage) else []
        ordered += members
    return ordered


def _to_turn(message: BaseMessage) -> Turn:
    if isinstance(message, AIMessage):
        return Turn("assistant", (message.text,) if message.text else ())
    if isinstance(message, ChatMessage):
        return Turn(message.role, tuple(_parts(message.content)))
    if message.type not in _ROLES:
        raise InvalidPrompt(f"expected a message of type {', '.join(sorted(_ROLES))}, got {message.type!r}")
    return Turn(_ROLES[message.type], tuple(_parts(message.content)))


def _parts(content: str | Sequence[str | Mapping[str, Any]]) -> Iterator[Any]:
    """Yield the texts, segments, sets and other blocks of a content."""
    if isinstance(content, str):
        yield content
        return
    for index, members in groupby(content, key=_set_of):
        if index is None:
            yield from map(_part, members)
        else:
            blocks = [each for each in members if isinstance(each, Mapping)]
            slots = [each["extras"].get("slot") for each in blocks]
            yield SegmentSet(map(to_segment, blocks), slots=None if None in slots else map(_to_slot, slots))


class BlockText(str):  # noqa: SLOT000 - it has an attribute
    """The text of a content block that says more than its text, such as `cache_control`.

    Attributes:
        block: The block.
    """

    block: Mapping[str, Any]


def _part(block: str | Mapping[str, Any]) -> Any:
    if isinstance(block, str):
        return block
    if is_segment_block(block):
        return to_segment(block)
    if block.get("type") == "text":
        if set(block) <= _TEXT_KEYS:
            return block["text"]
        text = BlockText(block["text"])
        text.block = block
        return text
    return block


def _set_of(block: object) -> int | None:
    """Return the index of the set that a block belongs to; None if it does not say."""
    return block["extras"].get("set") if isinstance(block, Mapping) and is_segment_block(block) else None


def to_block_of(part: Any) -> Any:
    """Return a part of a turn as a content block."""
    if isinstance(part, str):
        return part.block if isinstance(part, BlockText) else {"type": "text", "text": part}
    return part


def with_turns(
    messages: Sequence[BaseMessage], before: Sequence[Turn], turns: Sequence[Turn], *, sort: bool
) -> list[BaseMessage]:
    """Return messages with the contents of turns, in which every set is a run of content blocks.

    Messages without a set stay as they are.

    Args:
        messages: The messages.
        before: Their turns.
        turns: Their turns, recognised.
        sort: Whether to list segments by content, so that the same set in another order gives equal messages.
    """
    return [
        message if after == given else message.model_copy(update={"content": _content(after.parts, sort=sort)})
        for message, given, after in zip(messages, before, turns, strict=True)
    ]


def _content(parts: Sequence[Any], *, sort: bool) -> Any:
    """Return parts as the content of a message: one text alone as a string."""
    return parts[0] if len(parts) == 1 and type(parts[0]) is str else list(_blocks(parts, sort=sort))


def _blocks(parts: Iterable[Any], *, sort: bool) -> Iterator[Any]:
    for index, part in enumerate(parts):
        if isinstance(part, SegmentSet):
            listed = sorted(part, key=attrgetter("canonical_key")) if sort else part
            slots = [None] * len(part) if part.slots is None else map(_plain_slot, part.slots)
            yield from [to_block(each, index, slot) for each, slot in zip(listed, slots, strict=True)]
        else:
            yield to_block_of(part)


def _plain_slot(slot: Slot) -> dict[str, Any]:
    around = {
        name: [{"field": each.key} if isinstance(each, Field) else each for each in pieces]
        for name, pieces in (("before", slot.before), ("after", slot.after))
    }
    return {**around, "number": slot.number}


def _to_slot(plain: Mapping[str, Any]) -> Slot:
    before, after = (
        tuple(Field(each["field"]) if isinstance(each, Mapping) else each for each in plain[name])
        for name in ("before", "after")
    )
    return Slot(before, after, plain["number"])
