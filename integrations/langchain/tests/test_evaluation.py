"""The evaluator: the numbers of the core's judge, and the same verdict for both orders of the predictions."""

from __future__ import annotations

from typing import Any

import pytest
from invariant_rag import InvariantModel, Judge
from invariant_rag.errors import InvalidPrompt, UnknownName, UnsupportedCombination
from langchain_core.language_models import FakeListChatModel

from langchain_invariant_rag import ChatInvariant, InvariantPairwiseEvaluator

from .shared import QUESTION

PAIR = ("noon", "at night")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"by": "texts"},
    {"criteria": {"brevity": "Is it short?", "depth": ""}},
    {"explain": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("method", ["rotor", "sequential"])
async def test_it_gives_the_verdict_of_the_judge_and_swapping_the_predictions_swaps_it(
    lm: InvariantModel, method: str, options: dict[str, Any]
) -> None:
    chat = ChatInvariant(model=lm.with_method(method), max_tokens=8)
    evaluator = InvariantPairwiseEvaluator(chat, **options)
    asked = {"prediction": PAIR[0], "prediction_b": PAIR[1], "input": QUESTION, "reference": "noon"}
    one = evaluator.evaluate_string_pairs(**asked)
    other = evaluator.evaluate_string_pairs(**{**asked, "prediction": PAIR[1], "prediction_b": PAIR[0]})
    assert await evaluator.aevaluate_string_pairs(**asked) == one
    how = {"explain": True, "max_new_tokens": 8} if options.get("explain") else {}
    judge = Judge(chat.lm, **{name: value for name, value in options.items() if name != "explain"})
    verdict = judge.compare(QUESTION, *PAIR, reference="noon", **how)
    assert one["probabilities"] == verdict.probabilities == other["probabilities"][::-1]
    assert one["reasoning"] == verdict.describe(["prediction", "prediction_b"])
    assert (one["value"], one["score"]) == {0: ("A", 1), 1: ("B", 0)}[verdict.winner or 0]
    assert ({one["value"], other["value"]}, one["score"] + other["score"]) == ({"A", "B"}, 1)
    same = evaluator.evaluate_string_pairs(prediction="same", prediction_b="same")
    assert (same["value"], same["score"], same["probabilities"]) == (None, 0.5, (0.5, 0.5))


def test_wrong_options_are_refused_before_a_model_is_loaded() -> None:
    nowhere = ChatInvariant(model="no/such-model")
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (nowhere, {"by": "numbers"}, UnknownName, "'letters', 'texts'"),
        (nowhere, {"criteria": ["brevity"]}, InvalidPrompt, "criteria"),
        (FakeListChatModel(responses=["A"]), {}, UnsupportedCombination, "FakeListChatModel"),
    ]
    for model, options, error, message in wrong:
        with pytest.raises(error, match=message):
            InvariantPairwiseEvaluator(model, **options)
