"""The evaluators: the numbers of the core's judge, and the same verdict for every order of the predictions."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from invariant_rag import CapCal, InvariantModel, Judge
from invariant_rag.errors import InvalidChoice, InvalidPrompt, UnknownName, UnsupportedCombination
from langchain_core.language_models import FakeListChatModel

from langchain_invariant_rag import ChatInvariant, InvariantListwiseEvaluator, InvariantPairwiseEvaluator

from .shared import QUESTION

PAIR = ("noon", "at night")
PREDICTIONS = ("noon", "at night", "never", "at noon, from Ostra")
CRITERIA = {"brevity": "Is it short?", "depth": ""}
OPTIONS: list[dict[str, Any]] = [{}, {"by": "texts"}, {"criteria": CRITERIA}, {"calibration": CapCal("adaptive")}]


@pytest.fixture(scope="module", params=["tiny", "plain", "embedded"])
def chat(request: pytest.FixtureRequest, lm: InvariantModel) -> ChatInvariant:
    """A tiny random model, the same weights without any invariance of their own, and the embedded model."""
    if request.param == "embedded":
        return ChatInvariant(max_tokens=8)
    return ChatInvariant(model=lm.with_method("sequential") if request.param == "plain" else lm, max_tokens=8)


@pytest.mark.parametrize("options", OPTIONS)
def test_both_evaluators_give_the_probabilities_of_the_judge(chat: ChatInvariant, options: dict[str, Any]) -> None:
    judge = Judge(chat.lm, **options)
    verdict = judge.rank(QUESTION, PREDICTIONS, reference="noon")
    listwise = InvariantListwiseEvaluator(chat, **options)
    assert listwise.evaluate(PREDICTIONS, input=QUESTION, reference="noon") == verdict
    pairwise = InvariantPairwiseEvaluator(chat, **options)
    result = pairwise.evaluate_string_pairs(prediction=PAIR[0], prediction_b=PAIR[1], input=QUESTION, reference="noon")
    compared = judge.compare(QUESTION, *PAIR, reference="noon")
    assert result["probabilities"] == compared.probabilities
    assert (result["value"], result["score"]) == {0: ("A", 1), 1: ("B", 0), None: (None, 0.5)}[compared.winner]
    assert result["reasoning"] == compared.describe(["prediction", "prediction_b"])


@pytest.mark.parametrize("options", OPTIONS)
def test_swapping_two_predictions_swaps_the_verdict_exactly(chat: ChatInvariant, options: dict[str, Any]) -> None:
    evaluator = InvariantPairwiseEvaluator(chat, **options)
    one, two = (
        evaluator.evaluate_string_pairs(prediction=a, prediction_b=b, input=QUESTION, reference="noon")
        for a, b in (PAIR, PAIR[::-1])
    )
    assert one["probabilities"] == two["probabilities"][::-1]
    assert {one["value"], two["value"]} == {"A", "B"}
    assert one["score"] == 1 - two["score"]


@pytest.mark.parametrize("options", OPTIONS)
def test_every_order_of_the_predictions_gives_the_same_ranking(chat: ChatInvariant, options: dict[str, Any]) -> None:
    evaluator = InvariantListwiseEvaluator(chat, **options)
    rankings = set()
    for listed in list(permutations(PREDICTIONS))[::5]:
        verdict = evaluator.evaluate(listed, input=QUESTION)
        rankings.add(tuple((listed[index], verdict.probabilities[index]) for index in verdict.ranking))
    assert len(rankings) == 1


def test_an_explanation_is_the_judges_in_both_orders(chat: ChatInvariant) -> None:
    verdict = Judge(chat.lm).compare(QUESTION, *PAIR, explain=True, max_new_tokens=8)
    assert verdict.explanation is not None
    evaluator = InvariantPairwiseEvaluator(chat, explain=True)
    one, two = (
        evaluator.evaluate_string_pairs(prediction=a, prediction_b=b, input=QUESTION)["reasoning"]
        for a, b in (PAIR, PAIR[::-1])
    )
    assert one == verdict.describe(["prediction", "prediction_b"])
    assert one.endswith(f"With prediction as B, prediction_b as A: {verdict.explanation}")
    assert two.endswith(f"With prediction as A, prediction_b as B: {verdict.explanation}")


def test_equal_predictions_tie(chat: ChatInvariant) -> None:
    result = InvariantPairwiseEvaluator(chat).evaluate_string_pairs(prediction="same", prediction_b="same")
    assert (result["value"], result["score"], result["probabilities"]) == (None, 0.5, (0.5, 0.5))
    verdict = InvariantListwiseEvaluator(chat).evaluate(["same", "other", "same"])
    assert verdict.probabilities[0] == verdict.probabilities[2]


async def test_the_pairwise_evaluator_runs_asynchronously(chat: ChatInvariant) -> None:
    evaluator, pair = InvariantPairwiseEvaluator(chat), {"prediction": "a", "prediction_b": "b", "input": QUESTION}
    assert await evaluator.aevaluate_string_pairs(**pair) == evaluator.evaluate_string_pairs(**pair)


def test_too_few_or_too_many_predictions_are_refused(lm: InvariantModel) -> None:
    for predictions in ([], [str(number) for number in range(27)]):
        with pytest.raises(InvalidPrompt, match="1 to 26"):
            InvariantListwiseEvaluator(ChatInvariant(model=lm)).evaluate(predictions)


@pytest.mark.parametrize("evaluator", [InvariantListwiseEvaluator, InvariantPairwiseEvaluator])
def test_wrong_options_are_refused_before_a_model_is_loaded(evaluator: Any) -> None:
    nowhere = ChatInvariant(model="no/such-model")
    evaluator(nowhere)
    with pytest.raises(UnknownName, match="'letters', 'texts'"):
        evaluator(nowhere, by="numbers")
    with pytest.raises(InvalidPrompt, match="criteria"):
        evaluator(nowhere, criteria=["brevity"])
    with pytest.raises(UnsupportedCombination, match="letters"):
        evaluator(nowhere, by="texts", calibration=CapCal())
    with pytest.raises(InvalidChoice, match="CapCal"):
        evaluator(nowhere, calibration=1.0)
    with pytest.raises(UnsupportedCombination, match="FakeListChatModel"):
        evaluator(FakeListChatModel(responses=["A"]))
