"""Requests to LLMs that know no segments, as LlamaIndex carries them: messages to turns, and turns to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, TextBlock, ToolCallBlock

from invariant_rag.api_models import PlainRequest, PlainRequests
from invariant_rag.prompts import Recognition, Turn
from invariant_rag.prompts.labels import translate_labels, translate_object
from llama_index.llms.invariant_rag.function_calling import ASSISTANT

R = TypeVar("R", ChatResponse, CompletionResponse)


@dataclass(frozen=True)
class Ballot:
    """One request to an LLM, and what its numbers mean.

    Attributes:
        input: Messages, or a text.
        request: The request that they were made from.
        recognized: Whether every node in it is known to be a segment.
    """

    input: Any
    request: PlainRequest
    recognized: bool

    def ledger(self, method: str) -> dict[str, Any]:
        """Return what was sent, in the words of `invariant_rag.generation.ledger`."""
        return self.request.ledger(method, recognized=self.recognized)


def text_ballots(requests: PlainRequests, found: Recognition, query: str | None = None) -> list[Ballot]:
    """Return requests as texts.

    Args:
        requests: The orders in which to list the segments.
        found: The text, as one recognised turn.
        query: What relevance orderings compare segments with. None: the text without its segments.
    """
    return [Ballot(each.text, each, not found.findings) for each in requests.of_turns(found.turns, query or None)]


def message_ballots(
    requests: PlainRequests, messages: Sequence[ChatMessage], found: Recognition, query: str | None = None
) -> list[Ballot]:
    """Return requests as lists of messages. Messages without segments stay as they are.

    Args:
        requests: The orders in which to list the segments.
        messages: The conversation.
        found: Its turns, recognised.
        query: What relevance orderings compare segments with. None: the text of the user's last message.
    """
    return [
        Ballot(
            [
                _message(message, turn, written)
                for message, turn, written in zip(messages, found.turns, request.turns, strict=True)
                if written.parts or not message.blocks  # else its segments went to the set of its neighbour
            ],
            request,
            not found.findings,
        )
        for request in requests.of_turns(found.turns, query or None)
    ]


def _message(message: ChatMessage, turn: Turn, request: Turn) -> ChatMessage:
    """Return a message with the content of a request, each text as one block."""
    text = "\n".join(block.text for block in message.blocks if isinstance(block, TextBlock))
    if message.role in ASSISTANT or not (turn.has_segments or turn.text.strip() != text.strip()):
        return message
    blocks = [TextBlock(text=part) if isinstance(part, str) else part for part in request.parts]
    return ChatMessage(role=message.role, blocks=blocks, additional_kwargs=message.additional_kwargs)


def answered(response: R, ballot: Ballot, method: str) -> R:
    """Return a response with its citations translated back, and with the ledger.

    The ledger is in `additional_kwargs["invariant_rag"]`, and in `raw` unless that is an object of the provider.

    Args:
        response: The response.
        ballot: What was asked.
        method: Name of the strategy.
    """
    ledger, labels = ballot.ledger(method), ballot.request.labels
    changed: dict[str, Any] = {"additional_kwargs": {**response.additional_kwargs, "invariant_rag": ledger}}
    if response.raw is None or isinstance(response.raw, Mapping):
        changed["raw"] = {**(response.raw or {}), **ledger}
    if labels and isinstance(response, CompletionResponse):
        changed["text"] = translate_labels(response.text, labels)
    elif labels and isinstance(response, ChatResponse):
        changed["message"] = _translated(response.message, ballot)
    return response.model_copy(update=changed)


def _translated(message: ChatMessage, ballot: Ballot) -> ChatMessage:
    labels = ballot.request.labels
    blocks: list[Any] = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            blocks.append(block.model_copy(update={"text": translate_labels(block.text, labels)}))
        elif isinstance(block, ToolCallBlock):
            blocks.append(block.model_copy(update={"tool_kwargs": translate_object(block.tool_kwargs, labels)}))
        else:
            blocks.append(block)
    return message.model_copy(update={"blocks": blocks})
