"""Ring averaging: one reading of the segments gives what reading every rotation gives."""

from __future__ import annotations

import random

import pytest
from transformers import PreTrainedModel

from invariant_rag import InvariantModel, Prompt
from invariant_rag.ensembles import PermutationAverage, RingAverage
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding

PROMPT = random_prompt(random.Random(0), (3, 5, 1, 4, 2), prefix=4, suffix=3)


@pytest.fixture(scope="module")
def lm() -> InvariantModel:
    return InvariantModel(tiny_model("llama", eos_token_id=None))


@pytest.mark.parametrize("cuts", [1, 2, 3, None])
@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4"])
def test_it_is_the_average_over_rotations_for_one_prefill(cuts: int | None, family: str) -> None:
    lm = InvariantModel(tiny_model(family, eos_token_id=None))
    ring, every = RingAverage(lm, cuts), PermutationAverage(lm, cuts)
    one, other = ring.generate(PROMPT, max_new_tokens=6), every.generate(PROMPT, max_new_tokens=6)
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=rounding(every.generate, PROMPT, max_new_tokens=6))
    assert one.order == other.order
    assert one.cost.prefills == 1
    assert other.cost.prefills == (cuts or 5)
    candidates = [[5, 6], [7]]
    assert ring.score(PROMPT, candidates) == pytest.approx(
        every.score(PROMPT, candidates), abs=rounding(every.score, PROMPT, candidates)
    )


def test_one_cut_is_rotor_and_several_are_not(lm: InvariantModel) -> None:
    plain = lm.score(PROMPT, [[5, 6]])
    assert RingAverage(lm, 1).score(PROMPT, [[5, 6]]) == pytest.approx(plain, abs=rounding(lm.score, PROMPT, [[5, 6]]))
    assert RingAverage(lm, 3).score(PROMPT, [[5, 6]]) != pytest.approx(plain, abs=1e-2)


def test_a_permutation_changes_no_bit(lm: InvariantModel) -> None:
    ring, shuffled = RingAverage(lm, 3), PROMPT.shuffled(random.Random(3))
    assert ring.generate(PROMPT, max_new_tokens=5).logprobs == ring.generate(shuffled, max_new_tokens=5).logprobs
    assert ring.score(PROMPT, [[5, 6]]) == ring.score(shuffled, [[5, 6]])


def test_over_all_cuts_the_ordering_decides_about_neighbours_only(lm: InvariantModel) -> None:
    """A rotation of the ordering is the same ring, so the average over all cuts is the same."""
    segments = list(PROMPT.segments)
    turned = Prompt(PROMPT.prefix, segments[2:] + segments[:2], PROMPT.suffix)
    given = lm.with_method(ordering="given")
    every = [RingAverage(given).score(each, [[5, 6]]) for each in (PROMPT, turned)]
    assert every[0] == pytest.approx(every[1], abs=rounding(RingAverage(given).score, PROMPT, [[5, 6]]))
    one = [given.score(each, [[5, 6]]) for each in (PROMPT, turned)]
    assert one[0] != pytest.approx(one[1], abs=1e-2)


def test_what_has_no_ring_is_refused(lm: InvariantModel, mistral: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedCombination, match="got 'pine'"):
        RingAverage(lm.with_method("pine"))
    with pytest.raises(UnsupportedCombination, match="whole context"):
        RingAverage(InvariantModel(mistral))
    with pytest.raises(InvalidChoice, match="at least 1"):
        RingAverage(lm, 0)
    with pytest.raises(UnsupportedCombination, match="num_beams"):
        RingAverage(lm).generate(PROMPT, num_beams=2)


@pytest.fixture
def mistral() -> PreTrainedModel:
    return tiny_model("mistral (sliding window)")


def test_tokens_that_pad_elsewhere_are_tokens_here() -> None:
    model = tiny_model("llama", eos_token_id=None)
    model.generation_config.pad_token_id = 0
    lm, prompt = InvariantModel(model), Prompt([10, 0, 12], [[5, 0], [7, 8, 0]], [0, 9])
    written = RingAverage(lm, cuts=1).generate(prompt, max_new_tokens=4)
    assert written.logprobs == pytest.approx(
        lm.generate(prompt, max_new_tokens=4).logprobs, abs=rounding(lm.generate, prompt, max_new_tokens=4)
    )


def test_a_models_own_beams_are_left_to_the_model() -> None:
    model = tiny_model("llama", eos_token_id=None)
    greedy = RingAverage(InvariantModel(model)).generate(PROMPT, max_new_tokens=4)
    model.generation_config.num_beams = 3
    assert RingAverage(InvariantModel(model)).generate(PROMPT, max_new_tokens=4) == greedy


def test_candidates_share_one_prefill(lm: InvariantModel) -> None:
    average = RingAverage(lm)
    together = average.score(PROMPT, [[5, 6], [7], [8, 9, 10]])
    assert together.cost.prefills == 1
    alone = [average.score(PROMPT, [each])[0] for each in ([5, 6], [7], [8, 9, 10])]
    assert list(together) == pytest.approx(alone, abs=rounding(average.score, PROMPT, [[5, 6], [7], [8, 9, 10]]))


@pytest.mark.parametrize("prompt", [Prompt([], [], [3, 4]), Prompt([], [[], []], [3, 4])])
def test_a_suffix_alone_is_the_plain_model(prompt: Prompt, lm: InvariantModel) -> None:
    written = RingAverage(lm).generate(prompt, max_new_tokens=4)
    assert written.token_ids == lm.generate(prompt, max_new_tokens=4).token_ids
    assert list(RingAverage(lm).score(prompt, [[5], [6]])) == pytest.approx(
        lm.score(prompt, [[5], [6]]), abs=rounding(lm.score, prompt, [[5], [6]])
    )


def test_what_two_branches_or_growing_rotations_would_mix_is_refused(lm: InvariantModel) -> None:
    with pytest.raises(UnsupportedCombination, match="grow"):
        RingAverage(InvariantModel(tiny_model("llama (dynamic scaling)")))
    for ensemble in (RingAverage, PermutationAverage):
        with pytest.raises(UnsupportedCombination, match="routing"):
            ensemble(lm.with_routing())
