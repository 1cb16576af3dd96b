from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import pytest
from cases import QUERY
from invariant_rag import CapCal, InvariantModel, Judge
from invariant_rag.errors import InvalidChoice, InvalidPrompt, UnknownName, UnsupportedCombination
from llama_index.core import Settings
from llama_index.core.evaluation import BaseEvaluator, BatchEvalRunner, PairwiseComparisonEvaluator, batch_runner
from llama_index.core.evaluation.pairwise import DEFAULT_EVAL_TEMPLATE, EvaluationSource
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate
from tenacity import wait_none

from llama_index.evaluation.invariant_rag import InvariantPairwiseEvaluator
from llama_index.llms.invariant_rag import InvariantLLM

ONE, OTHER = "It leaves at noon.", "At ten, from Ostra."
NAMES = ["response", "second_response"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"by": "texts"},
    {"criteria": {"brevity": "Is it short?", "depth": ""}},
    {"calibration": CapCal("adaptive")},
]


@pytest.fixture(scope="module", params=["tiny", "plain", "embedded"])
def judging_llm(request: pytest.FixtureRequest, model: InvariantModel, plain_model: InvariantModel) -> InvariantLLM:
    """A tiny random model, the same weights without any invariance of their own, and the embedded model."""
    models = {"tiny": model, "plain": plain_model, "embedded": None}
    return InvariantLLM(models[request.param], max_tokens=8)


def test_it_is_a_pairwise_comparison_evaluator() -> None:
    names = [base.__name__ for base in InvariantPairwiseEvaluator.__mro__]
    assert {BaseEvaluator.__name__, PairwiseComparisonEvaluator.__name__} < set(names)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_result_holds_the_probabilities_of_the_judge(judging_llm: InvariantLLM, options: dict[str, Any]) -> None:
    verdict = Judge(judging_llm.lm, **options).compare(QUERY, ONE, OTHER, reference="noon")
    evaluator = InvariantPairwiseEvaluator(judging_llm, **options)
    result = evaluator.evaluate(query=QUERY, response=ONE, second_response=OTHER, reference="noon")
    first, second = verdict.probabilities
    assert result.feedback == f"Probability of being the best: response {first!r}, second_response {second!r}."
    assert (result.passing, result.score) == {0: (True, 1.0), 1: (False, 0.0), None: (None, 0.5)}[verdict.winner]
    assert (result.query, result.response) == (QUERY, result.feedback)
    assert (result.pairwise_source, result.invalid_result) == (EvaluationSource.ORIGINAL, False)
    assert evaluator.judge.compare(QUERY, ONE, OTHER, reference="noon") == verdict


@pytest.mark.parametrize("options", OPTIONS)
def test_swapping_the_answers_swaps_the_result_exactly(judging_llm: InvariantLLM, options: dict[str, Any]) -> None:
    evaluator = InvariantPairwiseEvaluator(judging_llm, **options)
    one, two = (
        evaluator.evaluate(query=QUERY, response=a, second_response=b, reference="noon")
        for a, b in ((ONE, OTHER), (OTHER, ONE))
    )
    assert {(one.score, one.passing), (two.score, two.passing)} == {(1.0, True), (0.0, False)}
    first, second = (str(result.feedback).removesuffix(".").split(", second_response ") for result in (one, two))
    heading = "Probability of being the best: response "
    assert [heading + first[1], first[0].removeprefix(heading)] == second


def test_an_explanation_is_the_judges_in_both_orders(judging_llm: InvariantLLM) -> None:
    verdict = Judge(judging_llm.lm).compare(QUERY, ONE, OTHER, explain=True, max_new_tokens=8)
    assert verdict.explanation is not None
    evaluator = InvariantPairwiseEvaluator(judging_llm, explain=True)
    one, two = (
        str(evaluator.evaluate(query=QUERY, response=a, second_response=b).feedback)
        for a, b in ((ONE, OTHER), (OTHER, ONE))
    )
    assert one == verdict.describe(NAMES)
    assert one.endswith(f"With response as B, second_response as A: {verdict.explanation}")
    assert two.endswith(f"With response as A, second_response as B: {verdict.explanation}")


def test_nothing_is_generated_and_consensus_needs_no_second_call(model: InvariantModel) -> None:
    calls: list[str] = []

    class Recording(InvariantModel):
        def score(self, prompt: Any, candidates: Any) -> list[float]:
            calls.append("score")
            return super().score(prompt, candidates)

        def generate(self, prompt: Any, **kwargs: Any) -> Any:
            calls.append("generate")
            return super().generate(prompt, **kwargs)

    llm = InvariantLLM(Recording(model.model, model.tokenizer), max_tokens=8)
    for enforce_consensus in (True, False):
        evaluator = InvariantPairwiseEvaluator(llm, enforce_consensus=enforce_consensus)
        evaluator.evaluate(query=QUERY, response=ONE, second_response=OTHER)
    assert calls == ["score", "score"]
    InvariantPairwiseEvaluator(llm, explain=True).evaluate(query=QUERY, response=ONE, second_response=OTHER)
    assert calls[2:] == ["score", "generate"]


def test_equal_answers_tie(judging_llm: InvariantLLM) -> None:
    result = InvariantPairwiseEvaluator(judging_llm).evaluate(query=QUERY, response=ONE, second_response=ONE)
    assert (result.score, result.passing, result.invalid_result) == (0.5, None, False)


async def test_the_event_loop_goes_on_while_the_model_scores(model: InvariantModel) -> None:
    scoring, seen_by_the_loop = Event(), Event()

    class Waiting(InvariantModel):
        def score(self, prompt: Any, candidates: Any) -> list[float]:
            scoring.set()
            assert seen_by_the_loop.wait(timeout=5), "the event loop is blocked"
            return super().score(prompt, candidates)

    async def watch() -> None:
        while not scoring.is_set():
            await asyncio.sleep(0.01)
        seen_by_the_loop.set()

    evaluator = InvariantPairwiseEvaluator(InvariantLLM(Waiting(model.model, model.tokenizer)))
    asked = evaluator.aevaluate(query=QUERY, response=ONE, second_response=OTHER)
    result, _ = await asyncio.gather(asked, watch())
    assert result.score in (0.0, 1.0)


@pytest.mark.parametrize("name", ["eval_template", "parser_function"])
def test_a_template_and_a_parser_are_refused_with_what_to_use_instead(model: InvariantModel, name: str) -> None:
    values: dict[str, Any] = {"eval_template": "{query} {answer_1} {answer_2}", "parser_function": lambda text: text}
    with pytest.raises(UnsupportedCombination, match=name) as caught:
        InvariantPairwiseEvaluator(InvariantLLM(model), **{name: values[name]})
    assert "criteria=" in caught.value.hint


def test_there_is_no_prompt_to_get_or_update(model: InvariantModel) -> None:
    evaluator = InvariantPairwiseEvaluator(InvariantLLM(model))
    assert evaluator.get_prompts() == {}
    with pytest.raises(UnsupportedCombination, match="eval_template"):
        evaluator.update_prompts({"eval_template": PromptTemplate("{query}{answer_1}{answer_2}?")})


@pytest.mark.filterwarnings("ignore:asyncio_module:DeprecationWarning")  # LlamaIndex's runner calls it
async def test_llama_index_s_own_template_is_refused_wherever_it_comes_in(
    model: InvariantModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner.eval_worker.retry, "wait", wait_none())  # else 8 s: it tries three times
    llm = InvariantLLM(model)
    with pytest.raises(UnsupportedCombination, match="eval_template"):
        InvariantPairwiseEvaluator(llm, DEFAULT_EVAL_TEMPLATE)
    evaluator = InvariantPairwiseEvaluator(llm)
    for keywords in ({"eval_template": DEFAULT_EVAL_TEMPLATE}, {"parser_function": lambda text: text}):
        with pytest.raises(UnsupportedCombination, match=next(iter(keywords))):
            await evaluator.aevaluate(query=QUERY, response=ONE, second_response=OTHER, **keywords)
    runner = BatchEvalRunner({"pairwise": evaluator})
    with pytest.raises(UnsupportedCombination, match="eval_template"):
        await runner.aevaluate_response_strs(
            [QUERY], [ONE], second_response=[OTHER], eval_template=[DEFAULT_EVAL_TEMPLATE]
        )


@pytest.mark.parametrize("enforce_consensus", [True, False])
async def test_what_a_subclass_takes_from_llama_index_is_judged_too(
    judging_llm: InvariantLLM, enforce_consensus: bool
) -> None:
    class Own(InvariantPairwiseEvaluator):
        """Goes back to LlamaIndex's evaluation, with LlamaIndex's own template."""

        async def aevaluate(self, *args: Any, **kwargs: Any) -> Any:
            return await PairwiseComparisonEvaluator.aevaluate(self, *args, **kwargs)

    evaluator = Own(judging_llm, enforce_consensus=enforce_consensus)
    evaluator._eval_template = DEFAULT_EVAL_TEMPLATE
    for first, second in ((f"At {hour}.", f"It leaves at {hour}.") for hour in range(6)):
        expected = Judge(judging_llm.lm).compare(QUERY, first, second).winner
        one = await evaluator.aevaluate(query=QUERY, response=first, second_response=second)
        two = await evaluator.aevaluate(query=QUERY, response=second, second_response=first)
        assert one.score == 1 - two.score == {0: 1.0, 1: 0.0, None: 0.5}[expected]


def test_a_routed_judge_swaps_exactly(model: InvariantModel) -> None:
    evaluator = InvariantPairwiseEvaluator(InvariantLLM(model.with_routing(0.0)))
    one, two = (
        evaluator.evaluate(query=QUERY, response=first, second_response=second)
        for first, second in ((ONE, OTHER), (OTHER, ONE))
    )
    assert one.score == 1 - two.score


def test_what_is_missing_is_said(model: InvariantModel) -> None:
    with pytest.raises(InvalidPrompt, match="None for second_response"):
        InvariantPairwiseEvaluator(InvariantLLM(model)).evaluate(query=QUERY, response=ONE)


def test_another_llm_is_refused_by_name() -> None:
    Settings.llm = MockLLM()
    with pytest.raises(UnsupportedCombination, match="MockLLM"):
        InvariantPairwiseEvaluator()


def test_wrong_options_are_refused_before_a_model_is_loaded() -> None:
    nowhere = InvariantLLM("no/such-model")
    InvariantPairwiseEvaluator(nowhere)
    with pytest.raises(UnknownName, match="'letters', 'texts'"):
        InvariantPairwiseEvaluator(nowhere, by="numbers")  # type: ignore[arg-type]
    with pytest.raises(InvalidPrompt, match="criteria"):
        InvariantPairwiseEvaluator(nowhere, criteria=["brevity"])  # type: ignore[arg-type]
    with pytest.raises(UnsupportedCombination, match="letters"):
        InvariantPairwiseEvaluator(nowhere, by="texts", calibration=CapCal())
    with pytest.raises(InvalidChoice, match="CapCal"):
        InvariantPairwiseEvaluator(nowhere, calibration=1.0)  # type: ignore[arg-type]
