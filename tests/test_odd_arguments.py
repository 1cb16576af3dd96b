"""Arguments of another kind or size than expected are refused by name, at every public entry that takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from invariant_rag import (
    AttentionSorting,
    ContextualCalibration,
    InvariantModel,
    KeyValueCache,
    PermutationAverage,
    Prompt,
    RingAverage,
    SelfConsistency,
)
from invariant_rag.errors import InvalidChoice, InvalidOption, InvalidPrompt, InvalidTool
from invariant_rag.prompts import ToolCall
from invariant_rag.remote import chat_messages


@pytest.mark.parametrize("value", ["3", [], 1.5, object(), 0])
def test_a_count_of_an_ensemble_is_a_whole_number(model: InvariantModel, value: Any) -> None:
    builders: tuple[Callable[[], object], ...] = (
        lambda: RingAverage(model, cuts=value),
        lambda: PermutationAverage(model, count=value),
        lambda: SelfConsistency(model, count=value),
        lambda: AttentionSorting(model, rounds=value),
    )
    for build in builders:
        with pytest.raises(InvalidChoice, match="expected at least 1, got"):
            build()


@pytest.mark.parametrize("value", ["0.2", [], 10**400, float("nan")])
def test_the_margin_of_routing_is_a_finite_number(model: InvariantModel, value: Any) -> None:
    with pytest.raises(InvalidChoice, match="alpha: expected a finite number"):
        model.with_routing(value)


def test_tools_are_a_list(model: InvariantModel) -> None:
    with pytest.raises(InvalidTool, match="expected a list of tools, got 3"):
        model.chat_prompt("q", ["a"], tools=3)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("messages", [3, "hello", [3], iter(())])
def test_messages_are_a_list_of_mappings(model: InvariantModel, messages: Any) -> None:
    with pytest.raises(InvalidPrompt, match=r"expected (a list of Mapping|at least one message)"):
        model.chat_prompt(messages=messages)


def test_calls_in_a_message_are_a_list(model: InvariantModel) -> None:
    with pytest.raises(InvalidPrompt, match="tool_calls: expected a list"):
        model.chat_prompt(messages=[{"role": "assistant", "content": "", "tool_calls": 3}])


def test_token_ids_fit_into_a_vocabulary() -> None:
    with pytest.raises(InvalidPrompt, match="token ids below the size of a vocabulary"):
        Prompt("a", ["b"], [10**30])


def test_blanks_of_a_calibration_are_texts(model: InvariantModel) -> None:
    with pytest.raises(InvalidChoice, match="content_free: expected at least one text"):
        ContextualCalibration(model, content_free=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", [10**30, "nowhere"])
def test_the_device_of_a_cache_is_one(device: Any) -> None:
    with pytest.raises(InvalidChoice, match="device: expected a device"):
        KeyValueCache(device=device)
