"""Documents in all the shapes that LangChain carries them in, as segments, and segments as content blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isnan
from numbers import Real
from typing import Any

from invariant_rag.errors import InvalidSegment
from invariant_rag.prompts import mark
from invariant_rag.segments import Segment
from langchain_core.documents import Document
from langchain_core.messages.content import PlainTextContentBlock, create_plaintext_block

BLOCK_TYPE = "text-plain"


def to_segment(value: Any) -> Segment:
    """Return a document as a segment.

    Args:
        value: A `Document`, a `Segment`, a string, a `text-plain` block, or a mapping as a `Document` becomes one in a
            LangGraph checkpoint (`page_content`, `metadata`) or as chat templates know it (`text`, `title`). In a
            `Document`'s metadata, `title` is the title and `score` the retriever's score.

    Raises:
        InvalidSegment: None of these.
    """
    if isinstance(value, Segment | str):
        return Segment.of(value)
    if isinstance(value, Document):
        return _from_metadata(value.page_content, value.metadata)
    if isinstance(value, Mapping):
        if isinstance(value.get("page_content"), str):
            return _from_metadata(value["page_content"], value.get("metadata") or {})
        if isinstance(value.get("text"), str):
            known = {**value, **(value.get("extras") or {})}
            return Segment(value["text"], known.get("title"), known.get("metadata") or {}, known.get("score"))
    raise InvalidSegment(
        f"expected a Document, got {_shown(value)}",
        hint="A segment is a Document, a Segment, a str, or a mapping with `page_content` or `text`: no file, no link.",
    )


def _from_metadata(text: str, metadata: Mapping[str, Any]) -> Segment:
    """Read title and score where they are what the names say; loaders write all sorts of things into metadata."""
    rest = dict(metadata)
    title = rest.pop("title") if isinstance(rest.get("title"), str) and rest["title"] else None
    score = rest.pop("score") if isinstance(rest.get("score"), Real) and not isnan(rest["score"]) else None
    return Segment(text, title, rest, score)


def _shown(value: Any) -> str:
    return f"a mapping of {sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__


def to_segments(values: Iterable[Any]) -> list[Segment]:
    """Return documents as segments, in the order given.

    Raises:
        InvalidSegment: Not a collection of documents.
    """
    if isinstance(values, str | bytes | Mapping | Document | Segment) or not isinstance(values, Iterable):
        raise InvalidSegment(
            f"expected a list of documents, got {_shown(values)}",
            hint="Give the documents themselves, not a text made of them: a text has no boundaries.",
        )
    return [to_segment(value) for value in values]


def to_document(segment: Segment) -> Document:
    """Return a segment as a document: title and score, where there are any, go into the metadata.

    Law: `to_segment` gives the same segment back, unless its title is empty or its metadata has a `title` or `score`.
    """
    if segment.token_ids is not None:
        raise InvalidSegment("expected text: a Document cannot carry token ids")
    known = {"title": segment.title, "score": None if segment.score is None else float(segment.score)}
    metadata = {**segment.metadata, **{name: value for name, value in known.items() if value is not None}}
    return Document(page_content=segment.text, metadata=metadata)


def to_block(segment: Segment) -> PlainTextContentBlock:
    """Return a segment as a content block whose id is its content hash: equal chunks are equal blocks.

    Law: `to_segment` gives the same segment back.
    """
    if segment.token_ids is not None:
        raise InvalidSegment("expected text: a content block cannot carry token ids")
    extras: dict[str, Any] = {"metadata": dict(segment.metadata)} if segment.metadata else {}
    if segment.score is not None:
        extras["score"] = float(segment.score)
    block = create_plaintext_block(segment.text, title=segment.title, id=segment.content_hash)
    if extras:
        block["extras"] = extras
    return block


class Segments(list[Document]):
    """Documents that keep their boundaries where a prompt template turns them into text.

    A plain list of documents enters a template as its Python representation. This one writes its documents with the
    marks that the models of this package read back, whatever the format of the template.
    """

    def __str__(self) -> str:
        return "".join(mark(to_segment(document)) for document in self)

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)
