"""What holds of every ensemble: no order at any entry, lists, room in the window, cost, and what is refused."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from invariant_rag import RAG, ContextExperts, InvariantModel, Prompt, Segment, SegmentSet
from invariant_rag.ensembles import (
    AttentionSorting,
    ContextualCalibration,
    PermutationAverage,
    RingAverage,
    SelfConsistency,
    segment_attention,
)
from invariant_rag.ensembles.base import Cost, count_cost
from invariant_rag.errors import ContextOverflow, InvalidChoice, InvalidSegment, UnknownName, UnsupportedCombination
from invariant_rag.testing import tiny_model
from tests.comparing import assert_computes, orders_of

PROMPT = Prompt([3, 4], [[5, 6], [7], [8, 9, 10], [20, 21]], [11, 12])
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


def outcome(system, prompt, **options):
    """What an answer says, with contents for indices."""
    answer = system.generate(prompt, **{"max_new_tokens": 2, **options})
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


@every
def test_a_list_a_config_and_the_sets_are_those_of_single_calls(lm, name):
    system = ENSEMBLES[name](lm)
    prompts = [PROMPT, Prompt([3], [[30], [31, 32]], [5]) if name == "experts" else TWO_SETS]
    single = [system.generate(each, max_new_tokens=2) for each in prompts]
    assert system.generate(prompts, max_new_tokens=2) == single
    assert [sorted(each.order) for each in single] == [list(range(len(each.segments))) for each in prompts]
    assert name == "experts" or sorted(single[1].order[:3]) == [0, 1, 2], "the sets one after the other"
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
    assert_computes(system.generate(prompt, max_new_tokens=2), lm.generate, prompt, max_new_tokens=2)


def test_sampled_answers_with_a_seed_vote_alike_for_every_order(lm):
    ensemble, options = SelfConsistency(lm), {"max_new_tokens": 3, "do_sample": True, "seed": 5}
    expected = ensemble.generate(PROMPT, **options)
    assert all(ensemble.generate(each, **options).votes == expected.votes for each in orders_of(PROMPT, 7))
    assert ensemble.generate(PROMPT, **{**options, "seed": 6}).votes != expected.votes


@every
def test_segments_that_do_not_fit_are_left_out_of_every_permutation(llama, name):
    lm = InvariantModel(llama, overflow="drop_last")
    prompt = Prompt([3], [[5] * 200, [6] * 200, [7] * 200], [8])
    result, expected = (each.generate(prompt, max_new_tokens=2) for each in (ENSEMBLES[name](lm), lm))
    left_out = () if name == "experts" else expected.dropped  # one expert reads one segment
    assert (result.dropped, len(result.order)) == (left_out, 3 - len(left_out))
    assert len(expected.dropped) == 1


def test_an_expert_that_does_not_fit_alone_is_dropped_trimmed_or_refused(llama):
    prompt, lm = Prompt([3], [[5] * 3, [6] * 900, [7] * 4], [8]), InvariantModel(llama)
    with pytest.raises(ContextOverflow):
        ENSEMBLES["experts"](lm).generate(prompt, max_new_tokens=2)
    dropping, trimming = (
        ENSEMBLES["experts"](lm.with_method(overflow=each)).generate(prompt, max_new_tokens=2)
        for each in ("drop_last", "trim_segments")
    )
    assert (dropping.dropped, sorted(dropping.order), dropping.cost.prefills) == ((1,), [0, 2], 3)
    assert trimming.trimmed == (1,)


# --- cost ---


@pytest.mark.parametrize(
    ("name", "prefills", "passes", "calls"),
    [("average", 4, 16, 7), ("votes", 2, 8, 5), ("experts", 5, 20, 8), ("ring", 1, 13, 4), ("sorting", 3, 5, 5)],
)
def test_the_cost_line_says_what_the_model_did(lm, name, prefills, passes, calls):
    result = ENSEMBLES[name](lm).generate(PROMPT, max_new_tokens=3)
    assert (result.cost.prefills, result.cost.passes, result.cost.calls) == (prefills, passes, calls)
    length = len(lm.prepare(PROMPT).input_ids)
    if name == "average":
        assert str(result.cost) == f"4 prefills, 16 forward passes, {4 * length + 12} tokens, 7 calls"
        assert PermutationAverage(lm).score(PROMPT, CANDIDATES).cost == Cost(4, 16, 4 * length + 4 * 3 * 2, 8)
    if name == "experts":
        assert (result.usage.prompt_tokens, result.sets) == (5 * 4 + 8, (4,))
        assert ContextExperts(lm, gamma=0).score(PROMPT, CANDIDATES).cost.prefills == 5


def test_counting_leaves_the_model_as_it_was(lm):
    with pytest.raises(RuntimeError), count_cost(lm.model):
        raise RuntimeError
    with count_cost(lm.model) as counter:
        lm.model(torch.ones((3, 5), dtype=torch.long))
    assert counter.cost == Cost(prefills=3, passes=3, tokens=15, calls=1)
    PermutationAverage(lm).generate(PROMPT, max_new_tokens=2)
    assert not lm.model._forward_pre_hooks


# --- texts, and refusals ---


def test_a_rag_pipeline_takes_an_ensemble_and_experts_read_texts_in_the_chat_template(model):
    class Fixed:
        def retrieve(self, query, k):
            return SegmentSet(["one", "two", "three"])

    answer = RAG(PermutationAverage(model), Fixed(), k=3).ask("Why?", max_new_tokens=2)
    assert (answer.generation.cost.prefills, sorted(answer.order)) == (3, [0, 1, 2])
    experts = ContextExperts(model, beta=0.3)
    documents = [Segment("It rains.", title="Weather", score=0.4), Segment("Nothing.", score=0.7)]
    one, other = (experts.chat_prompt("Why?", listed) for listed in (documents, documents[::-1]))
    assert experts.generate(one, max_new_tokens=4).text == experts.generate(other, max_new_tokens=4).text != ""


def test_a_deterministic_model_answers_as_another_one(lm):
    for name in ("experts", "average"):
        one, other = (outcome(ENSEMBLES[name](each), PROMPT) for each in (lm, lm.with_method(deterministic=True)))
        assert one == other


SEVERAL = [{"do_sample": True}, {"num_beams": 2}, {"num_return_sequences": 3}, {"streamer": object()}]
SAMPLED = {"num_return_sequences": 2, "do_sample": True}
UNFIT = [("mistral (sliding window)", "whole context"), ("llama (dynamic scaling)", "grow")]


def test_what_would_not_be_one_greedy_text_is_refused(lm):
    for name, option in itertools.product(("average", "experts", "ring"), SEVERAL):
        with pytest.raises(UnsupportedCombination, match=next(iter(option))):
            ENSEMBLES[name](lm).generate(PROMPT, **option)
    for options in (SAMPLED, {"generation_config": GenerationConfig(**SAMPLED)}):
        with pytest.raises(UnsupportedCombination, match="num_return_sequences"):
            AttentionSorting(lm).generate(PROMPT, **options)


def test_what_an_ensemble_cannot_combine_is_refused(lm):
    changed = lm.with_method("sequential", intervention="ms-poe")
    routed = lm.with_method("rotor").with_routing()
    for call, said in (
        (lambda: SelfConsistency(lm).score(PROMPT, CANDIDATES), "counts votes"),
        (lambda: ContextualCalibration(SelfConsistency(lm), [[9]]).score(PROMPT, CANDIDATES), "counts votes"),
        (lambda: segment_attention(changed, changed.prepare(PROMPT)), "ms-poe"),  # other weights than the model's own
        (
            lambda: AttentionSorting(lm.with_method("pine")).generate(PROMPT),
            "pine",
        ),  # the suffix sees segments elsewhere
        (lambda: ENSEMBLES["experts"](lm).generate(TWO_SETS), "one set"),
        (lambda: RingAverage(lm.with_method("pine")), "got 'pine'"),
        *((lambda family=family: RingAverage(InvariantModel(tiny_model(family))), why) for family, why in UNFIT),
        *((lambda kind=kind: kind(routed), "routing") for kind in (RingAverage, PermutationAverage, ContextExperts)),
    ):
        with pytest.raises(UnsupportedCombination, match=said) as caught:
            call()
        assert said != "counts votes" or "PermutationAverage" in caught.value.hint


def test_senseless_numbers_names_and_scores_are_refused(lm):
    for build, name in (
        (lambda: PermutationAverage(lm, 0), "count"),
        (lambda: AttentionSorting(lm, 0), "rounds"),
        (lambda: RingAverage(lm.with_method("rotor"), 0), "at least 1"),
        (lambda: ContextualCalibration(lm, []), "content_free"),
        (lambda: ContextExperts(lm, beta="jsd"), "dynamic"),
        *(
            (lambda name=name, value=value: ContextExperts(lm, **{"beta": 0.5, name: value}), name)
            for name, value in itertools.product(("beta", "gamma"), (-1.0, math.inf, math.nan))
        ),
    ):
        with pytest.raises(InvalidChoice, match=name):
            build()
    with pytest.raises(UnknownName, match="'random', 'rotations'"):
        SelfConsistency(lm, permutations="some")
    for score in (None, 0.0, -0.5, 1.5):
        prompt, experts = Prompt([3], [Segment(token_ids=(5,), score=score)], [8]), ContextExperts(lm, beta=0.5)
        for call in (experts.generate, lambda each, experts=experts: experts.score(each, CANDIDATES)):
            with pytest.raises(InvalidSegment, match="at most 1") as caught:
                call(prompt)
            assert "gamma=0" in str(caught.value.hint)
        assert ENSEMBLES["experts"](lm).generate(prompt, max_new_tokens=1).token_ids
