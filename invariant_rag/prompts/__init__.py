"""Prompts as the model gets them: tokenization, chat templates, and segments marked inside a string."""

from __future__ import annotations

from invariant_rag.prompts.chat_template import DEFAULT_SYSTEM, Content, Message, question_messages, render_chat
from invariant_rag.prompts.markers import mark, parse_marked
from invariant_rag.prompts.tokenization import (
    TokenizedPrompt,
    control_tokens,
    tokenize_literal,
    tokenize_prompt,
    tokenize_text,
)

__all__ = [
    "DEFAULT_SYSTEM",
    "Content",
    "Message",
    "TokenizedPrompt",
    "control_tokens",
    "mark",
    "parse_marked",
    "question_messages",
    "render_chat",
    "tokenize_literal",
    "tokenize_prompt",
    "tokenize_text",
]
