"""InvariantPairwiseEvaluator: the library's judge with LlamaIndex's interface."""

from __future__ import annotations

from typing import Any

import pytest
from cases import QUERY
from invariant_rag import InvariantModel
from invariant_rag.errors import InvalidPrompt, UnknownName, UnsupportedCombination
from invariant_rag.judge import Judge
from llama_index.core import Settings
from llama_index.core.evaluation import PairwiseComparisonEvaluator
from llama_index.core.evaluation.pairwise import DEFAULT_EVAL_TEMPLATE, EvaluationSource
from llama_index.core.llms import MockLLM

from llama_index.evaluation.invariant_rag import InvariantPairwiseEvaluator
from llama_index.llms.invariant_rag import InvariantLLM

ONE, OTHER = "It leaves at noon.", "It leaves at six."
NAMES = ["response", "second_response"]
OPTIONS: list[dict[str, Any]] = [{}, {"by": "texts"}, {"criteria": {"brevity": "few words"}}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
async def test_the_result_is_the_verdict_of_the_judge_and_swaps_exactly(
    model: InvariantModel, options: dict[str, Any]
) -> None:
    for lm in (model, model.with_routing(0.0)):
        evaluator = InvariantPairwiseEvaluator(InvariantLLM(lm, max_tokens=8), **options)
        assert isinstance(evaluator, PairwiseComparisonEvaluator)
        asked = {"query": QUERY, "reference": "noon"}
        one = evaluator.evaluate(response=ONE, second_response=OTHER, **asked)
        two = await evaluator.aevaluate(response=OTHER, second_response=ONE, **asked)
        verdict = evaluator.judge.compare(QUERY, ONE, OTHER, reference="noon")
        assert Judge(lm, **options).compare(QUERY, ONE, OTHER, reference="noon") == verdict
        assert one.feedback == one.response == verdict.describe(NAMES)
        assert (one.passing, one.score) == {0: (True, 1.0), 1: (False, 0.0)}[verdict.winner]
        assert (one.passing, one.score) == (not two.passing, 1 - two.score)
        assert [one.pairwise_source, two.pairwise_source] == [EvaluationSource.ORIGINAL] * 2
        first, second = (str(each.feedback).partition(".\n")[0].rstrip(".") for each in (one, two))
        numbers = [[part.split()[-1] for part in each.split(", ")] for each in (first, second)]
        assert numbers[0][:2] == numbers[1][1::-1]
    tie = evaluator.evaluate(query=QUERY, response=ONE, second_response=ONE)
    assert (tie.score, tie.passing, tie.invalid_result) == (0.5, None, False)


def test_another_prompt_another_llm_and_wrong_options_are_refused_before_a_model_is_loaded() -> None:
    nowhere = InvariantLLM("no/such-model")
    evaluator = InvariantPairwiseEvaluator(nowhere)
    assert evaluator.get_prompts() == {}
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"eval_template": DEFAULT_EVAL_TEMPLATE}, UnsupportedCombination, "eval_template.*\n.*criteria="),
        ({"parser_function": lambda text: text}, UnsupportedCombination, "parser_function"),
        ({"by": "numbers"}, UnknownName, "'letters', 'texts'"),
        ({"criteria": ["brevity"]}, InvalidPrompt, "criteria"),
    ]
    for options, error, said in wrong:
        with pytest.raises(error, match=said):
            InvariantPairwiseEvaluator(nowhere, **options)
    with pytest.raises(UnsupportedCombination, match="eval_template"):
        evaluator.update_prompts({"eval_template": DEFAULT_EVAL_TEMPLATE})
    with pytest.raises(ValueError, match="must be provided"):
        evaluator.evaluate(query=QUERY, response=ONE)
    Settings.llm = MockLLM()
    with pytest.raises(UnsupportedCombination, match="MockLLM"):
        InvariantPairwiseEvaluator()
