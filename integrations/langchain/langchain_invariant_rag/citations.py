"""Citations of an answer, as the annotations that LangChain has for them."""

from __future__ import annotations

import re

from invariant_rag.generation.citations import CitedSpan
from langchain_core.messages.content import Citation

from langchain_invariant_rag.documents import DOCUMENT_ID

_URL = re.compile(r"\w+://\S+")


def citation_of(span: CitedSpan) -> Citation:
    """Return a part of an answer that has a source: a sentence that a segment contains, or the label of one."""
    segment = span.segment
    metadata = dict(segment.metadata)
    extras = {"id": segment.content_hash, "metadata": metadata}
    if DOCUMENT_ID in metadata:
        extras["document_id"] = metadata.pop(DOCUMENT_ID)
    citation = Citation(
        type="citation",
        start_index=span.start,
        end_index=span.end,
        cited_text=segment.text,
        extras=extras,
    )
    source = next((each for each in map(segment.metadata.get, ("url", "source")) if isinstance(each, str)), "")
    if _URL.fullmatch(source):
        citation["url"] = source
    if title := segment.title or source:
        citation["title"] = title
    return citation
