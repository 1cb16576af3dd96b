"""Ensembles: what each computes, as published; no order at any entry; lists, room, cost, and what is refused."""

import copy
import math
import random
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, rel_entr
from transformers import GenerationConfig

from invariant_rag import RAG, ContextExperts, InvariantModel, Prompt, RingAverage, Segment, SegmentSet, SelfConsistency
from invariant_rag.ensembles import AttentionSorting, ContextualCalibration, PermutationAverage, segment_attention
from invariant_rag.ensembles.base import Cost, count_cost
from invariant_rag.errors import ContextOverflow, InvalidChoice, InvalidSegment, UnknownName, UnsupportedCombination
from invariant_rag.rag import BM25Retriever
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.rounding import assert_rounded_alike
from tests.comparing import assert_computes, orders_of

DOCUMENTS = [([5, 6], 0.9), ([7], 0.2), ([8, 9, 10], 0.5), ([20, 21], 0.85)]
PROMPT = Prompt([3, 4], [Segment(token_ids=tuple(ids), score=score) for ids, score in DOCUMENTS], [11, 12])
TWO_SETS = Prompt.of([3], SegmentSet([[5, 6], [7], [8, 9]]), [4], SegmentSet([[30], [31, 32]]), [11, 12])
CANDIDATES = [[40], [41, 42], [43]]
ENSEMBLES = {
    "average": PermutationAverage,
    "random average": partial(PermutationAverage, count=2, permutations="random"),
    "votes": partial(SelfConsistency, count=2),
    "sorting": partial(AttentionSorting, rounds=2),
    "experts": partial(ContextExperts, beta=0.5, gamma=0),
    "ring": lambda lm: RingAverage(lm.with_method("rotor", ordering=lm.ordering)),
}
SCORERS = {
    **{name: ENSEMBLES[name] for name in ("average", "sorting", "experts", "ring")},
    "calibration": lambda lm: ContextualCalibration(lm, [[9]]),
    "calibrated average": lambda lm: ContextualCalibration(PermutationAverage(lm), [[9]]),
}
every = pytest.mark.parametrize("name", ENSEMBLES)


@pytest.fixture
def lm(golden_model):
    return InvariantModel(golden_model, method="sequential", ordering="lexical")


def listings():
    """Every rotation of the lexical order, farthest first, written independently of the code."""
    ring = sorted((ids for ids, _ in DOCUMENTS), reverse=True)
    return [Prompt(PROMPT.prefix, ring[at:] + ring[:at], PROMPT.suffix) for at in range(4)]


def outcome(system, prompt):
    """What an answer says, with contents for indices."""
    answer = system.generate(prompt, max_new_tokens=2)
    contents = tuple(prompt.segments[index] for index in answer.order)
    return answer.token_ids, answer.logprobs, answer.cost, contents, getattr(answer, "votes", ())


@pytest.mark.parametrize("method", ["sequential", "rotor"])
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sets=st.lists(st.lists(st.lists(st.integers(3, 500), max_size=4), max_size=4), min_size=1, max_size=2),
    shuffle=st.randoms(use_true_random=False),
)
def test_a_permutation_changes_no_bit(golden_model, method, sets, shuffle):
    lm = InvariantModel(golden_model, method=method, ordering="lexical")
    prompt = Prompt.of([3, 4], *(part for each in sets for part in (SegmentSet(each), [11, 12])))
    other = prompt.shuffled(shuffle)
    for kinds, call in ((ENSEMBLES, outcome), (SCORERS, lambda system, each: system.score(each, CANDIDATES))):
        for name, build in kinds.items():
            if name != "experts" or len(sets) == 1:
                assert build(lm).invariant
                assert call(build(lm), prompt) == call(build(lm), other), name


@pytest.mark.parametrize("name", {**ENSEMBLES, **SCORERS})
def test_with_the_order_as_given_no_ensemble_is_invariant_but_experts(lm, name):
    system, prompts = {**ENSEMBLES, **SCORERS}[name](lm.with_method("sequential")), orders_of(PROMPT, 8)
    call = system.generate if name in ENSEMBLES else lambda each, **_: tuple(system.score(each, CANDIDATES))
    answers = {getattr(found, "logprobs", found) for found in (call(each, max_new_tokens=2) for each in prompts)}
    assert (len(answers) == 1) == system.invariant == (name == "experts")
    assert name not in ENSEMBLES or system.generate(PROMPT, max_new_tokens=1).invariant is system.invariant
    assert name not in SCORERS or system.score(PROMPT, []) == []


@every
def test_a_list_a_config_and_the_sets_are_those_of_single_calls(lm, name):
    system = ENSEMBLES[name](lm)
    prompts = [PROMPT, Prompt([3], [[30], [31, 32]], [5]) if name == "experts" else TWO_SETS]
    single = [system.generate(each, max_new_tokens=2) for each in prompts]
    assert system.generate(prompts, max_new_tokens=2) == single
    assert [sorted(each.order) for each in single] == [list(range(len(each.segments))) for each in prompts]
    assert name == "experts" or sorted(single[1].order[:3]) == [0, 1, 2], "the sets one after the other"
    deterministic = ENSEMBLES[name](lm.with_method(deterministic=True))
    assert name == "votes" or outcome(deterministic, PROMPT) == outcome(system, PROMPT)
    if name in ("votes", "sorting"):
        config = GenerationConfig(max_new_tokens=2)
        assert system.generate(PROMPT, generation_config=config).token_ids == single[0].token_ids
        config = GenerationConfig(max_new_tokens=9)
        assert system.generate(PROMPT, max_new_tokens=2, generation_config=config).token_ids == single[0].token_ids


@every
@pytest.mark.parametrize("segments", [[], [[5, 6, 7]], [[], []]])
def test_one_segment_or_none_is_the_model_itself(lm, name, segments):
    prompt = Prompt([3, 4] if segments != [[], []] else [], segments, [8, 9])
    system = ContextExperts(lm, beta=0, gamma=0) if name == "experts" else ENSEMBLES[name](lm)
    answer = system.generate(prompt, max_new_tokens=2)
    assert_computes(answer, lm.generate, prompt, max_new_tokens=2)
    assert answer.invariant is (True if segments else None)


def test_segments_that_do_not_fit_are_left_out_of_every_permutation_and_experts_that_do_not_fit_alone(llama):
    def answer(name, prompt, overflow):
        return ENSEMBLES[name](InvariantModel(llama, overflow=overflow)).generate(prompt, max_new_tokens=2)

    together = Prompt([3], [[5] * 200, [6] * 200, [7] * 200], [8])
    expected = InvariantModel(llama, overflow="drop_last").generate(together, max_new_tokens=2).dropped
    assert len(expected) == 1
    for name in ENSEMBLES:
        result, left_out = answer(name, together, "drop_last"), () if name == "experts" else expected
        assert (result.dropped, len(result.order)) == (left_out, 3 - len(left_out)), name
    alone = Prompt([3], [[5] * 3, [6] * 900, [7] * 4], [8])
    with pytest.raises(ContextOverflow):
        answer("experts", alone, "error")
    dropping = answer("experts", alone, "drop_last")
    assert (dropping.dropped, sorted(dropping.order), dropping.cost.prefills) == ((1,), [0, 2], 3)
    assert answer("experts", alone, "trim_segments").trimmed == (1,)


# --- averages over permutations ---


def test_every_step_takes_the_token_of_the_largest_mean_log_probability_and_a_score_is_the_mean(lm):
    result, written, means = PermutationAverage(lm).generate(PROMPT, max_new_tokens=6), [], []
    for token in result.token_ids:
        longer = [Prompt(each.prefix, each.segments, [*each.suffix, *written]) for each in listings()]
        rows = [lm.with_method(ordering="given").logits(each)[-1].double() for each in longer]
        mean = torch.stack([torch.log_softmax(row, -1) for row in rows]).mean(dim=0)
        assert token == int(mean.argmax())
        written.append(token)
        means.append(float(mean[token]))
    assert_computes(means, PermutationAverage(lm).generate, PROMPT, max_new_tokens=6)
    alone = lm.generate(PROMPT, max_new_tokens=6)
    assert alone.token_ids != result.token_ids, "the model must be one whose answer depends on the order"
    end = result.token_ids[2]
    stopped = PermutationAverage(lm).generate(PROMPT, max_new_tokens=6, eos_token_id=end, num_beams=1, do_sample=False)
    assert (result.finish_reason, stopped.finish_reason) == ("length", "stop")
    assert stopped.token_ids == result.token_ids[: result.token_ids.index(end) + 1]
    each = [lm.with_method(ordering="given").score(prompt, CANDIDATES) for prompt in listings()]
    assert_computes(np.mean(each, axis=0), PermutationAverage(lm).score, PROMPT, CANDIDATES)


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


def test_the_answer_of_most_permutations_wins_and_a_tie_goes_to_the_first_in_the_alphabet(lm, model):
    rows = [lm.with_method(ordering="given").generate(each, max_new_tokens=1) for each in listings()]
    texts = [" ".join(map(str, row.token_ids)) for row in rows]
    result = SelfConsistency(lm).generate(PROMPT, max_new_tokens=1)
    winner = min(texts, key=lambda text: (-texts.count(text), text))
    assert " ".join(map(str, result.token_ids)) == result.votes[0][0] == winner
    assert dict(result.votes) == {text: texts.count(text) for text in texts}
    assert result.agreement == texts.count(winner) / 4
    tied = model.with_method("sequential", ordering="lexical")
    prompt, rules = Prompt("Read:", ["one", "two"], "Say:"), (str.strip, lambda _: "any")
    votes, alike = (SelfConsistency(tied, answer=rule).generate(prompt, max_new_tokens=3).votes for rule in rules)
    assert [count for _, count in votes] == [1, 1], "two permutations, two answers: a tie"
    assert votes[0][0] < votes[1][0]
    assert alike == (("any", 2),)
    ensemble, options = SelfConsistency(lm), {"max_new_tokens": 3, "do_sample": True}
    one, *others = (ensemble.generate(each, seed=5, **options).votes for each in orders_of(PROMPT, 7))
    assert others == [one] * 3, "sampled with a seed, every order votes alike"
    assert ensemble.generate(PROMPT, seed=6, **options).votes != one


# --- calibration ---


def test_calibration_averages_the_content_free_probabilities_before_it_normalises_them(lm, model):
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
    empty = Prompt([3, 4], [[9], [9]], [11, 12])
    assert np.ptp(lm.score(empty, CANDIDATES)) > 0.1
    assert_rounded_alike(ContextualCalibration(lm, [[9]]).score(empty, CANDIDATES), [math.log(1 / 3)] * 3)
    calibration = ContextualCalibration(model)
    assert calibration.content_free == ("N/A", "[MASK]", "")
    prompt = model.chat_prompt("Why?", [Segment("It rains.", title="Weather"), "Nothing."])
    assert_rounded_alike(sum(map(math.exp, calibration.score(prompt, ["yes", "no"]))), 1.0)


# --- attention sorting ---


def eager_attention(model, prompt):
    """What transformers says the last token attends to in each segment: the mean over layers, heads, tokens."""
    parts = [prompt.prefix, *(each.token_ids for each in prompt.segments), prompt.suffix]
    own = copy.deepcopy(model)
    if own._can_set_attn_implementation():
        own.set_attn_implementation("eager")  # others give no attention weights
    with torch.no_grad():
        layers = torch.stack(own(torch.tensor([[*chain(*parts)]]), output_attentions=True).attentions)
    _, *weights, _ = layers[:, 0, :, -1].mean(dim=(0, 1)).split(list(map(len, parts)))
    return [float(each.mean()) if len(each) else 0.0 for each in weights]


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


@pytest.mark.parametrize(("beta", "gamma"), [(0.0, 0.0), (0.5, 0.0), (0.5, 2.5), ("dynamic", 0.3)])
def test_every_token_and_score_of_experts_is_that_of_the_published_rule(lm, beta, gamma):
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
    steps = [
        [log_softmax(published(lm, each[:at], beta, gamma).max(axis=0))[token] for at, token in enumerate(each)]
        for each in CANDIDATES
    ]
    assert_computes(list(map(sum, steps)), experts.score, PROMPT, CANDIDATES)
    default = ContextExperts(lm)
    assert (default.beta, default.gamma) == ("dynamic", 2.5)
    other = experts.generate(PROMPT, max_new_tokens=3, suppress_tokens=written[:1])
    assert written[0] not in other.token_ids, "a forbidden token is never written"
    assert all(map(math.isfinite, other.logprobs))


# --- cost ---


def test_the_cost_line_says_what_the_model_did_which_is_as_it_was_afterwards(lm):
    results = {name: build(lm).generate(PROMPT, max_new_tokens=3) for name, build in ENSEMBLES.items()}
    counted = {name: (each.cost.prefills, each.cost.passes, each.cost.calls) for name, each in results.items()}
    of_two = {"random average": (2, 8, 5), "votes": (2, 8, 5)}
    of_all = {"average": (4, 16, 7), "experts": (5, 20, 8), "ring": (1, 13, 4), "sorting": (3, 5, 5)}
    assert counted == of_two | of_all
    length, experts = len(lm.prepare(PROMPT).input_ids), results["experts"]
    assert str(results["average"].cost) == f"4 prefills, 16 forward passes, {4 * length + 12} tokens, 7 calls"
    assert PermutationAverage(lm).score(PROMPT, CANDIDATES).cost == Cost(4, 16, 4 * length + 4 * 3 * 2, 8)
    assert (experts.usage.prompt_tokens, experts.sets) == (5 * 4 + 8, (4,))
    assert ContextExperts(lm, gamma=0).score(PROMPT, CANDIDATES).cost.prefills == 5
    with pytest.raises(RuntimeError), count_cost(lm.model):
        raise RuntimeError
    with count_cost(lm.model) as counter:
        lm.model(torch.ones((3, 5), dtype=torch.long))
    assert counter.cost == Cost(prefills=3, passes=3, tokens=15, calls=1)
    assert not lm.model._forward_pre_hooks


# --- texts, and refusals ---


def test_a_rag_pipeline_takes_an_ensemble_and_experts_read_texts_in_the_chat_template(model):
    rag = RAG(PermutationAverage(model), BM25Retriever([Segment("one"), Segment("two"), Segment("three")]), k=3)
    answer = rag.ask("Why?", max_new_tokens=2)
    assert (answer.generation.cost.prefills, sorted(answer.order)) == (3, [0, 1, 2])
    experts = ContextExperts(model, beta=0.3)
    documents = [Segment("It rains.", title="Weather", score=0.4), Segment("Nothing.", score=0.7)]
    one, other = (experts.chat_prompt("Why?", listed) for listed in (documents, documents[::-1]))
    assert experts.generate(one, max_new_tokens=4).text == experts.generate(other, max_new_tokens=4).text != ""


def test_what_an_ensemble_cannot_combine_to_one_greedy_text_is_refused(lm):
    several = [{"do_sample": True}, {"num_beams": 2}, {"num_return_sequences": 3}, {"streamer": object()}]
    greedy = [(name, next(iter(each)), each) for name in ("average", "experts", "ring") for each in several]
    two = {"num_return_sequences": 2, "do_sample": True}
    sampled = [
        ("sorting", "num_return_sequences", each) for each in (two, {"generation_config": GenerationConfig(**two)})
    ]
    for name, said, options in (*greedy, *sampled):
        with pytest.raises(UnsupportedCombination, match=said):
            ENSEMBLES[name](lm).generate(PROMPT, **options)
    changed = lm.with_method("sequential", intervention="ms-poe")
    routed = lm.with_method("rotor").with_routing()
    for call, said in (
        (lambda: SelfConsistency(lm).score(PROMPT, CANDIDATES), "counts votes"),
        (lambda: ContextualCalibration(SelfConsistency(lm), [[9]]).score(PROMPT, CANDIDATES), "counts votes"),
        # Its weights are not the model's own; and the suffix sees segments elsewhere than they stand.
        (lambda: segment_attention(changed, changed.prepare(PROMPT)), "ms-poe"),
        (lambda: AttentionSorting(lm.with_method("pine")).generate(PROMPT), "pine"),
        (lambda: ENSEMBLES["experts"](lm).generate(TWO_SETS), "one set"),
        (lambda: RingAverage(lm.with_method("pine")), "got 'pine'"),
        (lambda: RingAverage(InvariantModel(tiny_model("mistral (sliding window)"))), "whole context"),
        (lambda: RingAverage(InvariantModel(tiny_model("llama (dynamic scaling)"))), "grow"),
        *((partial(kind, routed), "routing") for kind in (RingAverage, PermutationAverage, ContextExperts)),
    ):
        with pytest.raises(UnsupportedCombination, match=said) as caught:
            call()
        assert said != "counts votes" or "PermutationAverage" in caught.value.hint


def test_senseless_numbers_names_and_scores_are_refused(lm):
    for build, name in (
        (partial(PermutationAverage, lm, 0), "count"),
        (partial(AttentionSorting, lm, 0), "rounds"),
        (partial(RingAverage, lm.with_method("rotor"), 0), "at least 1"),
        (partial(ContextualCalibration, lm, []), "content_free"),
        (partial(ContextExperts, lm, beta="jsd"), "dynamic"),
        *((partial(ContextExperts, lm, beta=each), "beta") for each in (-1.0, math.inf, math.nan)),
        *((partial(ContextExperts, lm, beta=0.5, gamma=each), "gamma") for each in (-1.0, math.inf, math.nan)),
    ):
        with pytest.raises(InvalidChoice, match=name):
            build()
    with pytest.raises(UnknownName, match="'random', 'rotations'"):
        SelfConsistency(lm, permutations="some")
    for score in (None, 0.0, -0.5, 1.5):
        prompt, experts = Prompt([3], [Segment(token_ids=(5,), score=score)], [8]), ContextExperts(lm, beta=0.5)
        for call in (experts.generate, partial(experts.score, candidates=CANDIDATES)):
            with pytest.raises(InvalidSegment, match="at most 1") as caught:
                call(prompt)
            assert "gamma=0" in str(caught.value.hint)
        assert ENSEMBLES["experts"](lm).generate(prompt, max_new_tokens=1).token_ids
