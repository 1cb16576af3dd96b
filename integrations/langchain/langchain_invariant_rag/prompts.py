"""Producers of segments for prompt templates: a placeholder for chat templates, and a prompt for the stock chain."""

from __future__ import annotations

from typing import Any

from invariant_rag.prompts import mark
from invariant_rag.segments import Segment
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.prompts.message import BaseMessagePromptTemplate

from langchain_invariant_rag.documents import to_block, to_segments


class SegmentsPlaceholder(BaseMessagePromptTemplate):
    """A message of a chat template whose content is a variable's documents, one content block for each.

    A model of this package reads it together with what the user says next to it. To other models the blocks are
    documents in plain text.

    Example:
        ```python
        ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])
        ```
    """

    variable_name: str
    """Name of the variable that holds the documents."""

    def __init__(self, variable_name: str, **kwargs: Any) -> None:
        # A name that stands alone, as in MessagesPlaceholder; the base class takes fields only.
        super().__init__(**{"variable_name": variable_name, **kwargs})

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Where the class is found when it is loaded."""
        return ["langchain_invariant_rag", "prompts"]

    @property
    def input_variables(self) -> list[str]:
        """The one variable."""
        return [self.variable_name]

    def format_messages(self, **kwargs: Any) -> list[BaseMessage]:
        """Return one message with a block for each document, or none where there are no documents.

        Raises:
            InvalidSegment: The variable does not hold documents.
        """
        segments = to_segments(kwargs[self.variable_name])
        return [HumanMessage(content=[dict(to_block(segment)) for segment in segments])] if segments else []

    def pretty_repr(self, html: bool = False) -> str:
        """Return a readable form."""
        return f"{{{self.variable_name}: one segment for each document}}"


class SegmentPromptTemplate(PromptTemplate):
    """A `document_prompt` that writes a document with marks around it."""

    def format(self, **kwargs: Any) -> str:
        """Return the text of a document between marks."""
        return mark(Segment(kwargs["page_content"]))


SEGMENT_PROMPT = SegmentPromptTemplate(template="{page_content}", input_variables=["page_content"])
"""Keeps boundaries in LangChain's own chain and retriever tool, which join documents into one text:
`create_stuff_documents_chain(llm, prompt, document_prompt=SEGMENT_PROMPT)`. Titles need
`create_invariant_documents_chain`: the stock chain passes a title on only if every document has one."""
