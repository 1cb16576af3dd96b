"""Convert LangChain documents to segments, and segments to documents and content blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isnan
from numbers import Real
from typing import Any, SupportsIndex, overload

from invariant_rag.errors import InvalidSegment
from invariant_rag.prompts import mark_set
from invariant_rag.segments import Segment
from langchain_core.documents import Document

BLOCK_TYPE = "text-plain"
"""Type of the content blocks that carry segments. Their `extras` say `"segment": True`; those of uploads do not."""

DOCUMENT_ID = "langchain_document_id"
"""Metadata key under which a segment keeps the id of its document."""


def as_document(value: object) -> Document | None:
    """Return a document; None for anything else.

    A mapping is one as `model_dump`, `dumpd` and JSON have it. So is a pair of a document and a number, as
    `similarity_search_with_score` returns it; the number is left out, because it may be a distance.
    """
    if isinstance(value, list | tuple):
        return as_document(value[0]) if len(value) == 2 and isinstance(value[1], Real) else None
    if isinstance(value, Document) or not isinstance(value, Mapping):
        return value if isinstance(value, Document) else None
    fields = value.get("kwargs") if value.get("lc") and value.get("type") == "constructor" else value
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
    found = []
    for each in value if isinstance(value, list | tuple) else ():
        if (document := as_document(each)) is None:
            return []
        found.append(document)
    return found


def to_segment(value: Any) -> Segment:
    """Convert a document to a segment.

    Args:
        value: A `Document`, what else `as_document` takes for one, a `Segment`, a string, a `text-plain` content block,
            or a mapping with `text` and `title` (a document of a chat template). In a `Document`'s metadata, `title` is
            the title and `score` the retriever's score.

    Raises:
        InvalidSegment: `value` is none of these.
    """
    if isinstance(value, SegmentBlock):
        return value.segment
    if isinstance(value, Segment | str):
        return Segment.of(value)
    if (document := as_document(value)) is not None:
        return _segment_from(document)
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        fields = {**value, **(value.get("extras") or {})}
        return Segment(value["text"], fields.get("title"), fields.get("metadata") or {}, fields.get("score"))
    raise InvalidSegment(
        f"expected a Document, got {_describe(value)}",
        hint="A segment is a Document, a Segment, a str, or a mapping with `page_content` or `text`: no file, no link.",
    )


def _segment_from(document: Document) -> Segment:
    """Take title and score out of the metadata if they have the right type; loaders may store other values there."""
    rest = dict(document.metadata)
    if document.id is not None:
        rest[DOCUMENT_ID] = document.id
    title = rest.pop("title") if isinstance(rest.get("title"), str) and rest["title"] else None
    score = rest.pop("score") if isinstance(rest.get("score"), Real) and not isnan(rest["score"]) else None
    return Segment(document.page_content, title, rest, score)


def _describe(value: Any) -> str:
    return f"a mapping of {sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__


def to_segments(values: Iterable[Any]) -> list[Segment]:
    """Convert documents to segments, in input order.

    Raises:
        InvalidSegment: `values` is not a collection of documents.
    """
    if isinstance(values, str | bytes | Mapping | Document | Segment) or not isinstance(values, Iterable):
        raise InvalidSegment(
            f"expected a list of documents, got {_describe(values)}",
            hint="Pass the documents instead of one string with their text, which has no segment boundaries.",
        )
    return [to_segment(value) for value in values]


def to_document(segment: Segment) -> Document:
    """Convert a segment to a document, with its title and score in the metadata.

    Law: `to_segment` restores the segment, unless its title is empty or its metadata has a `title` or `score`.

    Raises:
        InvalidSegment: The segment holds token ids.
    """
    if segment.token_ids is not None:
        raise InvalidSegment("expected a segment with text, got one with token ids, which a Document cannot hold")
    fields = {"title": segment.title, "score": None if segment.score is None else float(segment.score)}
    metadata = {**segment.metadata, **{name: value for name, value in fields.items() if value is not None}}
    return Document(page_content=segment.text, id=metadata.pop(DOCUMENT_ID, None), metadata=metadata)


class SegmentBlock(dict[str, Any]):
    """A content block of a segment, which need not be parsed again.

    Attributes:
        segment: The segment.
    """

    segment: Segment


def to_block(segment: Segment, set_index: int | None = None, slot: Mapping[str, Any] | None = None) -> SegmentBlock:
    """Convert a segment to a `text-plain` content block.

    Its id is the content hash, so that equal chunks give equal blocks and LangChain's cache finds them.

    Law: `to_segment` restores the segment, also from a plain dict of the block.

    Args:
        segment: The segment.
        set_index: Which set of its message it belongs to; None: that of its neighbours.
        slot: The text around its place in the set.

    Raises:
        InvalidSegment: The segment holds token ids.
    """
    if segment.token_ids is not None:
        raise InvalidSegment("expected a segment with text, got one with token ids, which a content block cannot hold")
    fields = {
        "metadata": dict(segment.metadata) or None,
        "score": None if segment.score is None else float(segment.score),
        "set": set_index,
        "slot": slot,
    }
    extras = {"segment": True, **{name: value for name, value in fields.items() if value is not None}}
    title = {} if segment.title is None else {"title": segment.title}
    block = SegmentBlock(
        type=BLOCK_TYPE,
        mime_type="text/plain",
        text=segment.text,
        **title,
        id=segment.content_hash,
        extras=extras,
    )
    block.segment = segment
    return block


def is_segment_block(block: object) -> bool:
    """Return whether a content block is a segment: one of text whose `extras` say `"segment": True`."""
    if not isinstance(block, Mapping):
        return False
    extras = block.get("extras") or {}
    return block.get("type") in (BLOCK_TYPE, "text") and extras.get("segment") is True


class Segments(list[Document]):
    """A list of documents that prompt templates format as marked segments.

    A template formats a plain list of documents as its `repr`. This list formats to text with segment markers, which
    the models of this package parse, in f-string, mustache and jinja2 templates. Slices, sums and copies are segments,
    too.
    """

    def __str__(self) -> str:
        return mark_set(map(to_segment, self))

    @overload
    def __getitem__(self, index: SupportsIndex) -> Document: ...

    @overload
    def __getitem__(self, index: slice) -> Segments: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Document | Segments:
        found = super().__getitem__(index)
        return Segments(found) if isinstance(index, slice) else found  # type: ignore[arg-type, return-value]

    def __add__(self, other: list[Any]) -> Segments:  # type: ignore[override]
        return Segments(super().__add__(other))

    def __radd__(self, other: list[Any]) -> Segments:
        return Segments([*other, *self])

    def __mul__(self, times: SupportsIndex) -> Segments:
        return Segments(super().__mul__(times))

    def copy(self) -> Segments:
        """Return a copy."""
        return Segments(self)

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)
