"""What is asked: the model, with an intervention, routed, or an ensemble over it; and what a record holds of it."""

import json
import math
import os
from pathlib import Path

import pytest
from invariant_rag import InvariantModel, Prompt
from invariant_rag.ensembles import PermutationAverage, RingAverage, SelfConsistency
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.interventions import HiddenScaling
from invariant_rag.testing.rounding import rounding

from invariant_rag_benchmarks import BENCHMARKS, Selection
from invariant_rag_benchmarks.config import ENSEMBLES, BenchmarkConfig
from invariant_rag_benchmarks.data import DataSource
from invariant_rag_benchmarks.runner import Answerer, collisions, perplexity

PLAIN = {"method": "sequential", "ordering": "given"}


@pytest.fixture
def answer(lm, load):
    """Return the first case of a benchmark, its record, and the model that was asked."""

    def answered(name, **options):
        config = BenchmarkConfig(name, max_new_tokens=3, **options)
        configured = config.configure(lm)
        case = load(name)[0]
        return case, Answerer(config, configured)([case])[0], configured

    return answered


def test_every_ensemble_answers_where_it_can(answer, lm):
    for name in [each for each in ENSEMBLES if each != "self-consistency"]:  # which votes over texts
        case, record, _ = answer("mmlu", ensemble=name)
        assert record["output"] in case.candidates, name
    case, record, configured = answer("mmlu", ensemble="ring-average")
    assert record["logprobs"] == RingAverage(configured).score(case.prompt(lm), case.candidates)
    for ensemble, name, options in (
        (SelfConsistency, "xquad", {"ensemble": "self-consistency"}),
        (PermutationAverage, "reward-bench", {**PLAIN, "ensemble": "permutation-average"}),  # PINE's baseline
    ):
        case, record, configured = answer(name, **options)
        assert record["output"] == ensemble(configured).generate(case.prompt(lm), max_new_tokens=3).text


def test_what_cannot_be_asked_is_refused_before_or_at_the_first_case(answer):
    with pytest.raises(UnsupportedCombination, match="ContextualCalibration, which generates no text"):
        answer("xquad", ensemble="contextual-calibration")
    with pytest.raises(UnsupportedCombination, match="first_layer"):  # by its name, ms-poe skips two layers
        answer("mmlu", method="sequential", intervention="ms-poe")


def test_an_intervention_is_a_name_or_a_file_of_parameters(answer, lm, tmp_path):
    scaling, path = HiddenScaling(5, -1.0, [0, 1]), tmp_path / "scaling.json"
    scaling.save(path)
    config = BenchmarkConfig("mmlu", method="sequential", intervention=str(path))
    assert config.configure(lm).intervention == config.choices["intervention"] == scaling
    case, record, _ = answer("xquad", **PLAIN, intervention=str(path))
    scaled = lm.with_method(**PLAIN, intervention=scaling)
    assert record["output"] == scaled.generate(case.prompt(lm), max_new_tokens=3).text
    path.write_text("{}")
    with pytest.raises(InvalidChoice, match="dimensions, factor and layers"):
        BenchmarkConfig("mmlu", method="sequential", intervention=str(path))


def test_perplexity_is_that_of_the_generated_tokens(answer, lm):
    assert perplexity([math.log(0.5), math.log(0.125)]) == pytest.approx(4)
    assert perplexity([]) == 1
    case, record, configured = answer("xquad")
    assert record["perplexity"] == perplexity(configured.generate(case.prompt(lm), max_new_tokens=3).logprobs)


def test_segments_collide_where_an_ordering_has_equal_keys_and_orderings_that_place_nothing_have_no_collisions(
    answer, lm
):
    for segments, ordering, expected in (
        (["one", "two", "six"], "lexical", 0),
        (["one", "two", "one", "one"], "lexical", 0.5),
        (["ab", "cd", "xyz"], "frequency", 1 / 3),
        ([], "lexical", 0),
    ):
        assert collisions(lm.with_method(ordering=ordering), Prompt("", segments, "?")) == pytest.approx(expected)
    assert answer("xquad")[1]["collisions"] == 0
    assert "collisions" not in answer("xquad", method="pine")[1].keys() | answer("xquad", **PLAIN)[1].keys()


MMLU = Path(os.environ.get("INVARIANT_RAG_DATA", "")) / "mmlu_validation.json"


@pytest.mark.skipif(not MMLU.is_file(), reason="INVARIANT_RAG_DATA has no mmlu_validation.json")
def test_the_embedded_model_still_gives_the_stored_scores_of_mmlu():
    """The scores that the core's tests of routing start from."""
    stored = json.loads((Path(__file__).parents[2] / "tests" / "mmlu_scores.json").read_text())
    lm, mmlu = InvariantModel.from_pretrained(), BENCHMARKS["mmlu"]
    cases = mmlu.load(DataSource(MMLU), mmlu.parse_settings({"orders": "0"}), Selection(171, 0))
    for case, each in list(zip(cases, stored, strict=False))[:8]:
        prompt, routing = case.prompt(lm), lm.with_routing(-2)
        routed = routing.score(prompt, case.candidates)
        bound = rounding(routing.score, prompt, case.candidates) + 0.00005  # four decimals are stored
        assert routed.rejected == pytest.approx(each["plain"], abs=bound)
        assert [*routed] == pytest.approx(each["invariant"], abs=bound)
