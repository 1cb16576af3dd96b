"""Prompts as the model gets them: tokenization, chat templates, and segments marked inside a string."""

from __future__ import annotations

from invariant_rag.prompts.chat_template import DEFAULT_SYSTEM, Content, Message, question_messages, render_chat
from invariant_rag.prompts.markers import mark, parse_marked
from invariant_rag.prompts.template_format import CallFormat, ReasoningFormat, TemplateFormat, template_format
from invariant_rag.prompts.tokenization import (
    TokenizedPrompt,
    control_tokens,
    tokenize_literal,
    tokenize_prompt,
    tokenize_text,
)
from invariant_rag.prompts.tools import Tool, ToolCall

__all__ = [
    "DEFAULT_SYSTEM",
    "CallFormat",
    "Content",
    "Message",
    "ReasoningFormat",
    "TemplateFormat",
    "TokenizedPrompt",
    "Tool",
    "ToolCall",
    "control_tokens",
    "mark",
    "parse_marked",
    "question_messages",
    "render_chat",
    "template_format",
    "tokenize_literal",
    "tokenize_prompt",
    "tokenize_text",
]
