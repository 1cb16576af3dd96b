"""Context experts: the published rule in float64, no order at any entry, and what is refused."""

from __future__ import annotations

import copy
import itertools
import math
import random

import numpy as np
import pytest
import torch
from scipy.special import rel_entr

from invariant_rag import ContextExperts, InvariantModel, PermutationAverage, Prompt, Segment, SegmentSet
from invariant_rag.errors import ContextOverflow, InvalidChoice, InvalidSegment, UnsupportedCombination
from invariant_rag.testing.rounding import rounding

DOCUMENTS = [([5, 6], 0.9), ([7], 0.2), ([8, 9, 10], 0.5), ([20, 21], 0.85)]
PROMPT = Prompt([3, 4], [Segment(token_ids=tuple(ids), score=score) for ids, score in DOCUMENTS], [11, 12])
CANDIDATES = [[40], [41, 42], [43]]


@pytest.fixture
def lm(golden_model):
    return InvariantModel(golden_model, method="sequential", ordering="given")


def published(lm, written, beta, gamma):
    """The scores of every expert `[N, vocabulary]`, equation by equation, in float64."""

    exact = copy.deepcopy(lm.model).double()

    def logits(document, after=written):
        with torch.no_grad():
            ids = torch.tensor([[3, 4, *document, 11, 12, *after]])
            return np.asarray(exact(ids).logits[0, -1])

    def strength(document):
        if beta != "dynamic":
            return beta
        p, q = (np.exp(log_softmax(logits(each, []))) for each in ([], document))
        return (rel_entr(p, (p + q) / 2) + rel_entr(q, (p + q) / 2)) / 2

    nothing = logits([])
    betas = [strength(ids) for ids, _ in DOCUMENTS]
    found = [
        (1 + b) * logits(ids) - b * nothing + gamma * np.log(r) for b, (ids, r) in zip(betas, DOCUMENTS, strict=True)
    ]
    return np.stack(found)


def log_softmax(scores):
    return scores - np.log(np.exp(scores - scores.max()).sum()) - scores.max()


@pytest.mark.parametrize(("beta", "gamma"), [(0.0, 0.0), (0.5, 0.0), (0.5, 2.5), ("dynamic", 0.3)])
def test_every_token_is_the_one_that_the_published_rule_chooses(lm, beta, gamma):
    experts, written, answers = ContextExperts(lm, beta=beta, gamma=gamma), [], set()
    result = experts.generate(PROMPT, max_new_tokens=3)
    bound = rounding(experts.generate, PROMPT, max_new_tokens=3)
    for token, logprob in zip(result.token_ids, result.logprobs, strict=True):
        scores = published(lm, written, beta, gamma)
        assert token == int(scores.max(axis=0).argmax())
        assert logprob == pytest.approx(log_softmax(scores.max(axis=0))[token], abs=bound)
        written.append(token)
        answers |= {int(each.argmax()) for each in scores}
    assert len(written) == 3
    assert len(answers) > 1, "experts differ"


def test_a_score_is_the_sum_over_the_tokens_of_the_same_rule(lm):
    expected = []
    for candidate in CANDIDATES:
        steps = [log_softmax(published(lm, candidate[:at], "dynamic", 2.5).max(axis=0)) for at in range(len(candidate))]
        expected.append(sum(step[token] for step, token in zip(steps, candidate, strict=True)))
    experts = ContextExperts(lm, beta="dynamic")
    scores = experts.score(PROMPT, CANDIDATES)
    assert scores == pytest.approx(expected, abs=rounding(experts.score, PROMPT, CANDIDATES))
    assert scores.cost.prefills == 5
    assert experts.score(PROMPT, []) == []


@pytest.mark.parametrize(("method", "ordering"), [("sequential", "given"), ("rotor", "lexical"), ("pine", "score")])
def test_a_permutation_changes_no_bit_whatever_the_ordering(lm, method, ordering):
    experts = ContextExperts(lm.with_method(method, ordering=ordering))
    assert experts.invariant
    outcomes, orders = set(), set()
    for order in list(itertools.permutations(range(4)))[::5]:
        prompt = Prompt(PROMPT.prefix, PROMPT.segments.permuted(order), PROMPT.suffix)
        result = experts.generate(prompt, max_new_tokens=3)
        assert result.invariant
        outcomes.add((result.token_ids, result.logprobs, result.cost, tuple(experts.score(prompt, CANDIDATES))))
        orders.add(tuple(prompt.segments[i].canonical_key for i in result.order))
    assert len(outcomes) == len(orders) == 1


def test_without_segments_it_is_the_model_itself_and_with_one_and_no_contrast_too(lm):
    for segments, beta in (([], 0.7), ([[5, 6, 7]], 0.0)):
        prompt = Prompt([3, 4], segments, [8, 9])
        expected = lm.generate(prompt, max_new_tokens=4)
        result = ContextExperts(lm, beta=beta, gamma=0).generate(prompt, max_new_tokens=4)
        assert result.token_ids == expected.token_ids
        assert result.logprobs == pytest.approx(expected.logprobs, abs=rounding(lm.generate, prompt, max_new_tokens=4))


def test_the_cost_is_one_prefill_per_segment_and_one(lm):
    result = ContextExperts(lm, beta=0.5).generate(PROMPT, max_new_tokens=3)
    assert (result.cost.prefills, result.cost.passes, result.cost.calls) == (5, 5 + 5 * 3, 5 + 3)
    assert result.usage.prompt_tokens == 5 * 4 + 8
    assert (result.sets, sorted(result.order)) == ((4,), [0, 1, 2, 3])


def test_a_forbidden_token_is_never_written(lm):
    experts = ContextExperts(lm, beta=0.5)
    first = experts.generate(PROMPT, max_new_tokens=1).token_ids[0]
    result = experts.generate(PROMPT, max_new_tokens=3, suppress_tokens=[first])
    assert first not in result.token_ids
    assert all(map(math.isfinite, result.logprobs))


def test_a_segment_that_does_not_fit_alone_is_dropped_trimmed_or_refused_as_elsewhere(llama):
    prompt = Prompt([3], [[5] * 3, [6] * 900, [7] * 4], [8])
    lm = InvariantModel(llama)
    with pytest.raises(ContextOverflow):
        ContextExperts(lm, beta=0.5, gamma=0).generate(prompt, max_new_tokens=2)
    together = Prompt([3], [[5] * 200, [6] * 200, [7] * 200], [8])  # more than the window of 512 tokens
    assert len(ContextExperts(lm, beta=0.5, gamma=0).generate(together, max_new_tokens=2).order) == 3
    dropping = ContextExperts(lm.with_method(overflow="drop_last"), beta=0.5, gamma=0)
    dropped = dropping.generate(prompt, max_new_tokens=2)
    assert (dropped.dropped, sorted(dropped.order), dropped.cost.prefills) == ((1,), [0, 2], 3)
    trimming = ContextExperts(lm.with_method(overflow="trim_segments"), beta=0.5, gamma=0)
    assert trimming.generate(prompt, max_new_tokens=2).trimmed == (1,)


def test_a_score_outside_of_its_range_is_refused_unless_relevance_is_ignored(lm):
    for score in (None, 0.0, -0.5, 1.5):
        prompt = Prompt([3], [Segment(token_ids=(5,), score=score)], [8])
        experts = ContextExperts(lm, beta=0.5)
        with pytest.raises(InvalidSegment, match="at most 1") as caught:
            experts.generate(prompt)
        assert "gamma=0" in str(caught.value.hint)
        with pytest.raises(InvalidSegment, match="at most 1"):
            experts.score(prompt, CANDIDATES)
        assert ContextExperts(lm, beta=0.5, gamma=0).generate(prompt, max_new_tokens=1).token_ids


def test_what_would_not_be_one_greedy_text_of_one_set_is_refused(lm):
    experts = ContextExperts(lm, beta=0.5, gamma=0)
    for option in ({"do_sample": True}, {"num_beams": 2}, {"num_return_sequences": 3}, {"streamer": object()}):
        with pytest.raises(UnsupportedCombination, match=next(iter(option))):
            experts.generate(PROMPT, **option)
    two = Prompt.of([3], SegmentSet([[5]]), [4], SegmentSet([[6]]), [11])
    with pytest.raises(UnsupportedCombination, match="one set"):
        experts.generate(two)
    with pytest.raises(UnsupportedCombination, match="without routing"):
        ContextExperts(lm.with_method("rotor").with_routing(), beta=0.5)
    for name, value in itertools.product(("beta", "gamma"), (-1.0, math.inf, math.nan)):
        with pytest.raises(InvalidChoice, match=name):
            ContextExperts(lm, **{"beta": 0.5, name: value})
    with pytest.raises(InvalidChoice, match="dynamic"):
        ContextExperts(lm, beta="jsd")


def test_texts_are_read_alone_through_the_chat_template(chat_llama, tokenizer):
    experts = ContextExperts(InvariantModel(chat_llama, tokenizer), beta=0.3)
    documents = [Segment("It rains.", title="Weather", score=0.4), Segment("Nothing.", score=0.7)]
    answers = {
        experts.generate(experts.chat_prompt("Why?", random.Random(seed).sample(documents, 2)), max_new_tokens=4).text
        for seed in range(4)
    }
    assert len(answers) == 1


def test_a_deterministic_model_answers_as_another_one(lm):
    exact = lm.with_method(deterministic=True)
    for kind in (ContextExperts, PermutationAverage):
        one, other = (kind(each).generate(PROMPT, max_new_tokens=4) for each in (lm, exact))
        assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
