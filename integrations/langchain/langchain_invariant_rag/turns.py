"""Messages of LangChain as turns of a conversation, with segments from blocks, printed documents and tool artifacts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import Turn
from invariant_rag.segments import Field, Segment, SegmentSet, Slot
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, ToolMessage, message_chunk_to_message

from langchain_invariant_rag.document_reprs import split_reprs
from langchain_invariant_rag.documents import BLOCK_TYPE, document_list, to_block, to_segment, to_segments

_TEXT_KEYS = {"type", "text", "id"}
_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}


def to_turns(messages: Sequence[BaseMessage]) -> list[Turn]:
    """Return messages as turns: texts, segments, sets whose blocks say so, and any other content block.

    The result of a tool is its artifact, if that is a list of documents, or else its content. Of what the assistant
    said only the text is a part.

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
    if isinstance(message, ChatMessage):
        return Turn(message.role, tuple(_parts(message.content)))
    if message.type not in _ROLES:
        raise InvalidPrompt(f"expected a message of type {', '.join(sorted(_ROLES))}, got {message.type!r}")
    if isinstance(message, AIMessage):
        return Turn("assistant", (message.text,) if message.text else ())
    if isinstance(message, ToolMessage) and not is_recognized(message.content):
        found = document_list(message.artifact)
        return Turn("tool", tuple(to_segments(found) if found else _parts(message.content)))
    return Turn(_ROLES[message.type], tuple(_parts(message.content)))


def _parts(content: str | Sequence[str | Mapping[str, Any]]) -> Iterator[Any]:
    """Yield the texts, segments, sets and other blocks of a content."""
    blocks = [content] if isinstance(content, str) else content
    for index, members in groupby(blocks, key=_set_of):
        if index is None:
            for block in members:
                yield from _part(block)
        else:
            yield _to_set([block for block in members if isinstance(block, Mapping)])


class BlockText(str):  # noqa: SLOT000 - it has an attribute
    """The text of a content block that says more than its text, such as `cache_control`.

    Attributes:
        block: The block.
    """

    block: Mapping[str, Any]


def _part(block: str | Mapping[str, Any]) -> Iterator[Any]:
    if isinstance(block, str):
        yield from split_reprs(block)
    elif is_segment_block(block):
        yield to_segment(block)
    elif block.get("type") == "text":
        pieces = list(split_reprs(block["text"]))
        yield from [_block_text(block)] if pieces == [block["text"]] and not set(block) <= _TEXT_KEYS else pieces
    else:
        yield block


def _block_text(block: Mapping[str, Any]) -> BlockText:
    text = BlockText(block["text"])
    text.block = block
    return text


def to_block_of(part: Any) -> Any:
    """Return a part of a turn as a content block."""
    if isinstance(part, str):
        return part.block if isinstance(part, BlockText) else {"type": "text", "text": part}
    return part


def with_turns(messages: Sequence[BaseMessage], turns: Sequence[Turn], *, sort: bool) -> list[BaseMessage]:
    """Return messages with the contents of turns, in which every set is a run of content blocks.

    Messages without a set stay as they are, and those whose segments went to a neighbour are left out.

    Args:
        messages: The messages.
        turns: Their turns, recognised.
        sort: Whether to list segments by content, so that the same set in another order gives equal messages. Sets with
            running numbers keep the order given: an answer may name the numbers.
    """
    changed = []
    for message, before, turn in zip(messages, to_turns(messages), turns, strict=True):
        if isinstance(message, AIMessage) or turn == before:
            changed.append(message)
        elif turn.parts:
            changed.append(message.model_copy(update={"content": _content(list(_blocks(turn.parts, sort=sort)))}))
    return changed


def _content(blocks: list[Any]) -> Any:
    """Return blocks as the content of a message: one text alone as a string."""
    alone = len(blocks) == 1 and set(blocks[0]) == {"type", "text"} and blocks[0]["type"] == "text"
    return blocks[0]["text"] if alone else blocks


def _blocks(parts: Iterable[Any], *, sort: bool) -> Iterator[Any]:
    for index, part in enumerate(parts):
        if isinstance(part, SegmentSet):
            yield from _set_blocks(part, index, sort=sort)
        else:
            yield to_block_of(part)


def _set_blocks(segments: SegmentSet, index: int, *, sort: bool) -> Iterator[dict[str, Any]]:
    numbered = segments.slots is not None and any(slot.number for slot in segments.slots)
    listed = sorted(segments, key=lambda each: each.canonical_key) if sort and not numbered else list(segments)
    for place, segment in enumerate(listed):
        block: dict[str, Any] = dict(to_block(segment))
        slot = None if segments.slots is None else _plain_slot(segments.slots[place])
        block["extras"] = {**block.get("extras", {}), "set": index, **({} if slot is None else {"slot": slot})}
        yield block


def _plain_slot(slot: Slot) -> dict[str, Any]:
    around = {
        name: [{"field": each.key} if isinstance(each, Field) else each for each in pieces]
        for name, pieces in (("before", slot.before), ("after", slot.after))
    }
    return {**around, "number": slot.number}


def _to_set(blocks: Sequence[Mapping[str, Any]]) -> SegmentSet:
    slots = [block["extras"].get("slot") for block in blocks]
    segments = [_without_set(block) for block in blocks]
    return SegmentSet(segments, slots=None if None in slots else map(_to_slot, slots))


def _to_slot(plain: Mapping[str, Any]) -> Slot:
    before, after = (
        tuple(Field(each["field"]) if isinstance(each, Mapping) else each for each in plain[name])
        for name in ("before", "after")
    )
    return Slot(before, after, plain["number"])


def _without_set(block: Mapping[str, Any]) -> Segment:
    extras = {name: value for name, value in block["extras"].items() if name not in ("set", "slot")}
    return to_segment({**block, "extras": extras})


def _set_of(block: object) -> int | None:
    """Return the index of the set that a block belongs to; None if it does not say."""
    if not is_segment_block(block) or not isinstance(block, Mapping):
        return None
    index = (block.get("extras") or {}).get("set")
    return index if isinstance(index, int) else None


def is_recognized(content: Any) -> bool:
    """Return whether a content has sets that were recognised before."""
    return not isinstance(content, str) and any(_set_of(block) is not None for block in content)


def is_segment_block(block: object) -> bool:
    """Return whether a content block is a segment: `text-plain`, or `text` with `"segment": True` in its `extras`."""
    if not isinstance(block, Mapping):
        return False
    extras = block.get("extras") or {}
    return block.get("type") == BLOCK_TYPE or (block.get("type") == "text" and extras.get("segment") is True)
