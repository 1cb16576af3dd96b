from __future__ import annotations

from typing import Any

import pytest
from cases import QUERY
from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import UnsupportedCombination
from llama_index.core import Settings
from llama_index.core.evaluation import BaseEvaluator, PairwiseComparisonEvaluator
from llama_index.core.evaluation.pairwise import EvaluationSource
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate

from llama_index.evaluation.invariant_rag import InvariantPairwiseEvaluator
from llama_index.llms.invariant_rag import InvariantLLM

ONE, OTHER = "It leaves at noon.", "At ten, from Ostra."


VERDICTS = {"A": (True, 1.0), "B": (False, 0.0), "tie": (None, 0.5)}


def says(verdict: str) -> Any:
    """A parser that reads this verdict in every text: a random model writes none."""
    return lambda text: (*VERDICTS[verdict], text)


class RecordingModel(InvariantModel):
    """The model, and what it was given."""

    def __init__(self, other: InvariantModel) -> None:
        self.__dict__.update(other.__dict__)
        self.prompts: list[Prompt] = []
        self.inputs: list[tuple[int, ...]] = []

    def generate(self, prompt: Any, **kwargs: Any) -> Any:
        self.prompts.append(prompt)
        self.inputs.append(self.prepare(prompt).input_ids)
        return super().generate(prompt, **kwargs)


def judge(model: InvariantModel, **options: Any) -> InvariantPairwiseEvaluator:
    return InvariantPairwiseEvaluator(InvariantLLM(model, max_tokens=12), **options)


def test_it_is_a_pairwise_comparison_evaluator() -> None:
    names = [base.__name__ for base in InvariantPairwiseEvaluator.__mro__]
    assert {BaseEvaluator.__name__, PairwiseComparisonEvaluator.__name__} < set(names)


def test_it_asks_once_where_llama_index_asks_twice(model: InvariantModel) -> None:
    recording = RecordingModel(model)
    judge(recording, parser_function=says("tie")).evaluate(query=QUERY, response=ONE, second_response=OTHER)
    assert len(recording.prompts) == 1
    assert len(recording.prompts[0].sets) == 1
    assert sorted(ONE in each.text for each in recording.prompts[0].segments) == [False, True]
    stock = PairwiseComparisonEvaluator(InvariantLLM(recording, max_tokens=12), parser_function=says("tie"))
    stock.evaluate(query=QUERY, response=ONE, second_response=OTHER)
    assert len(recording.prompts) == 3


def test_swapped_answers_are_the_same_input_bit_for_bit(model: InvariantModel) -> None:
    recording = RecordingModel(model)
    results = [
        judge(recording).evaluate(query=QUERY, response=a, second_response=b, reference="noon")
        for a, b in ((ONE, OTHER), (OTHER, ONE))
    ]
    assert recording.prompts[0].segments[0] == recording.prompts[1].segments[1]  # given in another order
    assert recording.prompts[0].segments[0] != recording.prompts[1].segments[0]
    assert recording.inputs[0] == recording.inputs[1]
    assert results[0].feedback == results[1].feedback


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_swap_turns_the_result_around(model: InvariantModel, verdict: str) -> None:
    evaluator = judge(model, parser_function=says(verdict))
    first = evaluator.evaluate(query=QUERY, response=ONE, second_response=OTHER)
    second = evaluator.evaluate(query=QUERY, response=OTHER, second_response=ONE)
    assert first.score == 1 - second.score
    assert first.passing == (None if verdict == "tie" else not second.passing)
    assert {first.pairwise_source, second.pairwise_source} == {EvaluationSource.ORIGINAL, EvaluationSource.FLIPPED}


def test_the_letter_that_wins_is_the_answer_that_wins(model: InvariantModel) -> None:
    recording = RecordingModel(model)
    result = judge(recording, parser_function=says("A")).evaluate(query=QUERY, response=ONE, second_response=OTHER)
    [winner] = [each.text for each in recording.prompts[0].segments if "Assistant A" in each.text]
    assert (result.score, result.passing) == ((1.0, True) if ONE in winner else (0.0, False))


def test_what_is_no_verdict_is_invalid(model: InvariantModel) -> None:
    result = judge(model).evaluate(query=QUERY, response=OTHER, second_response=ONE)
    assert result.invalid_result
    assert result.score is None


def test_equal_answers_are_a_tie_without_a_call(model: InvariantModel) -> None:
    recording = RecordingModel(model)
    result = judge(recording).evaluate(query=QUERY, response=ONE, second_response=ONE)
    assert (result.score, result.passing, recording.prompts) == (0.5, None, [])


def test_a_template_and_a_parser_of_ones_own_work(model: InvariantModel) -> None:
    recording = RecordingModel(model)
    template = "{query} {reference}\n{answer_1}\nor\n{answer_2}\n?"
    evaluator = judge(recording, eval_template=template, parser_function=says("A"))
    assert evaluator.evaluate(query=QUERY, response=ONE, second_response=OTHER).score in (0.0, 1.0)
    assert len(recording.prompts[0].sets) == 2
    evaluator.update_prompts({"eval_template": PromptTemplate("{query}{answer_1}{answer_2}?")})
    evaluator.evaluate(query=QUERY, response=ONE, second_response=OTHER)
    assert len(recording.prompts[1].sets) == 1


def test_what_is_missing_is_said(model: InvariantModel) -> None:
    with pytest.raises(ValueError, match="second_response"):
        judge(model).evaluate(query=QUERY, response=ONE)


def test_another_llm_is_refused_by_name() -> None:
    Settings.llm = MockLLM()
    with pytest.raises(UnsupportedCombination, match="MockLLM"):
        InvariantPairwiseEvaluator()
