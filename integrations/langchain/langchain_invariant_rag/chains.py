"""A documents chain with the interface of LangChain's `create_stuff_documents_chain`, one segment per document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from invariant_rag.errors import InvalidPrompt
from invariant_rag.segments import Segment
from langchain_core.language_models import LanguageModelLike
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import BasePromptTemplate, format_document
from langchain_core.runnables import Runnable, RunnablePassthrough

from langchain_invariant_rag.documents import Segments, to_document, to_segments


def create_invariant_documents_chain(
    llm: LanguageModelLike,
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[str] | None = None,
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], Any]:
    """Create a chain that answers from a list of documents, one segment per document.

    It replaces `create_stuff_documents_chain`, for example in `create_retrieval_chain`.

    Args:
        llm: `ChatInvariant` or `InvariantLLM`, also after `bind`.
        prompt: A prompt with a variable for the documents: a `SegmentsPlaceholder`, or `{context}` in a text.
        output_parser: Parser of the answer; default: `StrOutputParser`.
        document_prompt: Template for the text of a segment; default: the document's content and title.
        document_variable_name: Name of the variable for the documents.

    Raises:
        InvalidPrompt: The prompt does not have that variable.
    """
    if document_variable_name not in prompt.input_variables:
        raise InvalidPrompt(
            f"expected the prompt to have the variable {document_variable_name!r}, got {prompt.input_variables}",
            hint="Put SegmentsPlaceholder(name) or {name} into the prompt, or give document_variable_name.",
        )

    def format_segment(segment: Segment) -> Segment:
        if document_prompt is None:
            return segment
        return Segment(format_document(to_document(segment), document_prompt), score=segment.score)

    def segments(inputs: Mapping[str, Any]) -> Segments:
        return Segments(to_document(format_segment(each)) for each in to_segments(inputs[document_variable_name]))

    with_segments = RunnablePassthrough.assign(**{document_variable_name: segments}).with_config(
        run_name="format_inputs"
    )
    chain: Runnable[dict[str, Any], Any] = with_segments | prompt | llm | (output_parser or StrOutputParser())
    return chain.with_config(run_name="invariant_documents_chain")
