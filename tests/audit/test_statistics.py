"""Claims about intervals and chance, against scipy, published values and cases worked out by hand."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import bootstrap as scipy_bootstrap
from scipy.stats import norm

from invariant_rag.audit import statistics as stats
from invariant_rag.audit.statistics import Estimate, mean_difference, mean_interval, paired_p_value, wilson_interval


@pytest.mark.parametrize(
    ("estimate", "value", "low", "high"),
    [
        (wilson_interval(0, 20), 0, 0, 0.1611),  # Agresti and Coull 1998
        (wilson_interval(5, 10), 0.5, 0.2366, 0.7634),
        (mean_interval([1.0] * 5 + [0.0] * 5), 0.5, 0.2366, 0.7634),  # what is right or wrong is a share
        (mean_interval([0.0, 0.5, 1.0, 0.5] * 100), 0.5, 0.4654, 0.5346),  # 1.96 standard errors, nearly
        (mean_interval([0.5]), 0.5, 0.1080, 0.8920),  # a single question says almost nothing
        (mean_interval([7.5]), 7.5, 7.5, 7.5),  # without bounds, one number says nothing of another
        # Of 20 equal pairs, Newcombe's (1998) interval has the bound of Wilson for 0 of 20, 0.1611. Ours adds a pair
        # that gains everything and one that loses everything: of these 22 values, the mean is 0 and the variance 2/22,
        # so the bound is z(0.985) * sqrt(2/22 / 22) = 2.1701 * sqrt(2) / 22 = 0.1395, which is narrower: a larger
        # share would have been seen 19 times out of 20, as 0.8605**20 is 0.0496.
        (mean_difference([1.0] * 20, [1.0] * 20), 0, -0.1395, 0.1395),
    ],
)
def test_intervals_are_as_published_or_worked_out(estimate, value, low, high):
    assert estimate.value == value
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=6e-5)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_an_interval_holds_its_mean_and_follows_from_its_seed(scores):
    estimate = mean_interval(scores)
    assert estimate.low - 1e-9 <= estimate.value <= estimate.high + 1e-9
    assert estimate == mean_interval(scores)


def test_the_difference_of_means_is_paired_by_question_and_a_lower_tail_is_wider():
    hard = np.random.default_rng(0).random(50)
    difference = mean_difference(hard + 0.1, hard)
    assert difference.value == pytest.approx(0.1)
    assert -0.01 < difference.low < 0.1 < difference.high < 0.25
    two, one = (mean_difference([1.0] * 5 + [0.0] * 35, [0.0] * 40, tail=tail) for tail in (0.025, 0.05))
    assert two.low < one.low < one.value < one.high < two.high


@pytest.mark.parametrize(("questions", "share"), [(20, 0.1), (50, 0.05), (100, 0.02), (200, 0.02)])
def test_the_interval_of_a_gain_holds_the_truth_where_few_questions_differ(questions, share):
    """With half a pair of each kind, as Agresti and Min add, these miss 8% to 13% of the time."""
    source = np.random.default_rng(0)
    found = [mean_difference(source.random(questions) < share, np.zeros(questions)) for _ in range(400)]
    assert sum(not each.low <= share <= each.high for each in found) <= 0.04 * 400


@pytest.mark.parametrize(("questions", "share"), [(20, 0.5), (100, 0.01), (300, 0.05)])
def test_the_interval_of_rare_scores_holds_the_truth(questions, share):
    """They are what a percentile bootstrap fails on: at 1% of 100 questions it covers 3 in 5."""
    source = np.random.default_rng(0)
    scores = [(source.random(questions) < share) * source.choice([0.25, 0.5, 0.75], questions) for _ in range(400)]
    found = [mean_interval(each) for each in scores]
    assert sum(not each.low <= share / 2 <= each.high for each in found) <= 0.08 * 400


def test_the_mean_of_what_has_no_bounds_has_the_interval_that_scipy_gives():
    values = 7 + np.random.default_rng(3).random(80)
    ours = mean_interval(values)
    scipys = scipy_bootstrap((values,), np.mean, n_resamples=20_000, batch=500, method="percentile", rng=1)
    # The ends scatter from seed to seed by about 2% of the width.
    assert (ours.low, ours.high) == pytest.approx(tuple(scipys.confidence_interval), abs=0.15 * scipys.standard_error)


def test_a_bound_of_an_unseen_share_is_missed_once_in_twenty_and_estimates_are_written_with_their_interval():
    for trials in (1, 28, 29, 300):
        assert (1 - stats.exact_upper_bound(0, trials)) ** trials == pytest.approx(0.05)
    estimate = Estimate(1 / 3, 0.25, 0.5)
    assert str(estimate) == "0.333 [0.250, 0.500]"
    assert estimate.as_dict() == {"value": 0.333333, "low": 0.25, "high": 0.5}


@pytest.mark.parametrize(
    "differences", [[0.4, 0.3, 0.2, -0.1, 0.25, 0.6], [1.0] * 5, [1.0] * 8 + [-1.0], [1.0] * 3 + [-1.0] * 3]
)
def test_a_paired_p_value_is_the_share_of_sign_flips_that_gain_as_much(differences):
    signs = np.array(list(product([1, -1], repeat=len(differences))))
    share = ((signs * differences).sum(axis=1) >= sum(differences) - 1e-9).mean()
    assert paired_p_value([*differences, *[0.0] * 50, math.nan]) == pytest.approx(share, abs=1e-12)


def test_many_differences_are_tested_too_and_several_p_values_corrected_by_holm():
    mcnemar = sum(math.comb(42, k) for k in range(30, 43)) / 2**42  # 30 better, 12 worse
    assert paired_p_value([1.0] * 30 + [-1.0] * 12) == pytest.approx(mcnemar)
    many = np.random.default_rng(0).normal(0.1, 0.5, 100)
    z = many.mean() / np.sqrt((many**2).sum()) * 100
    assert paired_p_value(many) == pytest.approx(norm.sf(z), abs=0.02)
    assert paired_p_value([]) == paired_p_value([0.0, math.nan]) == 1.0
    assert stats.holm({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx({"a": 0.06, "b": 0.03, "c": 0.06})
    assert stats.holm({}) == {}
