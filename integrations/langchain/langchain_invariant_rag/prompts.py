"""Prompt templates that keep documents apart: a placeholder for chat prompts, and a `document_prompt`."""

from __future__ import annotations

from typing import Any

from invariant_rag.prompts import mark
from invariant_rag.segments import Segment
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.prompts.message import BaseMessagePromptTemplate

from langchain_invariant_rag.documents import to_block, to_segments


class SegmentsPlaceholder(BaseMessagePromptTemplate):
    """A placeholder in a chat prompt for a list of documents: one human message, one content block per document.

    The models of this package merge it with an adjacent human message. Providers differ in what they make of content
    blocks with documents, and some refuse them: `canonical(model)` writes them as plain text for any of them.

    Example:
        ```python
        ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])
        ```
    """

    variable_name: str
    """Name of the variable that holds the documents."""

    def __init__(self, variable_name: str, **kwargs: Any) -> None:
        # A positional name, as in MessagesPlaceholder; the base class takes keywords only.
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
        """Return one message with a block per document, or no message without documents.

        Raises:
            InvalidSegment: The variable is not a list of documents.
        """
        segments = to_segments(kwargs[self.variable_name])
        return [HumanMessage(content=[to_block(segment) for segment in segments])] if segments else []

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
"""Keeps segment boundaries in LangChain's stuff chain and retriever tool, which join documents into one text:
`create_stuff_documents_chain(llm, prompt, document_prompt=SEGMENT_PROMPT)`. Titles need
`create_invariant_documents_chain`: the stuff chain passes titles on only if every document has one."""
