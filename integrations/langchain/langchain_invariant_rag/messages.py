"""Turns of a conversation as the core's messages, for a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import Message, Turn
from invariant_rag.segments import Segment, SegmentSet

_ROLES = {"tool": "user"}


def chat_messages(turns: Sequence[Turn]) -> list[Message]:
    """Convert turns for `render_chat`: contents of text and sets, adjacent turns of one role merged.

    Results of tools become user messages. Turns of the assistant without text (tool calls only) are left out.

    Raises:
        InvalidPrompt: A part is neither text nor segments, or no message is left.
    """
    merged: list[tuple[str, list[Any]]] = []
    for turn in turns:
        role, parts = _ROLES.get(turn.role, turn.role), list(_checked(turn.parts))
        if not parts and role == "assistant":
            continue
        if merged and merged[-1][0] == role:
            merged[-1][1].extend(["\n", *parts] if parts else [])
        else:
            merged.append((role, parts))
    if not merged:
        raise InvalidPrompt("expected at least one message, got none")
    return [{"role": role, "content": parts} for role, parts in merged]


def last_user_text(messages: Sequence[Message]) -> str:
    """Return the text of the last user message without its segments: the query of relevance orderings."""
    for message in reversed(messages):
        if message["role"] == "user":
            return "".join(part for part in message["content"] if isinstance(part, str)).strip()
    return ""


def _checked(parts: Sequence[Any]) -> Sequence[Any]:
    for part in parts:
        if not isinstance(part, str | Segment | SegmentSet):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidPrompt(
                f"expected text and documents, got a content block of type {kind!r}",
                hint='The model takes text only. Pass a document as a block of type "text-plain".',
            )
    return parts
