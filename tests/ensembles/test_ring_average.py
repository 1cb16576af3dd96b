"""Ring averaging: one reading of the segments gives what reading every rotation gives."""

from __future__ import annotations

import random

import pytest

from invariant_rag import InvariantModel, Prompt
from invariant_rag.ensembles import PermutationAverage, RingAverage
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding

PROMPT = random_prompt(random.Random(0), (3, 5, 1, 4, 2), prefix=4, suffix=3)
CANDIDATES = [[5, 6], [7], [8, 9, 10]]


@pytest.fixture(scope="module")
def lm():
    return InvariantModel(tiny_model("llama", eos_token_id=None))


@pytest.mark.parametrize(("family", "cuts"), [("llama", 2), ("llama", 3), ("qwen3", None), ("glm4", 1)])
def test_it_is_the_average_over_rotations_for_one_prefill(family, cuts):
    lm = InvariantModel(tiny_model(family, eos_token_id=None))
    ring, every = RingAverage(lm, cuts), PermutationAverage(lm, cuts)
    one, other = ring.generate(PROMPT, max_new_tokens=4), every.generate(PROMPT, max_new_tokens=4)
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=rounding(every.generate, PROMPT, max_new_tokens=4))
    assert one.order == other.order
    scores, expected = ring.score(PROMPT, CANDIDATES), every.score(PROMPT, CANDIDATES)
    assert scores == pytest.approx(expected, abs=rounding(every.score, PROMPT, CANDIDATES))
    assert one.cost.prefills == scores.cost.prefills == 1
    assert other.cost.prefills == (cuts or 5)


def test_one_cut_is_rotor_and_several_are_not(lm):
    plain = lm.score(PROMPT, [[5, 6]])
    assert RingAverage(lm, 1).score(PROMPT, [[5, 6]]) == pytest.approx(plain, abs=rounding(lm.score, PROMPT, [[5, 6]]))
    assert RingAverage(lm, 3).score(PROMPT, [[5, 6]]) != pytest.approx(plain, abs=1e-2)


def test_a_permutation_changes_no_bit_and_over_all_cuts_the_ordering_decides_about_neighbours_only(lm):
    ring, shuffled = RingAverage(lm, 3), PROMPT.shuffled(random.Random(3))
    assert ring.generate(PROMPT, max_new_tokens=5).logprobs == ring.generate(shuffled, max_new_tokens=5).logprobs
    assert ring.score(PROMPT, [[5, 6]]) == ring.score(shuffled, [[5, 6]])
    segments = list(PROMPT.segments)  # a rotation of the ordering is the same ring
    turned = Prompt(PROMPT.prefix, segments[2:] + segments[:2], PROMPT.suffix)
    given = lm.with_method(ordering="given")
    every = [RingAverage(given).score(each, [[5, 6]]) for each in (PROMPT, turned)]
    assert every[0] == pytest.approx(every[1], abs=rounding(RingAverage(given).score, PROMPT, [[5, 6]]))
    one = [given.score(each, [[5, 6]]) for each in (PROMPT, turned)]
    assert one[0] != pytest.approx(one[1], abs=1e-2)


def test_what_has_no_ring_or_would_mix_two_is_refused(lm):
    windows, growing = (
        InvariantModel(tiny_model(each)) for each in ("mistral (sliding window)", "llama (dynamic scaling)")
    )
    for model, said in (
        (lm.with_method("pine"), "got 'pine'"),
        (windows, "whole context"),
        (growing, "grow"),
        (lm.with_routing(), "routing"),
    ):
        with pytest.raises(UnsupportedCombination, match=said):
            RingAverage(model)
    with pytest.raises(UnsupportedCombination, match="routing"):
        PermutationAverage(lm.with_routing())
    with pytest.raises(InvalidChoice, match="at least 1"):
        RingAverage(lm, 0)
    with pytest.raises(UnsupportedCombination, match="num_beams"):
        RingAverage(lm).generate(PROMPT, num_beams=2)


def test_a_model_that_pads_or_beams_by_itself_changes_nothing():
    model = tiny_model("llama", eos_token_id=None)
    lm, prompt = InvariantModel(model), Prompt([10, 0, 12], [[5, 0], [7, 8, 0]], [0, 9])
    greedy = RingAverage(lm, 1).generate(prompt, max_new_tokens=4)
    bound = rounding(lm.generate, prompt, max_new_tokens=4)
    model.generation_config.pad_token_id = 0  # which is a token of the prompt here
    padded = RingAverage(lm, 1).generate(prompt, max_new_tokens=4)
    assert padded.logprobs == pytest.approx(lm.generate(prompt, max_new_tokens=4).logprobs, abs=bound)
    model.generation_config.num_beams = 3
    assert RingAverage(lm, 1).generate(prompt, max_new_tokens=4) == greedy == padded


@pytest.mark.parametrize("segments", [[], [[], []]])
def test_a_suffix_alone_is_the_plain_model(segments, lm):
    prompt = Prompt([], segments, [3, 4])
    written = RingAverage(lm).generate(prompt, max_new_tokens=4)
    assert written.token_ids == lm.generate(prompt, max_new_tokens=4).token_ids
    expected, bound = lm.score(prompt, [[5], [6]]), rounding(lm.score, prompt, [[5], [6]])
    assert list(RingAverage(lm).score(prompt, [[5], [6]])) == pytest.approx(expected, abs=bound)
