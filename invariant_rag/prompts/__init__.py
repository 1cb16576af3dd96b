"""Prompts as the model gets them: tokenization, chat templates, and segments marked inside a string."""

from __future__ import annotations

from invariant_rag.prompts.chat_template import DEFAULT_SYSTEM, Message, question_messages, render_chat
from invariant_rag.prompts.markers import has_marks, mark, mark_set, without_marks
from invariant_rag.prompts.order_warnings import FIXES, Finding, report
from invariant_rag.prompts.recognition import Recognition, parse_marked, recognize
from invariant_rag.prompts.run_retrievals import (
    Outside,
    Retrieval,
    RunRetrievals,
    begin_outside,
    forget_outside,
    outside_retrievals,
)
from invariant_rag.prompts.slots import find_set
from invariant_rag.prompts.template_probes import (
    CallFormat,
    ReasoningFormat,
    control_tokens,
    template_format,
    unprotected_tokens,
    warn_of_unprotected_tokens,
)
from invariant_rag.prompts.tokenization import (
    Trusted,
    tokenize_in_slots,
    tokenize_literal,
    tokenize_prompt,
    tokenize_text,
)
from invariant_rag.prompts.tools import Tool, ToolCall
from invariant_rag.prompts.turns import Turn

__all__ = [
    "DEFAULT_SYSTEM", "FIXES", "CallFormat", "Finding", "Message", "Outside", "ReasoningFormat", "Recognition",
    "Retrieval", "RunRetrievals", "Tool", "ToolCall", "Trusted", "Turn", "begin_outside", "control_tokens", "find_set",
    "forget_outside", "has_marks", "mark", "mark_set", "outside_retrievals", "parse_marked", "question_messages",
    "recognize", "render_chat", "report", "template_format", "tokenize_in_slots", "tokenize_literal", "tokenize_prompt",
    "tokenize_text", "unprotected_tokens", "warn_of_unprotected_tokens", "without_marks",
]  # fmt: skip
