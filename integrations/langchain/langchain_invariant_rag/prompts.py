"""Prompts that keep documents separate: a placeholder for chat prompts, a `document_prompt`, and a documents chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from invariant_rag.checks import check_kind
from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import mark
from invariant_rag.segments import Segment
from langchain_core.language_models import LanguageModelLike
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, format_document
from langchain_core.prompts.message import BaseMessagePromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from langchain_invariant_rag.documents import Segments, to_block, to_document, to_segments


class SegmentsPlaceholder(BaseMessagePromptTemplate):
    """A placeholder in a chat prompt for a list of documents: one human message, one content block per document.

    Example:
        ```python
        ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])
        ```
    """

    variable_name: str
    """Name of the variable that holds the documents."""

    def __init__(self, variable_name: str, **kwargs: Any) -> None:
        super().__init__(**{"variable_name": variable_name, **kwargs})

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Return the module path for LangChain's serialization."""
        return ["langchain_invariant_rag", "prompts"]

    @property
    def input_variables(self) -> list[str]:
        """The variable's name."""
        return [self.variable_name]

    def format_messages(self, **kwargs: Any) -> list[BaseMessage]:
        """Return one message with a block per document, or no message without documents."""
        segments = to_segments(kwargs[self.variable_name])
        return [HumanMessage(content=list(map(to_block, segments)))] if segments else []

    def pretty_repr(self, html: bool = False) -> str:
        """Return the placeholder as LangChain prints it."""
        return f"{{{self.variable_name}: one segment per document}}"


class SegmentPromptTemplate(PromptTemplate):
    """A `document_prompt` that formats a document as a marked segment, with any text around it."""

    def __add__(self, other: Any) -> SegmentPromptTemplate:
        """Return a template with more text, as LangChain's `+` does; it still marks the document."""
        longer = super().__add__(other)
        return SegmentPromptTemplate(template=longer.template, input_variables=longer.input_variables)

    def format(self, **kwargs: Any) -> str:
        """Return the template with the text of the document between segment markers."""
        return super().format(**{**kwargs, "page_content": mark(Segment(kwargs["page_content"]))})


SEGMENT_PROMPT = SegmentPromptTemplate(template="{page_content}", input_variables=["page_content"])
"""Keeps boundaries where LangChain joins documents: `create_stuff_documents_chain(document_prompt=SEGMENT_PROMPT)`.
It does not write titles; `create_invariant_documents_chain` does."""


def create_invariant_documents_chain(
    llm: LanguageModelLike,
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[str] | None = None,
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], Any]:
    """Create a chain in place of `create_stuff_documents_chain`, with one segment per document.

    Args:
        llm: `ChatInvariant` or `InvariantLLM`, also after `bind`.
        prompt: A prompt with a variable for the documents: a `SegmentsPlaceholder`, or `{context}` in a text.
        output_parser: Parser of the answer; default: `StrOutputParser`.
        document_prompt: Template for the text of a segment; default: the document's content and title.
        document_variable_name: Name of that variable.
    """
    check_kind("prompt", prompt, BasePromptTemplate, error=InvalidPrompt)  # type: ignore[type-abstract]
    if document_variable_name not in prompt.input_variables:
        raise InvalidPrompt(
            f"expected the prompt to have the variable {document_variable_name!r}, got {prompt.input_variables}",
            hint="Put SegmentsPlaceholder(name) or {name} into the prompt, or set document_variable_name.",
        )

    def segments(inputs: Mapping[str, Any]) -> Segments:
        listed = to_segments(inputs[document_variable_name])
        if document_prompt is not None:
            listed = [Segment(format_document(to_document(each), document_prompt), score=each.score) for each in listed]
        return Segments(map(to_document, listed))

    inputs = RunnablePassthrough.assign(**{document_variable_name: segments}).with_config(run_name="format_inputs")
    chain: Runnable[dict[str, Any], Any] = inputs | prompt | llm | (output_parser or StrOutputParser())
    return chain.with_config(run_name="invariant_documents_chain")
