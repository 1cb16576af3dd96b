"""Other models answer on vLLM as here: grouped heads, norms of queries, sliding windows, heads of two workers.

And an engine that would compute documents causally does not start.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.family import METHODS


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "two workers"])
def test_a_family_gives_the_tokens_of_generate(case: str, families: dict[str, list[dict[str, Any]]]) -> None:
    found = families[case]
    assert [each["method"] for each in found[::2]] == list(METHODS)
    assert all(each["same"] for each in found), found
    assert all((each["cached"] > 0) == (each["method"] != "pine") for each in found[1::2]), found


def test_behind_a_sliding_window_nothing_is_reused_and_methods_that_look_back_are_refused(
    families: dict[str, list[dict[str, Any]]],
) -> None:
    """Mistral with a window of 48 tokens, and a prompt of 162."""
    found = families["mistral"]
    assert [each["method"] for each in found[::2]] == list(METHODS)
    for each in found:
        if each["method"] in ("set-based", "pine"):
            assert "sliding window of 48" in each["refused"]
        else:
            assert each["same"], each
            assert each["method"] == "sequential" or each["cached"] == 0


def test_quantized_weights_are_attended_to_as_any_are(families: dict[str, list[dict[str, Any]]]) -> None:
    """GPTQ with 4 bits, computed in float16, against float32 here; rounding moves scores less than other methods do."""
    found = families["gptq"]
    assert [each["method"] for each in found] == list(METHODS)
    for each in found:
        far = distance(each["here"], each["there"])
        assert all(10 * far < distance(each["here"], other["here"]) for other in found if other is not each)


def distance(scores: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(scores, others, strict=True))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("chunked prefill", "expected no chunked prefill"),
        ("no plug-in", "with the plug-in invariant_rag in VLLM_PLUGINS"),
    ],
)
def test_an_engine_that_would_read_causally_says_why_it_does_not_start(
    case: str, words: str, families: dict[str, list[dict[str, Any]]]
) -> None:
    (told,) = families[case]
    assert words in told["refused"]


def test_plain_requests_are_bit_by_bit_those_of_a_vllm_without_us(families: dict[str, list[dict[str, Any]]]) -> None:
    ours, theirs = families["plain"], families["plain, no plug-in"]
    assert [each["told"] for each in ours] == [each["told"] for each in theirs]
    assert "logprob=" in ours[0]["told"][0]
