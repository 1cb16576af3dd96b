"""Messages of LangChain as the core's messages, for a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import Message, Turn
from invariant_rag.segments import Segment, SegmentSet, document_rendering
from langchain_core.messages import AIMessage, BaseMessage, FunctionMessage, ToolMessage

from langchain_invariant_rag.documents import BLOCK_TYPE, to_segment


def chat_messages(messages: Sequence[BaseMessage], turns: Sequence[Turn]) -> list[Message]:
    """Convert messages and their turns for `render_chat`: contents of text and sets, calls of tools, and their results.

    Adjacent messages of one role are merged, but for results of tools. Messages of the assistant without text and calls
    are left out.

    Raises:
        InvalidPrompt: A part is neither text nor segments, or no message is left.
    """
    found: list[dict[str, Any]] = []
    for message, turn in zip(messages, turns, strict=True):
        converted = _convert(message, turn)
        if turn.role == "assistant" and not converted["content"] and "tool_calls" not in converted:
            continue
        before: dict[str, Any] = found[-1] if found else {"role": None}
        if before["role"] == turn.role != "tool" and "tool_calls" not in before:
            gap = ["\n"] if before["content"] and converted["content"] else []
            found[-1] = {**before, **converted, "content": [*before["content"], *gap, *converted["content"]]}
        else:
            found.append(converted)
    if not found:
        raise InvalidPrompt("expected at least one message, got none")
    return list(found)


def last_user_text(messages: Sequence[Message]) -> str:
    """Return the text of the last user message without its segments: the query of relevance orderings."""
    for message in reversed(messages):
        if message["role"] == "user":
            return "".join(part for part in message["content"] if isinstance(part, str)).strip()
    return ""


def _convert(message: BaseMessage, turn: Turn) -> dict[str, Any]:
    """Return a message of the core, whose content is a list of texts, segments and sets."""
    converted: dict[str, Any] = {"role": turn.role, "content": _checked(turn.parts)}
    if isinstance(message, AIMessage):
        if message.tool_calls:
            converted["tool_calls"] = list(message.tool_calls)
        if reasoning := message.additional_kwargs.get("reasoning_content"):
            converted["reasoning_content"] = reasoning  # many templates write that of the calls before the answer
    elif isinstance(message, ToolMessage | FunctionMessage):
        if isinstance(message, ToolMessage):
            converted["tool_call_id"] = message.tool_call_id
        if message.name:
            converted["name"] = message.name
        if getattr(message, "status", None) == "error" and not turn.text.lstrip().lower().startswith("error"):
            converted["content"].insert(0, "Error: ")  # chat templates have no other way to say it
    return converted


def _checked(parts: Sequence[Any]) -> list[Any]:
    """Return parts of text and segments. Documents that were uploaded are text: their order is the user's."""
    checked: list[Any] = []
    for part in parts:
        if isinstance(part, dict) and part.get("type") == BLOCK_TYPE and isinstance(part.get("text"), str):
            checked.append(document_rendering(to_segment(part)))
        elif isinstance(part, str | Segment | SegmentSet):
            checked.append(part)
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidPrompt(
                f"expected text and documents, got a content block of type {kind!r}",
                hint="The model takes text only. Pass documents as segments: documents=, SegmentsPlaceholder.",
            )
    return checked
