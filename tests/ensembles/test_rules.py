"""What each ensemble computes: the mean, the vote, calibration, sorting, and the experts' rule, as published."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from scipy.special import rel_entr

from invariant_rag import ContextExperts, InvariantModel, Prompt, Segment
from invariant_rag.ensembles import (
    AttentionSorting,
    ContextualCalibration,
    PermutationAverage,
    RingAverage,
    SelfConsistency,
    segment_attention,
)
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.rounding import assert_rounded_alike
from tests.comparing import assert_computes

DOCUMENTS = [([5, 6], 0.9), ([7], 0.2), ([8, 9, 10], 0.5), ([20, 21], 0.85)]
PROMPT = Prompt([3, 4], [Segment(token_ids=tuple(ids), score=score) for ids, score in DOCUMENTS], [11, 12])
CANDIDATES = [[40], [41, 42], [43]]


@pytest.fixture
def lm(golden_model):
    return InvariantModel(golden_model, method="sequential", ordering="lexical")


def listings():
    """Every rotation of the lexical order, farthest first, written independently of the code."""
    ring = sorted((ids for ids, _ in DOCUMENTS), reverse=True)
    return [Prompt(PROMPT.prefix, ring[at:] + ring[:at], PROMPT.suffix) for at in range(4)]


# --- averages over permutations ---


def test_every_step_takes_the_token_of_the_largest_mean_log_probability(lm):
    result, written, means = PermutationAverage(lm).generate(PROMPT, max_new_tokens=6), [], []
    for token in result.token_ids:
        longer = [Prompt(each.prefix, each.segments, [*each.suffix, *written]) for each in listings()]
        rows = [lm.with_method(ordering="given").logits(each)[-1].double() for each in longer]
        mean = torch.stack([torch.log_softmax(row, -1) for row in rows]).mean(dim=0)
        assert token == int(mean.argmax())
        written.append(token)
        means.append(float(mean[token]))
    assert len(written) == 6
    assert_computes(means, PermutationAverage(lm).generate, PROMPT, max_new_tokens=6)
    alone = lm.generate(PROMPT, max_new_tokens=6)
    assert alone.token_ids != result.token_ids, "the model must be one whose answer depends on the order"
    end = result.token_ids[2]
    stopped = PermutationAverage(lm).generate(PROMPT, max_new_tokens=6, eos_token_id=end, num_beams=1, do_sample=False)
    assert (result.finish_reason, stopped.finish_reason) == ("length", "stop")
    assert stopped.token_ids == result.token_ids[: result.token_ids.index(end) + 1]


def test_a_score_is_the_mean_over_the_rotations(lm):
    each = [lm.with_method(ordering="given").score(prompt, CANDIDATES) for prompt in listings()]
    assert_computes(np.mean(each, axis=0), PermutationAverage(lm).score, PROMPT, CANDIDATES)
    assert PermutationAverage(lm).score(PROMPT, []) == []


def test_rotations_put_every_segment_in_every_place_once_and_random_ones_change_with_the_seed(lm):
    def orders(*args, **options):
        return [each.order for each in PermutationAverage(lm, *args, **options).permute(PROMPT)]

    places = orders()
    assert places[0] == list(lm.prepare(PROMPT).order)
    assert [sorted(place) for place in places] == [[0, 1, 2, 3]] * 4
    assert [sorted(column) for column in zip(*places, strict=True)] == [[0, 1, 2, 3]] * 4
    assert (orders(2), orders(9)) == ([places[0], places[2]], places)
    one, same, other = (orders(9, permutations="random", seed=seed) for seed in (0, 0, 1))
    assert len(one) == 9
    assert one == same != other
    drawn = PermutationAverage(lm, permutations="random").generate(PROMPT, max_new_tokens=1)
    assert drawn.order == lm.prepare(PROMPT).order, "an average names the order that was permuted"


RING_PROMPT = random_prompt(random.Random(0), (3, 5, 1, 4, 2), prefix=4, suffix=3)


@pytest.mark.parametrize(("family", "cuts"), [("llama", 2), ("llama", 3), ("qwen3", None), ("glm4", 1)])
def test_a_ring_is_the_average_over_rotations_for_one_prefill(family, cuts):
    lm = InvariantModel(tiny_model(family, eos_token_id=None))
    ring, every = RingAverage(lm, cuts), PermutationAverage(lm, cuts)
    one = ring.generate(RING_PROMPT, max_new_tokens=4)
    other = assert_computes(one, every.generate, RING_PROMPT, max_new_tokens=4)
    assert (one.token_ids, one.order) == (other.token_ids, other.order)
    scores = ring.score(RING_PROMPT, CANDIDATES)
    assert_computes(scores, every.score, RING_PROMPT, CANDIDATES)
    assert one.cost.prefills == scores.cost.prefills == 1
    assert other.cost.prefills == (cuts or 5)
    plain = lm.score(RING_PROMPT, CANDIDATES)
    assert (scores == pytest.approx(plain, abs=1e-2)) == (cuts == 1), "one cut is RoToR"


def test_over_all_cuts_the_ordering_decides_about_neighbours_only():
    """A rotation of the ordering is the same ring."""
    lm, segments = InvariantModel(tiny_model("llama", eos_token_id=None), ordering="given"), list(RING_PROMPT.segments)
    turned = Prompt(RING_PROMPT.prefix, segments[2:] + segments[:2], RING_PROMPT.suffix)
    assert_computes(RingAverage(lm).score(turned, [[5, 6]]), RingAverage(lm).score, RING_PROMPT, [[5, 6]])
    assert lm.score(turned, [[5, 6]]) != pytest.approx(lm.score(RING_PROMPT, [[5, 6]]), abs=1e-2)


def test_a_model_that_pads_or_beams_by_itself_changes_nothing():
    model = tiny_model("llama", eos_token_id=None)
    lm, prompt = InvariantModel(model), Prompt([10, 0, 12], [[5, 0], [7, 8, 0]], [0, 9])
    greedy = RingAverage(lm, 1).generate(prompt, max_new_tokens=4)
    model.generation_config.pad_token_id = 0  # which is a token of the prompt here
    padded = RingAverage(lm, 1).generate(prompt, max_new_tokens=4)
    assert_computes(padded, lm.generate, prompt, max_new_tokens=4)
    model.generation_config.num_beams = 3
    assert RingAverage(lm, 1).generate(prompt, max_new_tokens=4) == greedy == padded


# --- votes ---


def test_the_answer_of_most_permutations_wins(lm):
    rows = [lm.with_method(ordering="given").generate(each, max_new_tokens=1) for each in listings()]
    texts = [" ".join(map(str, row.token_ids)) for row in rows]
    result = SelfConsistency(lm).generate(PROMPT, max_new_tokens=1)
    winner = min(texts, key=lambda text: (-texts.count(text), text))
    assert " ".join(map(str, result.token_ids)) == result.votes[0][0] == winner
    assert dict(result.votes) == {text: texts.count(text) for text in texts}
    assert result.agreement == texts.count(winner) / 4


def test_a_tie_goes_to_the_first_answer_in_the_alphabet(model):
    lm = model.with_method("sequential", ordering="lexical")
    prompt, rules = Prompt("Read:", ["one", "two"], "Say:"), (str.strip, lambda _: "any")
    votes, alike = (SelfConsistency(lm, answer=rule).generate(prompt, max_new_tokens=3).votes for rule in rules)
    assert [count for _, count in votes] == [1, 1], "two permutations, two answers: a tie"
    assert votes[0][0] < votes[1][0]
    assert alike == (("any", 2),)


# --- calibration ---


def test_calibration_averages_the_content_free_probabilities_before_it_normalises_them(lm):
    """As in the published code, in its words: p_cf is a normalised mean, and W = diag(p_cf)^-1."""
    blanks = [[9], [1, 2], []]

    def label_probs(prompt):
        return np.exp(lm.score(prompt, CANDIDATES))

    p_cf = np.mean([label_probs(Prompt(PROMPT.prefix, [blank] * 4, PROMPT.suffix)) for blank in blanks], axis=0)
    probs = label_probs(PROMPT)
    expected = np.linalg.inv(np.diag(p_cf / p_cf.sum())) @ (probs / probs.sum())
    calibrated = ContextualCalibration(lm, blanks).score(PROMPT, CANDIDATES)
    assert_rounded_alike(calibrated, np.log(expected / expected.sum()))
    assert calibrated.cost.prefills == 4


def test_calibration_leaves_no_preference_without_content_and_has_the_published_inputs(lm, model):
    empty = Prompt([3, 4], [[9], [9]], [11, 12])
    assert np.ptp(lm.score(empty, CANDIDATES)) > 0.1
    assert_rounded_alike(ContextualCalibration(lm, [[9]]).score(empty, CANDIDATES), [math.log(1 / 3)] * 3)
    calibration = ContextualCalibration(model)
    assert calibration.content_free == ("N/A", "[MASK]", "")
    prompt = model.chat_prompt("Why?", [Segment("It rains.", title="Weather"), "Nothing."])
    assert_rounded_alike(sum(map(math.exp, calibration.score(prompt, ["yes", "no"]))), 1.0)
    assert calibration.score(prompt, []) == []


# --- attention sorting ---


def eager_attention(model, prompt):
    """What transformers itself says the last token attends to in each segment: the mean over layers, heads, tokens."""
    listed = [list(each.token_ids) for each in prompt.segments]
    ids = torch.tensor([[*prompt.prefix, *(token for each in listed for token in each), *prompt.suffix]])
    own = type(model)(model.config)
    own.load_state_dict(model.state_dict())
    if own._can_set_attn_implementation():
        own.set_attn_implementation("eager")  # others give no attention weights
    with torch.no_grad():
        layers = torch.stack(own.eval()(ids, output_attentions=True).attentions)
    weights, start, means = layers[:, 0, :, -1].mean(dim=(0, 1)), len(prompt.prefix), []
    for each in listed:
        means.append(float(weights[start : start + len(each)].mean()) if each else 0.0)
        start += len(each)
    return means


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt_oss", "bloom", "gptj"])
def test_the_attention_that_segments_are_sorted_by_is_the_models_own(family):
    lm = InvariantModel(tiny_model(family), method="sequential", ordering="given")
    prompt = Prompt([3, 4], [[5, 6], [], [7], [8, 9, 10]], [11, 12])
    assert_computes(eager_attention(lm.model, prompt), segment_attention, lm, lm.prepare(prompt))


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_each_round_puts_the_segment_with_the_most_attention_last(lm, rounds):
    plain, order = lm.with_method(ordering="given"), list(lm.prepare(PROMPT).order)
    for _ in range(rounds):
        paid = eager_attention(lm.model, PROMPT.with_sets([PROMPT.segments.permuted(order)]))
        order = [index for _, index in sorted(zip(paid, order, strict=True))]
    result = AttentionSorting(lm, rounds).generate(PROMPT, max_new_tokens=4)
    expected = plain.generate(PROMPT.with_sets([PROMPT.segments.permuted(order)]), max_new_tokens=4)
    assert (list(result.order), result.token_ids) == (order, expected.token_ids)
    assert result.cost.prefills == rounds + 1


# --- context experts ---


def published(lm, written, beta, gamma):
    """The scores of every expert `[N, vocabulary]`, equation by equation, in float64."""
    exact = copy.deepcopy(lm.model).double()

    def logits(document, after):
        with torch.no_grad():
            return np.asarray(exact(torch.tensor([[3, 4, *document, 11, 12, *after]])).logits[0, -1])

    def strength(document):
        if beta != "dynamic":
            return beta
        p, q = (np.exp(log_softmax(logits(each, []))) for each in ([], document))
        return (rel_entr(p, (p + q) / 2) + rel_entr(q, (p + q) / 2)) / 2

    nothing, betas = logits([], written), [strength(ids) for ids, _ in DOCUMENTS]
    rows = zip(betas, DOCUMENTS, strict=True)
    return np.stack([(1 + b) * logits(ids, written) - b * nothing + gamma * np.log(r) for b, (ids, r) in rows])


def log_softmax(scores):
    return scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()


@pytest.mark.parametrize(("beta", "gamma"), [(0.0, 0.0), (0.5, 0.0), (0.5, 2.5), ("dynamic", 0.3)])
def test_every_token_is_the_one_that_the_published_rule_chooses(lm, beta, gamma):
    experts, written, logprobs, answers = ContextExperts(lm, beta=beta, gamma=gamma), [], [], set()
    for token in experts.generate(PROMPT, max_new_tokens=3).token_ids:
        scores = published(lm, written, beta, gamma)
        assert token == int(scores.max(axis=0).argmax())
        written.append(token)
        logprobs.append(log_softmax(scores.max(axis=0))[token])
        answers |= {int(each.argmax()) for each in scores}
    assert len(written) == 3
    assert len(answers) > 1, "experts differ"
    assert_computes(logprobs, experts.generate, PROMPT, max_new_tokens=3)


def test_a_score_of_experts_is_the_sum_over_the_tokens_of_the_same_rule(lm):
    expected = []
    for candidate in CANDIDATES:
        steps = [log_softmax(published(lm, candidate[:at], "dynamic", 2.5).max(axis=0)) for at in range(len(candidate))]
        expected.append(sum(step[token] for step, token in zip(steps, candidate, strict=True)))
    assert_computes(expected, ContextExperts(lm, beta="dynamic").score, PROMPT, CANDIDATES)
    assert ContextExperts(lm).score(PROMPT, []) == []


def test_a_forbidden_token_is_never_written(lm):
    experts = ContextExperts(lm, beta=0.5)
    first = experts.generate(PROMPT, max_new_tokens=1).token_ids[0]
    result = experts.generate(PROMPT, max_new_tokens=3, suppress_tokens=[first])
    assert first not in result.token_ids
    assert all(map(math.isfinite, result.logprobs))
