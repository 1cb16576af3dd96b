"""Requests to models that know no segments, as LangChain carries them: messages to turns, and turns to messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from invariant_rag.api_models import PlainRequest, PlainRequests
from invariant_rag.prompts import Turn
from invariant_rag.prompts.labels import translate_object
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from langchain_invariant_rag.turns import to_block_of, to_turns

_SAID = ("text", "tool_use", "tool_call")
"""Content blocks in which documents are cited. Reasoning may be signed, and is left as it is."""


@dataclass(frozen=True)
class Ballot:
    """One request to a model, and what its numbers mean.

    Attributes:
        input: Messages, or a text.
        request: The request that they were made from.
    """

    input: Any
    request: PlainRequest


def message_ballots(
    requests: PlainRequests, messages: Sequence[BaseMessage], turns: Sequence[Turn] | None = None
) -> list[Ballot]:
    """Return requests as lists of messages. Messages without segments stay as they are.

    Args:
        requests: The orders in which to list the segments.
        messages: The messages, in which sets are recognised, or not yet.
        turns: Their turns, recognised. None: as the messages say.
    """
    given = to_turns(messages) if turns is None else list(turns)
    return [
        Ballot(
            [_message(*each) for each in zip(messages, given, request.turns, strict=True) if _stays(each[0], each[2])],
            request,
        )
        for request in requests.of_turns(given)
    ]


def text_ballots(requests: PlainRequests, turn: Turn) -> list[Ballot]:
    """Return requests as texts, for one recognised turn."""
    return [Ballot(request.text, request) for request in requests.of_turns([turn])]


def answered(message: BaseMessage, ballot: Ballot, method: str, *, recognized: bool) -> BaseMessage:
    """Return an answer with its citations translated back, and with the ledger in its metadata.

    Args:
        message: The answer.
        ballot: What was asked.
        method: Name of the strategy.
        recognized: Whether every document is known to be a segment.
    """
    metadata = {**message.response_metadata, **ballot.request.ledger(method, recognized=recognized)}
    changed: dict[str, Any] = {"response_metadata": metadata}
    if labels := ballot.request.labels:
        content: Any = message.content
        changed["content"] = (
            translate_object(content, labels)
            if isinstance(content, str)
            else [
                translate_object(each, labels) if isinstance(each, str) or each.get("type") in _SAID else each
                for each in content
            ]
        )
        if isinstance(message, AIMessage):
            changed["tool_calls"] = [
                {**call, "args": translate_object(call["args"], labels)} for call in message.tool_calls
            ]
    return message.model_copy(update=changed)


def _stays(message: BaseMessage, request: Turn) -> bool:
    """Return whether a message is left: not if its segments went to the set of its neighbour."""
    return bool(request.parts) or isinstance(message, AIMessage) or not message.content


def _message(message: BaseMessage, turn: Turn, request: Turn) -> BaseMessage:
    """Return a message with the content of a request: a string where there is only text, else content blocks."""
    if isinstance(message, AIMessage) or not turn.has_segments:
        return message
    whole = request.parts[0] if len(request.parts) == 1 and isinstance(request.parts[0], str) else None
    blocks = list(map(to_block_of, request.parts))
    changed: dict[str, Any] = {"content": blocks if whole is None else whole}
    if isinstance(message, ToolMessage):
        changed["artifact"] = None  # it lists the documents too
    return message.model_copy(update=changed)
