"""Citations of an answer, as the annotations that LangChain has for them."""

from __future__ import annotations

import re

from invariant_rag.generation.citations import CitedSpan, cite_spans, numbers_of
from invariant_rag.generation.outputs import Generation
from invariant_rag.segments import Prompt
from langchain_core.messages.content import Citation

from langchain_invariant_rag.documents import DOCUMENT_ID

_URL = re.compile(r"\w+://\S+")


def citations_of(text: str, question: str, prompt: Prompt, generation: Generation) -> list[Citation]:
    """Return the citations of an answer: its sentences that a segment contains, and its numbers of segments.

    Args:
        text: The answer, with the numbers of the caller.
        question: The question.
        prompt: The prompt.
        generation: What says which segments were read.
    """
    found = cite_spans(text, question, prompt.segments, generation.order, numbers_of(prompt))
    return [_citation(each) for each in found]


def _citation(span: CitedSpan) -> Citation:
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
