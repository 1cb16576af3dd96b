"""Documents and messages of LangChain as segments and turns of the core, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, repeat
from math import isnan
from numbers import Real
from operator import attrgetter
from typing import Any

from invariant_rag.errors import InvalidPrompt, InvalidSegment
from invariant_rag.prompts import Message, Turn, mark_set
from invariant_rag.prompts.turns import merge_texts
from invariant_rag.segments import Segment, SegmentSet, Slot, document_rendering
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, ToolMessage, message_chunk_to_message

BLOCK_TYPE = "text-plain"
"""Type of the content blocks that carry segments. Their `extras` say `"segment": True`; those of uploads do not."""

DOCUMENT_ID = "langchain_document_id"
"""Metadata key under which a segment keeps the id of its document."""

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}
_NO_TEXT = "expected a segment with text, got one with token ids, which LangChain cannot hold"


def as_document(value: object) -> Document | None:
    """Return a document, also from a mapping as `dumpd` and JSON have it, or a pair with a distance; else None."""
    if isinstance(value, Document):
        return value
    if isinstance(value, list | tuple):
        return as_document(value[0]) if len(value) == 2 and isinstance(value[1], Real) else None
    fields = value.get("kwargs", value) if isinstance(value, Mapping) and value.get("lc") else value
    if not isinstance(fields, Mapping) or not isinstance(fields.get("page_content"), str):
        return None
    id_, metadata = fields.get("id"), fields.get("metadata")
    return Document(
        page_content=fields["page_content"],
        metadata=dict(metadata) if isinstance(metadata, Mapping) else {},
        id=id_ if isinstance(id_, str) else None,
    )


def document_list(value: object) -> list[Document]:
    """Return the documents of a list that holds nothing else; an empty list for any other value."""
    documents = [as_document(each) for each in value] if isinstance(value, list | tuple) else []
    return [] if None in documents else [each for each in documents if each is not None]


def to_segment(value: Any) -> Segment:
    """Convert a document, a string, a content block, or a mapping with `text`; or raise `InvalidSegment`.

    In a `Document`'s metadata, `title` is the title and `score` the retriever's score.
    """
    if isinstance(value, SegmentBlock):
        return value.segment
    if isinstance(value, Segment | str):
        return Segment.of(value)
    if (document := value if isinstance(value, Document) else as_document(value)) is not None:
        rest = dict(document.metadata)
        if document.id is not None:
            rest[DOCUMENT_ID] = document.id
        # Loaders may store something else under these names, which stays in the metadata.
        title = rest.pop("title") if isinstance(rest.get("title"), str) and rest["title"] else None
        score = rest.pop("score") if isinstance(rest.get("score"), Real) and not isnan(rest["score"]) else None
        return Segment(document.page_content, title, rest, score)
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        fields = {**value, **(value.get("extras") or {})}
        return Segment(value["text"], fields.get("title"), fields.get("metadata") or {}, fields.get("score"))
    raise InvalidSegment(
        f"expected a Document, got {_describe(value)}",
        hint="A segment is a Document, a Segment, a str, or a mapping with `page_content` or `text`: no file, no link.",
    )


def _describe(value: Any) -> str:
    return f"a mapping of {sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__


def to_segments(values: Iterable[Any]) -> list[Segment]:
    """Convert a collection of documents to segments, in input order, or raise `InvalidSegment`."""
    if isinstance(values, str | bytes | Mapping | Document | Segment) or not isinstance(values, Iterable):
        raise InvalidSegment(
            f"expected a list of documents, got {_describe(values)}",
            hint="Pass the documents instead of one string with their text, which has no segment boundaries.",
        )
    return list(map(to_segment, values))


def given_segments(documents: Iterable[Any] | None) -> list[Segment]:
    """Return the documents of a `documents=` keyword: no iterator, which can be read only once."""
    if isinstance(documents, Iterator):
        raise InvalidSegment(
            f"expected a list of documents, got a {type(documents).__name__}",
            hint="It can be read once, and LangChain may call several times. Pass list(documents).",
        )
    return [] if documents is None else to_segments(documents)


def to_document(segment: Segment) -> Document:
    """Convert a segment with text to a document, with its title and score in the metadata."""
    if segment.token_ids is not None:
        raise InvalidSegment(_NO_TEXT)
    fields = {"title": segment.title, "score": None if segment.score is None else float(segment.score)}
    metadata = {**segment.metadata, **{name: value for name, value in fields.items() if value is not None}}
    return Document(page_content=segment.text, id=metadata.pop(DOCUMENT_ID, None), metadata=metadata)


class SegmentBlock(dict[str, Any]):
    """A content block with its segment, which need not be parsed again."""

    segment: Segment


def to_block(segment: Segment) -> SegmentBlock:
    """Convert a segment with text to a `text-plain` content block. Its id is the content hash."""
    if segment.token_ids is not None:
        raise InvalidSegment(_NO_TEXT)
    extras: dict[str, Any] = {"segment": True}
    if segment.metadata:
        extras["metadata"] = dict(segment.metadata)
    if segment.score is not None:
        extras["score"] = float(segment.score)
    title = {} if segment.title is None else {"title": segment.title}
    block = SegmentBlock(type=BLOCK_TYPE, mime_type="text/plain", text=segment.text, **title)
    block.update(id=segment.content_hash, extras=extras)
    block.segment = segment
    return block


def is_segment_block(block: object) -> bool:
    """Return whether a content block is a segment: one of text whose `extras` say `"segment": True`."""
    if not isinstance(block, Mapping) or block.get("type") not in (BLOCK_TYPE, "text"):
        return False
    return (block.get("extras") or {}).get("segment") is True


class Segments(list[Document]):
    """A list of documents that templates (f-string, mustache, jinja2) format as marked segments.

    The models of this package parse the marks. Slices and sums are segments, too.
    """

    def __str__(self) -> str:
        return mark_set(map(to_segment, self))

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        return Segments(item) if isinstance(index, slice) else item

    def __add__(self, other: list[Any]) -> Segments:  # type: ignore[override]
        return Segments(super().__add__(other))

    def __radd__(self, other: list[Any]) -> Segments:
        return Segments([*other, *self])

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class BlockText(str):  # noqa: SLOT000 - it has an attribute
    """The text of a content block that says more than its text, such as `cache_control`."""

    block: Mapping[str, Any]


def to_turn(message: BaseMessage) -> Turn:
    """Return a message as a turn of texts, segments, and other content blocks: of an assistant, without the last."""
    if isinstance(message, AIMessage):
        blocks = [message.content] if isinstance(message.content, str) else message.content
        parts = [part for part in map(_part, blocks) if isinstance(part, str | Segment)]
        return Turn("assistant", tuple(merge_texts(parts)))
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

    A set becomes one block for each segment, with the text of its slots between; `sort` puts them in canonical order.
    """
    if len(parts) == 1 and type(parts[0]) is str:
        return parts[0]
    blocks: list[Any] = []
    for part in parts:
        if isinstance(part, SegmentSet):
            listed = list(part)
            alike = len(listed) > len({*map(attrgetter("text"), listed)})  # else the text, their first field, decides
            if sort:
                listed.sort(key=attrgetter("canonical_key" if alike else "text"))
            for segment, slot in zip(listed, part.slots or repeat(Slot()), strict=False):
                around = (slot.before, to_block(segment), slot.after)
                blocks += filter(None, around)
        else:
            blocks.append(part.block if isinstance(part, BlockText) else part)
    return [{"type": "text", "text": each} if isinstance(each, str) else each for each in blocks]


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
    chat: list[dict[str, Any]] = []
    for message, turn in zip(messages, turns, strict=True):
        converted = _convert(message, turn)
        previous: dict[str, Any] = chat[-1] if chat else {"role": None}
        if turn.role == "assistant" and not converted["content"] and "tool_calls" not in converted:
            continue
        if previous["role"] == turn.role != "tool" and "tool_calls" not in previous:
            gap = ["\n"] if previous["content"] and converted["content"] else []
            chat[-1] = {**previous, **converted, "content": [*previous["content"], *gap, *converted["content"]]}
        else:
            chat.append(converted)
    if not chat:
        raise InvalidPrompt("expected at least one message, got none")
    for each in reversed(chat):
        if each["role"] == "user":
            return list(chat), "".join([part for part in each["content"] if isinstance(part, str)]).strip()
    return list(chat), ""


def _convert(message: BaseMessage, turn: Turn) -> dict[str, Any]:
    content = [part if isinstance(part, str | Segment | SegmentSet) else _upload(part) for part in turn.parts]
    converted: dict[str, Any] = {"role": turn.role, "content": content}
    if isinstance(message, AIMessage):
        if message.tool_calls:
            converted["tool_calls"] = list(message.tool_calls)
        if reasoning := message.additional_kwargs.get("reasoning_content"):
            converted["reasoning_content"] = reasoning  # many templates write that of the calls before the answer
    elif isinstance(message, ToolMessage):
        converted["tool_call_id"] = message.tool_call_id
        if message.name:
            converted["name"] = message.name
        if message.status == "error" and not turn.text.lstrip().lower().startswith("error"):
            converted["content"].insert(0, "Error: ")  # chat templates have no other way to say it
    return converted


def _upload(part: Any) -> str:
    """Return the text of an upload, whose position is the user's; no other block has a text."""
    if isinstance(part, dict) and part.get("type") == BLOCK_TYPE and isinstance(part.get("text"), str):
        return document_rendering(to_segment(part))
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InvalidPrompt(
        f"expected text and documents, got a content block of type {kind!r}",
        hint="The model takes text only. Pass documents as segments: documents=, SegmentsPlaceholder.",
    )
