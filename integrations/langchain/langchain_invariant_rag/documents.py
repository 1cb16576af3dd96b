"""Convert LangChain documents to segments, and segments to documents and content blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import isnan
from numbers import Real
from typing import Any

from invariant_rag.errors import InvalidSegment
from invariant_rag.prompts import mark_set
from invariant_rag.segments import Segment
from langchain_core.documents import Document

BLOCK_TYPE = "text-plain"
"""Type of the content blocks that carry segments. Their `extras` say `"segment": True`; those of uploads do not."""

DOCUMENT_ID = "langchain_document_id"
"""Metadata key under which a segment keeps the id of its document."""


_NO_TEXT = "expected a segment with text, got one with token ids, which LangChain cannot hold"


def as_document(value: object) -> Document | None:
    """Return a document, also from a mapping as `model_dump`, `dumpd` and JSON have it; None for anything else.

    Of a pair of a document and a number (`similarity_search_with_score`) the number is left out: it may be a distance.
    """
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
    found = [as_document(each) for each in value] if isinstance(value, list | tuple) else []
    return [] if None in found else [each for each in found if each is not None]


def to_segment(value: Any) -> Segment:
    """Convert a document to a segment, or raise `InvalidSegment`.

    It is a `Document`, what else `as_document` takes for one, a `Segment`, a string, a `text-plain` content block, or a
    mapping with `text` and `title`. In a `Document`'s metadata, `title` is the title and `score` the retriever's score.
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
    """Convert a segment with text to a document, with its title and score in the metadata.

    Law: `to_segment` restores the segment, unless its title is empty or its metadata has a `title` or `score`.
    """
    if segment.token_ids is not None:
        raise InvalidSegment(_NO_TEXT)
    fields = {"title": segment.title, "score": None if segment.score is None else float(segment.score)}
    metadata = {**segment.metadata, **{name: value for name, value in fields.items() if value is not None}}
    return Document(page_content=segment.text, id=metadata.pop(DOCUMENT_ID, None), metadata=metadata)


class SegmentBlock(dict[str, Any]):
    """A content block with its segment, which need not be parsed again."""

    segment: Segment


def to_block(segment: Segment) -> SegmentBlock:
    """Convert a segment with text to a `text-plain` content block. Its id is the content hash.

    Law: `to_segment` restores the segment, also from a plain dict of the block.
    """
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
        found = super().__getitem__(index)
        return Segments(found) if isinstance(index, slice) else found

    def __add__(self, other: list[Any]) -> Segments:  # type: ignore[override]
        return Segments(super().__add__(other))

    def __radd__(self, other: list[Any]) -> Segments:
        return Segments([*other, *self])

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)
