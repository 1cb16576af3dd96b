"""Prompts as the model gets them: tokenization, chat templates, and segments marked inside a string."""

from __future__ import annotations

from invariant_rag.prompts.chat_template import DEFAULT_SYSTEM, Content, Message, question_messages, render_chat
from invariant_rag.prompts.control_tokens import control_tokens, unprotected_tokens, warn_of_unprotected_tokens
from invariant_rag.prompts.markers import has_marks, mark, mark_set, without_marks
from invariant_rag.prompts.order_warnings import FIXES, Finding, holds_documents, report
from invariant_rag.prompts.recognition import Retrieval, find_set
from invariant_rag.prompts.retrievals import (
    Outside,
    RunRetrievals,
    begin_outside,
    forget_outside,
    outside_retrievals,
)
from invariant_rag.prompts.template_format import CallFormat, ReasoningFormat, TemplateFormat, template_format
from invariant_rag.prompts.tokenization import (
    TokenizedPrompt,
    Trusted,
    tokenize_in_slots,
    tokenize_literal,
    tokenize_prompt,
    tokenize_text,
)
from invariant_rag.prompts.tools import Tool, ToolCall
from invariant_rag.prompts.turns import Recognition, Turn, parse_marked, recognize

__all__ = [
    "DEFAULT_SYSTEM", "FIXES", "CallFormat", "Content", "Finding", "Message", "Outside", "ReasoningFormat",
    "Recognition", "Retrieval", "RunRetrievals", "TemplateFormat", "TokenizedPrompt", "Tool", "ToolCall", "Trusted",
    "Turn", "begin_outside", "control_tokens", "find_set", "forget_outside", "has_marks", "holds_documents", "mark",
    "mark_set", "outside_retrievals", "parse_marked", "question_messages", "recognize", "render_chat", "report",
    "template_format", "tokenize_in_slots", "tokenize_literal", "tokenize_prompt", "tokenize_text",
    "unprotected_tokens", "warn_of_unprotected_tokens", "without_marks",
]  # fmt: skip
