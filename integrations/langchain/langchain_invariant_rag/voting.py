"""Votes on outputs of LangChain models: what counts as the same answer, and the output that wins."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Any

from invariant_rag.api_models import answer_key, elect, object_key
from langchain_core.messages import AIMessage
from langchain_core.messages.ai import UsageMetadata, add_usage

AnswerOf = Callable[[Any], Hashable]


def answer_of(output: Any) -> Hashable:
    """Return what outputs share if they agree: text without regard to case and white space, tool calls, or an object.

    >>> answer_of("Noon ") == answer_of(AIMessage("noon"))
    True
    """
    if isinstance(output, AIMessage):
        return answer_key(output.text, [(call["name"], call["args"]) for call in output.tool_calls])
    if isinstance(output, str):
        return answer_key(output)
    if isinstance(output, dict) and "parsed" in output and isinstance(output.get("raw"), AIMessage):
        return answer_of(output["raw"]) if output["parsed"] is None else answer_of(output["parsed"])
    return object_key(output)


def elected(outputs: Sequence[Any], count: AnswerOf | None) -> tuple[int, Any]:
    """Return the index of the output whose answer most others share (of several such, the first), and that output.

    A message reports the tokens of all outputs in `usage_metadata`, and the `calls` made and how many `agreed` in
    `response_metadata["vote"]`.
    """
    vote = elect([(count or answer_of)(output) for output in outputs])
    winner = outputs[vote.winner]
    if isinstance(winner, AIMessage):
        usage = total_usage([output.usage_metadata for output in outputs])
        metadata = {**winner.response_metadata, "vote": vote.as_dict()}
        winner = winner.model_copy(update={"usage_metadata": usage, "response_metadata": metadata})
    return vote.winner, winner


def total_usage(usages: Sequence[UsageMetadata | None]) -> UsageMetadata | None:
    """Return the tokens of several calls together; None where no call reports any."""
    return reduce(add_usage, usages, None) if any(usages) else None
