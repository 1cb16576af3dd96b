"""Documents of a request as segments, and what an answer says of them: ids, citations, what was read where."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from invariant_rag.api_models import PlainRequest
from invariant_rag.generation.citations import CitedSpan
from invariant_rag.segments import Prompt, Segment, SegmentSet, Slot
from invariant_rag.server.errors import InvalidRequest
from invariant_rag.server.schemas import Document, SetPart
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from invariant_rag.generation.outputs import Generation

_ID = "id"
"""Key of a segment's metadata under which the id of its document is."""


def segment_of(document: Document | str) -> Segment:
    """Return a document as a segment.

    >>> segment_of(Document(id="a", data={"title": "Ferries", "snippet": "At noon."})).text
    'At noon.'
    """
    if isinstance(document, str):
        return Segment(document)
    metadata = {**document.metadata, **({} if document.id is None else {_ID: document.id})}
    if isinstance(document.data, Mapping):
        title = document.data.get("title")
        heading = document.title or (None if title is None else str(title))
        return Segment(_fields(document.data), title=heading, metadata=metadata, score=document.score)
    text = document.text or document.data or ""
    return Segment(text, title=document.title, metadata=metadata, score=document.score)


def check_ids(segments: SegmentSet) -> None:
    """Check that an id names one document of a set. Other sets may number their documents anew, as turns do."""
    found: dict[str, Segment] = {}
    for segment in segments:
        identifier = document_id(segment)
        if found.setdefault(identifier, segment).content_hash != segment.content_hash:
            raise InvalidRequest(
                f"documents: expected an id for each document of a set, got two that are called {shown(identifier)}",
                param="documents",
                hint="Leave the ids away, or give each document its own.",
            )


def set_of(part: SetPart) -> SegmentSet:
    """Return a set of documents as a set of segments."""
    slots = None if part.slots is None else [Slot(each.before, each.after, each.number) for each in part.slots]
    return SegmentSet(map(segment_of, part.documents), slots=slots)


def _fields(data: Mapping[str, Any]) -> str:
    """Return the fields of a document as text: the only one alone, several by name."""
    fields = {name: str(value) for name, value in data.items() if name != "title" and value is not None}
    if len(fields) == 1:
        return next(iter(fields.values()))
    return "\n".join(f"{name}: {fields[name]}" for name in sorted(fields))


def document_id(segment: Segment) -> str:
    """Return the id of a document: its own, or one that follows from its contents."""
    return str(segment.metadata.get(_ID, f"doc:{segment.content_hash[:12]}"))


def set_key(sets: Iterable[SegmentSet]) -> str:
    """Return a name of the sets of a request that does not depend on the order of their documents.

    Equal requests have equal keys on every machine: a router sends them to the replica that has read the documents.

    >>> set_key([SegmentSet(["a", "b"])]) == set_key([SegmentSet(["b", "a"])]) != set_key([SegmentSet(["a"])])
    True
    """
    hashes = [sorted([segment.content_hash for segment in each]) for each in sets]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:32]


def report_of(generation: Generation, prompt: Prompt, ordering: str, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """Return what was read for an answer, the same for every order in which the documents were listed.

    Returns:
        `method` and `ordering`; `sets`: their sizes; `set_key`; `order`: ids of all documents in physical order,
        farthest from the question first; `dropped` and `trimmed`: ids of those that did not fit; `invariant`: whether
        the order given could not change the answer; `warnings`: why it could all the same.
    """
    ids = [document_id(each) for each in prompt.segments]
    return {
        "method": generation.method,
        "ordering": ordering,
        "sets": list(generation.sets),
        "set_key": set_key(prompt.sets) if ids else None,
        "order": [ids[index] for index in generation.order],
        "dropped": sorted([ids[index] for index in generation.dropped]),
        "trimmed": sorted([ids[index] for index in generation.trimmed]),
        "invariant": generation.invariant and not warnings,
        "warnings": list(warnings),
    }


def report_of_request(request: PlainRequest, method: str, ordering: str, warnings: Sequence[str]) -> dict[str, Any]:
    """Return what was written for a model behind an API, in the words of `report_of`."""
    ledger = request.ledger(method, recognized=ordering != "given" and not warnings)
    order = [document_id(segment) for each in request.sets for segment in each]
    kept = {name: ledger[name] for name in ("method", "sets", "dropped", "trimmed", "invariant")}
    named = {"ordering": ordering, "order": order, "set_key": set_key(request.sets) if order else None}
    return {**kept, **named, "warnings": list(warnings)}


def citations_of(text: str, spans: Iterable[CitedSpan], prompt: Prompt) -> list[dict[str, Any]]:
    """Return the parts of an answer that have a source, in Cohere v2's shape.

    A source has the number of its set, too, from 0: the ids of two sets may be the same.
    """
    found: dict[tuple[int, int], list[CitedSpan]] = {}
    for span in spans:
        found.setdefault((span.start, span.end), []).append(span)
    set_of_segment = [number for number, each in enumerate(prompt.sets) for _ in each] if found else []
    return [
        {
            "start": start,
            "end": end,
            "text": text[start:end],
            "sources": [_source(each.segment, set_of_segment[each.index]) for each in spans],
            "type": "TEXT_CONTENT",
        }
        for (start, end), spans in found.items()
    ]


def _source(segment: Segment, number: int) -> dict[str, Any]:
    identifier = document_id(segment)
    document = {**segment.metadata, "id": identifier, "text": segment.text}
    if segment.title is not None:
        document["title"] = segment.title
    return {"type": "document", "id": identifier, "set": number, "document": document}
