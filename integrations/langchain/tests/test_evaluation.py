"""Judges: asked once, and what they say of equal candidates."""

from __future__ import annotations

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import InvalidPrompt

from langchain_invariant_rag import ChatInvariant, InvariantListwiseEvaluator, InvariantPairwiseEvaluator

from .shared import QUESTION


@pytest.fixture(scope="module")
def chat(lm: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=lm)


def test_probabilities_add_up_and_rank(chat: ChatInvariant) -> None:
    judgement = InvariantListwiseEvaluator(chat).evaluate(["one", "two", "three"], input=QUESTION, reference="two")
    assert sum(judgement.scores) == pytest.approx(1)
    assert [judgement.scores[index] for index in judgement.ranking] == sorted(judgement.scores, reverse=True)
    assert judgement.best == judgement.ranking[0]


def test_equal_candidates_tie(chat: ChatInvariant) -> None:
    verdict = InvariantPairwiseEvaluator(chat).evaluate_string_pairs(prediction="same", prediction_b="same")
    assert (verdict["value"], verdict["score"], verdict["probability"]) == (None, 0.5, 0.5)
    judgement = InvariantListwiseEvaluator(chat).evaluate(["same", "other", "same"])
    assert judgement.scores[0] == judgement.scores[2]


async def test_a_pairwise_judge_runs_asynchronously(chat: ChatInvariant) -> None:
    judge, pair = InvariantPairwiseEvaluator(chat), {"prediction": "a", "prediction_b": "b", "input": QUESTION}
    assert await judge.aevaluate_string_pairs(**pair) == judge.evaluate_string_pairs(**pair)


def test_too_few_or_too_many_candidates_are_refused(chat: ChatInvariant) -> None:
    for predictions in ([], [str(number) for number in range(27)]):
        with pytest.raises(InvalidPrompt, match="1 to 26"):
            InvariantListwiseEvaluator(chat).evaluate(predictions)
