"""Arguments of another kind or size than expected are refused by name, at every public entry that takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from invariant_rag import (
    ContextualCalibration,
    InvariantModel,
    KeyValueCache,
    PermutationAverage,
    Prompt,
)
from invariant_rag.errors import InvalidOption, InvalidTool, InvariantRAGError
from invariant_rag.prompts import ToolCall
from invariant_rag.remote import chat_messages

CIRCLE: dict[str, Any] = {}
CIRCLE["again"] = CIRCLE


@pytest.mark.parametrize("value", [b"x", {1, 2}, object(), [{"deep": b"x"}], {b"x": 1}, CIRCLE])
def test_what_no_json_can_say_is_no_argument_of_a_tool(model: InvariantModel, value: Any) -> None:
    function = {"name": "now", "arguments": {"fine": 1, "wrong": value}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "wrong": value}}}
    uses: tuple[Callable[[], object], ...] = (
        lambda: ToolCall.of(called["tool_calls"][0]),  # type: ignore[arg-type]
        lambda: model.chat_prompt(messages=[{"role": "user", "content": "q"}, called]),
        lambda: model.chat_prompt("q", ["a"], tools=[tool]),
        lambda: chat_messages([called]),
    )
    for use in uses:
        with pytest.raises(InvalidTool, match=r"expected JSON as .*now.* as 'wrong'"):
            use()


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 10**30},
        {"num_return_sequences": 10**30},
        {"stop_strings": "\ud800"},
        {"begin_suppress_tokens": [None]},
        {"suppress_tokens": ["a"]},
    ],
)
def test_keywords_beyond_what_pytorch_takes_are_refused_by_name(model: InvariantModel, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        model.generate(model.chat_prompt("q", ["a"]), **{"max_new_tokens": 1, **options})


def test_a_refusal_names_the_argument_and_what_was_expected(model: InvariantModel) -> None:
    refusals: dict[str, Callable[[], object]] = {
        "count: expected at least 1, got": lambda: PermutationAverage(model, count="3"),  # type: ignore[arg-type]
        "alpha: expected a finite number": lambda: model.with_routing(float("nan")),
        "expected a list of tools, got 3": lambda: model.chat_prompt("q", ["a"], tools=3),  # type: ignore[arg-type]
        "expected a list of Mapping": lambda: model.chat_prompt(messages="hello"),  # type: ignore[arg-type]
        "expected at least one message": lambda: model.chat_prompt(messages=[]),
        "tool_calls: expected a list": lambda: model.chat_prompt(messages=[{"role": "assistant", "tool_calls": 3}]),
        "token ids below the size of a vocabulary": lambda: Prompt("a", ["b"], [10**30]),
        "content_free: expected at least one text": lambda: ContextualCalibration(model, content_free=3),  # type: ignore[arg-type]
        "device: expected a device": lambda: KeyValueCache(device="nowhere"),
    }
    for message, refused in refusals.items():
        with pytest.raises(InvariantRAGError, match=message):
            refused()
