"""Ensembles: what they average or count, what of it ignores the order of the segments, and what it costs."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from invariant_rag import RAG, InvariantModel, Prompt, Segment, SegmentSet
from invariant_rag.ensembles import (
    AttentionSorting,
    ContextualCalibration,
    PermutationAverage,
    SelfConsistency,
    segment_attention,
)
from invariant_rag.ensembles.base import Cost, count_cost
from invariant_rag.errors import InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.testing import tiny_model
from invariant_rag.testing.rounding import assert_rounded_alike, rounding

quick = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PROMPT = Prompt([3, 4], [[5, 6], [7], [8, 9, 10], [20, 21]], [11, 12])
TWO_SETS = Prompt.of([3], SegmentSet([[5, 6], [7], [8, 9]]), [4], SegmentSet([[30], [31, 32]]), [11, 12])
CANDIDATES = [[40], [41, 42], [43]]


@pytest.fixture
def lm(golden_model):
    return InvariantModel(golden_model, method="sequential", ordering="lexical")


def ensembles(lm):
    return [
        PermutationAverage(lm),
        PermutationAverage(lm, 2, permutations="random"),
        SelfConsistency(lm, 2),
        AttentionSorting(lm, rounds=2),
    ]


def scorers(lm):
    able = [PermutationAverage(lm), AttentionSorting(lm)]
    return [*able, *(ContextualCalibration(each, [[9]]) for each in (lm, able[0]))]


def listings(prompt):
    """Every rotation of the lexical order, farthest first, written independently of the code."""
    ring = sorted((list(each.token_ids) for each in prompt.segments), reverse=True)
    return [ring[at:] + ring[:at] for at in range(len(ring))]


def step(lm, listing, prompt, written):
    plain = lm.with_method(ordering="given")
    return torch.log_softmax(plain.logits(Prompt(prompt.prefix, listing, [*prompt.suffix, *written]))[-1].double(), -1)


# --- invariance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["sequential", "rotor"])
@quick
@given(
    chosen=st.lists(st.lists(st.integers(3, 500), max_size=4), min_size=0, max_size=4),
    shuffle=st.randoms(use_true_random=False),
)
def test_a_permutation_changes_no_bit(golden_model, method, chosen, shuffle):
    lm = InvariantModel(golden_model, method=method, ordering="lexical")
    prompt = Prompt([3, 4], chosen, [11, 12])
    other = prompt.shuffled(shuffle)
    for ensemble in ensembles(lm):
        assert ensemble.invariant
        one, two = (ensemble.generate(each, max_new_tokens=2) for each in (prompt, other))
        assert (one.token_ids, one.logprobs, one.cost) == (two.token_ids, two.logprobs, two.cost)
        assert [prompt.segments[i] for i in one.order] == [other.segments[i] for i in two.order]
    for scorer in scorers(lm):
        assert scorer.invariant
        assert scorer.score(prompt, CANDIDATES) == scorer.score(other, CANDIDATES)


def test_several_sets_are_permuted_each_on_its_own(lm):
    for ensemble in ensembles(lm):
        expected = ensemble.generate(TWO_SETS, max_new_tokens=3)
        assert sorted(expected.order[:3]) == [0, 1, 2]
        assert sorted(expected.order[3:]) == [3, 4]
        for seed in range(2):
            other = ensemble.generate(TWO_SETS.shuffled(random.Random(seed)), max_new_tokens=3)
            assert (other.token_ids, other.logprobs) == (expected.token_ids, expected.logprobs)


def test_with_the_order_as_given_no_ensemble_is_invariant(lm):
    given_order, orders = lm.with_method("sequential"), list(itertools.permutations(range(4)))[::8]
    prompts = [Prompt(PROMPT.prefix, PROMPT.segments.permuted(order), PROMPT.suffix) for order in orders]
    for ensemble in ensembles(given_order):
        assert not ensemble.invariant
        assert len({ensemble.generate(each, max_new_tokens=2).logprobs for each in prompts}) > 1
    for scorer in scorers(given_order):
        assert not scorer.invariant
        assert len({tuple(scorer.score(each, CANDIDATES)) for each in prompts}) > 1


def test_sampled_answers_with_a_seed_vote_alike_for_every_order(lm):
    ensemble, options = SelfConsistency(lm), {"max_new_tokens": 3, "do_sample": True, "seed": 5}
    expected = ensemble.generate(PROMPT, **options)
    for seed in range(4):
        assert ensemble.generate(PROMPT.shuffled(random.Random(seed)), **options).votes == expected.votes
    assert ensemble.generate(PROMPT, **{**options, "seed": 6}).votes != expected.votes


# --- permutation averaging ------------------------------------------------------------------------------------------


def test_every_step_takes_the_token_of_the_largest_mean_log_probability(lm):
    result = PermutationAverage(lm).generate(PROMPT, max_new_tokens=6)
    bound = rounding(PermutationAverage(lm).generate, PROMPT, max_new_tokens=6)
    written = []
    for token, logprob in zip(result.token_ids, result.logprobs, strict=True):
        mean = torch.stack([step(lm, each, PROMPT, written) for each in listings(PROMPT)]).mean(dim=0)
        assert token == int(mean.argmax())
        assert logprob == pytest.approx(float(mean[token]), abs=bound)
        written.append(token)
    assert len(written) == 6
    alone = lm.generate(PROMPT, max_new_tokens=6)
    assert alone.token_ids != result.token_ids, "the model must be one whose answer depends on the order"


def test_a_score_is_the_mean_over_the_rotations(lm):
    plain = lm.with_method(ordering="given")
    each = [plain.score(Prompt(PROMPT.prefix, order, PROMPT.suffix), CANDIDATES) for order in listings(PROMPT)]
    expected = [sum(column) / 4 for column in zip(*each, strict=True)]
    assert PermutationAverage(lm).score(PROMPT, CANDIDATES) == pytest.approx(
        expected, abs=rounding(PermutationAverage(lm).score, PROMPT, CANDIDATES)
    )
    assert PermutationAverage(lm).score(PROMPT, []) == []


def test_rotations_put_every_segment_in_every_place_once_and_random_ones_change_with_the_seed(lm):
    places = [each.order for each in PermutationAverage(lm).permute(PROMPT)]
    assert places[0] == list(lm.prepare(PROMPT).order)
    assert [sorted(place) for place in places] == [[0, 1, 2, 3]] * 4
    assert [sorted(column) for column in zip(*places, strict=True)] == [[0, 1, 2, 3]] * 4
    assert [each.order for each in PermutationAverage(lm, 2).permute(PROMPT)] == [places[0], places[2]]
    assert len(PermutationAverage(lm, 9).permute(PROMPT)) == 4
    drawn = [PermutationAverage(lm, 9, permutations="random", seed=seed) for seed in (0, 0, 1)]
    one, same, other = [[each.order for each in average.permute(PROMPT)] for average in drawn]
    assert len(one) == 9
    assert one == same != other
    orders = {each.generate(PROMPT, max_new_tokens=1).order for each in drawn}
    assert orders == {lm.prepare(PROMPT).order}, "an average names the order that was permuted"


@pytest.mark.parametrize("segments", [[], [[5, 6, 7]]])
def test_one_segment_or_none_is_the_model_itself(lm, segments):
    prompt = Prompt([3, 4], segments, [8, 9])
    expected, result = (each.generate(prompt, max_new_tokens=2) for each in (lm, PermutationAverage(lm, 2)))
    assert result.token_ids == expected.token_ids
    assert result.logprobs == pytest.approx(expected.logprobs, abs=rounding(lm.generate, prompt, max_new_tokens=2))


def test_an_average_writes_one_text_that_stops_where_the_model_says_so():
    average = PermutationAverage(InvariantModel(tiny_model("llama", num_hidden_layers=2, eos_token_id=None)))
    for option in ({"do_sample": True}, {"num_beams": 2}, {"num_return_sequences": 3}, {"streamer": object()}):
        with pytest.raises(UnsupportedCombination, match=next(iter(option))):
            average.generate(PROMPT, **option)
    written = average.generate(PROMPT, max_new_tokens=5, num_beams=1, do_sample=False)
    assert written.finish_reason == "length"
    stopped = average.generate(PROMPT, max_new_tokens=5, eos_token_id=written.token_ids[2])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == written.token_ids[: written.token_ids.index(written.token_ids[2]) + 1]


# --- votes ----------------------------------------------------------------------------------------------------------


def test_the_answer_of_most_permutations_wins(lm):
    plain = lm.with_method(ordering="given")
    rows = [plain.generate(Prompt(PROMPT.prefix, each, PROMPT.suffix), max_new_tokens=1) for each in listings(PROMPT)]
    counts = [sum(other.token_ids == row.token_ids for other in rows) for row in rows]
    texts = [" ".join(map(str, row.token_ids)) for row in rows]
    _, expected = min(zip((-count for count in counts), texts, strict=True))
    result = SelfConsistency(lm).generate(PROMPT, max_new_tokens=1)
    assert " ".join(map(str, result.token_ids)) == expected == result.votes[0][0]
    assert dict(result.votes) == {text: texts.count(text) for text in texts}
    assert result.agreement == max(counts) / 4


def test_a_tie_goes_to_the_first_answer_in_the_alphabet(chat_llama, tokenizer):
    lm = InvariantModel(chat_llama, tokenizer, method="sequential", ordering="lexical")
    prompt, rules = Prompt("Read:", ["one", "two"], "Say:"), (str.strip, lambda _: "any")
    votes, alike = (SelfConsistency(lm, answer=rule).generate(prompt, max_new_tokens=3).votes for rule in rules)
    assert [count for _, count in votes] == [1, 1], "two permutations, two answers: a tie"
    assert votes[0][0] < votes[1][0]
    assert alike == (("any", 2),)


def test_votes_have_no_log_probabilities_and_say_what_has(lm):
    for scorer in (SelfConsistency(lm), ContextualCalibration(SelfConsistency(lm), [[9]])):
        with pytest.raises(UnsupportedCombination, match="counts votes") as caught:
            scorer.score(PROMPT, CANDIDATES)
        assert "PermutationAverage" in caught.value.hint


# --- calibration ----------------------------------------------------------------------------------------------------


def test_calibration_averages_the_content_free_probabilities_before_it_normalises_them(lm):
    """As in the published code, in its words: p_cf is a normalised mean, and W = diag(p_cf)^-1."""
    blanks = [[9], [1, 2], []]

    def label_probs(prompt):
        return np.exp(lm.score(prompt, CANDIDATES))

    p_cf = np.mean([label_probs(Prompt(PROMPT.prefix, [blank] * 4, PROMPT.suffix)) for blank in blanks], axis=0)
    p_cf = p_cf / p_cf.sum()
    probs = label_probs(PROMPT)
    expected = np.linalg.inv(np.diag(p_cf)) @ (probs / probs.sum())
    calibrated = ContextualCalibration(lm, blanks).score(PROMPT, CANDIDATES)
    assert_rounded_alike(calibrated, np.log(expected / expected.sum()))
    assert calibrated.cost.prefills == 4


def test_calibration_of_text_uses_the_published_content_free_inputs_and_leaves_no_preference_without_content(
    lm, chat_llama, tokenizer
):
    empty = Prompt([3, 4], [[9], [9]], [11, 12])
    assert max(lm.score(empty, CANDIDATES)) - min(lm.score(empty, CANDIDATES)) > 0.1
    assert_rounded_alike(ContextualCalibration(lm, [[9]]).score(empty, CANDIDATES), [math.log(1 / 3)] * 3)
    of_text = InvariantModel(chat_llama, tokenizer)
    calibration = ContextualCalibration(of_text)
    assert calibration.content_free == ("N/A", "[MASK]", "")
    prompt = of_text.chat_prompt("Why?", [Segment("It rains.", title="Weather"), "Nothing."])
    assert_rounded_alike(sum(map(math.exp, calibration.score(prompt, ["yes", "no"]))), 1.0)
    assert calibration.score(prompt, []) == []


# --- attention sorting ----------------------------------------------------------------------------------------------


def eager_attention(model, ids):
    """What transformers itself says the last token attends to: `[S]`, the mean over layers and heads."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    copy.set_attn_implementation("eager")
    with torch.no_grad():
        layers = copy.eval()(torch.tensor([ids]), output_attentions=True).attentions
    return torch.stack([layer[0, :, -1].mean(dim=0) for layer in layers]).mean(dim=0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt_oss"])
def test_the_attention_of_the_last_token_is_the_models_own(family):
    model = tiny_model(family)
    lm = InvariantModel(model, method="sequential", ordering="given")
    prompt = Prompt([3, 4], [[5, 6], [], [7], [8, 9, 10]], [11, 12])
    weights = eager_attention(model, [3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    expected = [float(weights[2:4].mean()), 0.0, float(weights[4]), float(weights[5:8].mean())]
    bound = rounding(segment_attention, lm, lm.prepare(prompt))
    assert segment_attention(lm, lm.prepare(prompt)) == pytest.approx(expected, abs=bound)


def test_each_round_puts_the_segment_with_the_most_attention_last(lm):
    plain, order = lm.with_method(ordering="given"), list(lm.prepare(PROMPT).order)
    for rounds in (1, 2, 3):
        listing = [list(PROMPT.segments[i].token_ids) for i in order]
        ids = [3, 4, *(token for each in listing for token in each), 11, 12]
        weights, start, paid = eager_attention(lm.model, ids), 2, []
        for each in listing:
            paid.append(float(weights[start : start + len(each)].mean()))
            start += len(each)
        order = [index for _, index in sorted(zip(paid, order, strict=True))]
        result = AttentionSorting(lm, rounds).generate(PROMPT, max_new_tokens=4)
        assert list(result.order) == order
        assert result.cost.prefills == rounds + 1
        expected = plain.generate(
            Prompt(PROMPT.prefix, PROMPT.segments.permuted(order), PROMPT.suffix), max_new_tokens=4
        )
        assert result.token_ids == expected.token_ids


def test_what_cannot_be_sorted_by_attention_is_refused(lm):
    """The suffix sees segments elsewhere, or attends with other weights than the model's own."""
    changed = lm.with_method("sequential", intervention="ms-poe")
    with pytest.raises(UnsupportedCombination, match="ms-poe"):
        segment_attention(changed, changed.prepare(PROMPT))
    with pytest.raises(UnsupportedCombination, match="pine"):
        AttentionSorting(lm.with_method("pine")).generate(PROMPT)
    several = {"num_return_sequences": 2, "do_sample": True}
    for options in (several, {"generation_config": GenerationConfig(**several)}):
        with pytest.raises(UnsupportedCombination, match="num_return_sequences"):
            AttentionSorting(lm).generate(PROMPT, **options)


# --- cost, and the interface ----------------------------------------------------------------------------------------


def test_the_cost_line_says_what_the_model_did(lm):
    length = len(lm.prepare(PROMPT).input_ids)
    cost = PermutationAverage(lm).generate(PROMPT, max_new_tokens=3).cost
    assert (cost.prefills, cost.passes, cost.tokens, cost.calls) == (4, 4 + 4 * 3, 4 * length + 4 * 3, 4 + 3)
    assert str(cost) == f"4 prefills, 16 forward passes, {4 * length + 12} tokens, 7 calls"
    cost = SelfConsistency(lm, 2).generate(PROMPT, max_new_tokens=3).cost
    assert (cost.prefills, cost.passes, cost.calls) == (2, 2 + 2 * 3, 2 + 3)
    cost = PermutationAverage(lm).score(PROMPT, CANDIDATES).cost
    assert (cost.prefills, cost.passes, cost.tokens, cost.calls) == (4, 4 + 4 * 3, 4 * length + 4 * 3 * 2, 4 + 4)


def test_counting_leaves_the_model_as_it_was(lm):
    before = lm.generate(PROMPT, max_new_tokens=3)
    with pytest.raises(RuntimeError), count_cost(lm.model):
        raise RuntimeError
    with count_cost(lm.model) as counter:
        lm.model(torch.ones((3, 5), dtype=torch.long))
    assert counter.cost == Cost(prefills=3, passes=3, tokens=15, calls=1)
    PermutationAverage(lm).generate(PROMPT, max_new_tokens=2)
    assert not lm.model._forward_pre_hooks
    assert lm.generate(PROMPT, max_new_tokens=3) == before


def test_several_prompts_are_answered_as_each_alone(lm):
    for ensemble in ensembles(lm):
        single = [ensemble.generate(each, max_new_tokens=2) for each in (PROMPT, TWO_SETS)]
        assert ensemble.generate([PROMPT, TWO_SETS], max_new_tokens=2) == single


def test_a_generation_config_says_how_long_where_nothing_else_does(lm):
    config = GenerationConfig(max_new_tokens=3)
    for ensemble in (SelfConsistency(lm), AttentionSorting(lm)):
        expected = ensemble.generate(PROMPT, max_new_tokens=3)
        assert ensemble.generate(PROMPT, generation_config=config).token_ids == expected.token_ids
        assert len(ensemble.generate(PROMPT, max_new_tokens=2, generation_config=config).token_ids) <= 2


def test_segments_that_do_not_fit_are_left_out_of_every_permutation(llama):
    lm = InvariantModel(llama, overflow="drop_last")
    prompt = Prompt([3], [[5] * 200, [6] * 200, [7] * 200], [8])
    expected = lm.generate(prompt, max_new_tokens=2)
    assert len(expected.dropped) == 1
    for ensemble in ensembles(lm):
        result = ensemble.generate(prompt, max_new_tokens=2)
        assert result.dropped == expected.dropped
        assert set(result.order) == set(expected.order)


def test_a_rag_pipeline_takes_an_ensemble(chat_llama, tokenizer):
    class Fixed:
        def retrieve(self, query, k):
            return SegmentSet(["one", "two", "three"])

    ensemble = PermutationAverage(InvariantModel(chat_llama, tokenizer))
    answer = RAG(ensemble, Fixed(), k=3).ask("Why?", max_new_tokens=2)
    assert answer.generation.cost.prefills == 3
    assert sorted(answer.order) == [0, 1, 2]


def test_senseless_numbers_and_names_are_refused(lm):
    with pytest.raises(InvalidChoice, match="count"):
        PermutationAverage(lm, 0)
    with pytest.raises(InvalidChoice, match="rounds"):
        AttentionSorting(lm, 0)
    with pytest.raises(InvalidChoice, match="content_free"):
        ContextualCalibration(lm, [])
    with pytest.raises(UnknownName, match="'random', 'rotations'"):
        SelfConsistency(lm, permutations="some")
