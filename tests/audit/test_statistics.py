"""Claims about intervals and chance, against scipy, published values and cases worked out by hand."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import bootstrap as scipy_bootstrap
from scipy.stats import norm

from invariant_rag.audit.statistics import (
    Estimate,
    exact_upper_bound,
    holm,
    mean_difference,
    mean_interval,
    paired_p_value,
    wilson_interval,
)


def test_the_interval_of_a_share_is_wilsons_and_that_of_a_mean_near_its_standard_error() -> None:
    # Agresti and Coull 1998: 0 of 20, and 5 of 10.
    assert wilson_interval(0, 20).high == pytest.approx(0.1611, abs=1e-4)
    assert (wilson_interval(5, 10).low, wilson_interval(5, 10).high) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert mean_interval([1.0, 0.0, 0.0, 1.0]) == wilson_interval(2, 4)
    estimate = mean_interval([0.0, 0.5, 1.0, 0.5] * 100)
    assert estimate.value == 0.5
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * (0.125 / 400) ** 0.5, rel=0.15)
    one = mean_interval([0.5])  # a single question says almost nothing
    assert (one.low, one.value, one.high) == pytest.approx((0.108, 0.5, 0.892), abs=1e-3)
    assert mean_interval([7.5]) == Estimate(7.5, 7.5, 7.5)  # without bounds, one number says nothing of another


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_an_interval_holds_its_mean_and_follows_from_its_seed(scores: list[float]) -> None:
    estimate = mean_interval(scores)
    assert estimate.low - 1e-9 <= estimate.value <= estimate.high + 1e-9
    assert estimate == mean_interval(scores)


def test_the_difference_of_means_is_paired_by_question_and_a_lower_tail_is_wider() -> None:
    hard = np.random.default_rng(0).random(50)
    difference = mean_difference(hard + 0.1, hard)
    assert difference.value == pytest.approx(0.1)
    assert -0.01 < difference.low < 0.1 < difference.high < 0.25
    two, one = (mean_difference([1.0] * 5 + [0.0] * 35, [0.0] * 40, tail=tail) for tail in (0.025, 0.05))
    assert two.low < one.low < one.value < one.high < two.high
    # Of 20 equal pairs, Newcombe's (1998) interval has the bound of Wilson for 0 of 20, 0.1611. Ours adds a pair that
    # gains everything and one that loses everything: of these 22 values, the mean is 0 and the variance 2/22, so the
    # bound is z(0.985) * sqrt(2/22 / 22) = 2.1701 * sqrt(2) / 22 = 0.1395, which is narrower.
    none = mean_difference([1.0] * 20, [1.0] * 20)
    assert (none.low, none.high) == pytest.approx((-0.1395, 0.1395), abs=5e-5)
    assert 0.04 < (1 - none.high) ** 20 < 0.05  # a larger share would have been seen 19 times out of 20


@pytest.mark.parametrize(("questions", "share"), [(20, 0.1), (50, 0.05), (100, 0.02), (200, 0.02)])
def test_the_interval_of_a_difference_holds_the_truth_where_few_questions_gain(questions: int, share: float) -> None:
    """With half a pair of each kind, as Agresti and Min add, they miss 8% to 13% of the time here."""
    source, missed = np.random.default_rng(0), 0
    for _ in range(400):
        ours = (source.random(questions) < share).astype(float)
        found = mean_difference(ours, np.zeros(questions))
        missed += not found.low <= share <= found.high
    assert missed <= 0.04 * 400


@pytest.mark.parametrize(("questions", "share"), [(20, 0.5), (100, 0.01), (300, 0.05)])
def test_intervals_of_means_hold_the_true_ones(questions: int, share: float) -> None:
    """Rare scores are what a percentile bootstrap fails on: at 1% of 100 questions it covers 3 in 5."""
    source = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        scores = np.where(source.random(questions) < share, source.choice([0.25, 0.5, 0.75], questions), 0.0)
        mean = mean_interval(scores.tolist())
        held += mean.low <= share / 2 <= mean.high
    assert held >= 0.92 * 400


def test_the_mean_of_what_has_no_bounds_has_the_interval_that_scipy_gives() -> None:
    values = 7 + np.random.default_rng(3).random(80)
    ours = mean_interval(values)
    scipys = scipy_bootstrap((values,), np.mean, n_resamples=20_000, batch=500, method="percentile", rng=1)
    # The ends scatter from seed to seed by about 2% of the width.
    assert (ours.low, ours.high) == pytest.approx(tuple(scipys.confidence_interval), abs=0.15 * scipys.standard_error)


@pytest.mark.parametrize("trials", [1, 28, 29, 300])
def test_the_bound_of_an_unseen_share_is_the_one_that_would_be_missed_once_in_twenty(trials: int) -> None:
    assert (1 - exact_upper_bound(0, trials)) ** trials == pytest.approx(0.05)


def test_estimates_are_written_with_their_interval() -> None:
    estimate = Estimate(1 / 3, 0.25, 0.5)
    assert str(estimate) == "0.333 [0.250, 0.500]"
    assert estimate.as_dict() == {"value": 0.333333, "low": 0.25, "high": 0.5}


@pytest.mark.parametrize(("better", "worse"), [(5, 0), (8, 1), (30, 12), (3, 3)])
def test_the_paired_test_of_right_and_wrong_is_mcnemars(better: int, worse: int) -> None:
    differences = [1.0] * better + [-1.0] * worse + [0.0] * 50 + [math.nan]
    exact = sum(math.comb(better + worse, k) for k in range(better, better + worse + 1)) / 2 ** (better + worse)
    assert paired_p_value(differences) == pytest.approx(exact)


def test_the_paired_test_flips_signs_and_several_are_corrected_by_holm() -> None:
    differences = np.array([0.4, 0.3, 0.2, -0.1, 0.25, 0.6])
    signs = np.array(list(product([1, -1], repeat=6)))
    assert paired_p_value(differences) == ((signs * differences).sum(axis=1) >= differences.sum() - 1e-9).mean()
    many = np.random.default_rng(0).normal(0.1, 0.5, 100)
    z = many.mean() / np.sqrt((many**2).sum()) * 100
    assert paired_p_value(many) == pytest.approx(norm.sf(z), abs=0.02)
    assert paired_p_value([]) == paired_p_value([0.0, math.nan]) == 1.0
    assert holm({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx({"a": 0.06, "b": 0.03, "c": 0.06})
    assert holm({}) == {}
