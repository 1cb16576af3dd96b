"""Models with grouped heads and a sliding window answer on vLLM as they do here; and so they do through Redis."""

from __future__ import annotations

from typing import Any

import pytest

from tests.grouped_windowed import METHODS


def test_grouped_heads_and_a_sliding_window_give_the_tokens_of_generate(family: list[dict[str, Any]]) -> None:
    answers = [each for each in family if "method" in each]
    assert [each["method"] for each in answers] == METHODS
    assert all(each["same"] and each["distance"] < 1e-3 for each in answers), answers


def test_copies_of_keys_are_refused_with_a_sliding_window(family: list[dict[str, Any]]) -> None:
    assert {"refused": "UnsupportedCombination"} in family


def test_what_redis_loses_fails_its_request_and_is_prefilled_again(family: list[dict[str, Any]]) -> None:
    events = [each for each in family if "event" in each]
    if not events:
        pytest.skip("needs redis-server")
    assert events == [
        {"event": "another worker", "cached": True},
        {"event": "flushed", "raw": "EntryUnusable", "again": True},
        {"event": "down", "arranged": "EntryUnusable", "plain": True},
        {"event": "back", "again": True},
    ]
