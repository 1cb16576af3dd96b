"""Confidence intervals of shares, means and spreads, a paired test, and the spread that chance alone makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan, nan
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 2000
PERMUTATIONS = 1000
_BATCH = 100  # resamples that scipy draws at a time, which bounds its memory to [100, questions]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% confidence interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """Return plain data, rounded to six digits."""
        return {name: round(value, 6) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson_interval(successes: int, trials: int) -> Estimate:
    """Return a share with its Wilson score interval.

    >>> wilson_interval(8, 10).as_dict()
    {'value': 0.8, 'low': 0.490162, 'high': 0.943318}
    """
    from scipy.stats import binomtest

    interval = binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(successes / trials, float(interval.low), float(interval.high))


def zero_share_upper_bound(trials: int) -> float:
    """Return the exact (Clopper-Pearson) one-sided upper bound of a share of which none was seen in `trials`.

    A bootstrap cannot give it: every resample of zeros is zeros.

    >>> round(zero_share_upper_bound(100), 4)
    0.0295
    """
    from scipy.stats import binomtest

    return float(binomtest(0, trials, alternative="less").proportion_ci(CONFIDENCE, method="exact").high)


def mean_interval(scores: Sequence[float], seed: int = 0) -> Estimate:
    """Return the mean of independent scores with its interval, which is never without width.

    Scores that are all 0 or 1 have a Wilson interval. Others from 0 to 1 have the interval of Agresti and Coull (1998),
    "add two successes and two failures", for means: that of the normal distribution after two scores of 0 and two of 1
    were added. A percentile bootstrap is too narrow where most scores are equal, and has no width where all are. Scores
    without bounds have a bootstrap interval.

    Args:
        scores: One score per question, at least one.
        seed: Seed of the resamples of scores without bounds: equal scores give equal intervals.
    """
    if all(score in {0.0, 1.0} for score in scores):
        return wilson_interval(int(sum(scores)), len(scores))
    values = np.array(scores, dtype=np.float64)
    if values.min() < 0 or values.max() > 1:
        return _bootstrap_mean(values, seed)
    return _adjusted_mean(values, {0.0: 2.0, 1.0: 2.0})


def mean_difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Return the mean of `ours` minus `theirs`, scores from 0 to 1 that are paired by question, with its interval.

    The interval is that of Agresti and Min (2005) for matched pairs, for means: that of the normal distribution after
    two questions were added, spread evenly over the four outcomes of a pair. It is never without width.
    """
    return _adjusted_mean(np.subtract(ours, theirs, dtype=np.float64), {-1.0: 0.5, 0.0: 1.0, 1.0: 0.5})


def _adjusted_mean(values: Floats, added: Mapping[float, float]) -> Estimate:
    """Return a mean with the normal interval of the values and added ones, of given weights, within their bounds."""
    from scipy.stats import norm

    every = np.append(values, list(added))
    weights = np.append(np.ones(len(values)), list(added.values()))
    centre = float(np.average(every, weights=weights))
    variance = float(np.average((every - centre) ** 2, weights=weights))
    margin = float(norm.ppf((1 + CONFIDENCE) / 2)) * (variance / float(weights.sum())) ** 0.5
    return Estimate(float(values.mean()), max(min(added), centre - margin), min(max(added), centre + margin))


def _bootstrap_mean(values: Floats, seed: int) -> Estimate:
    """Return a mean with its percentile interval."""
    from scipy.stats import bootstrap

    mean = float(values.mean())
    if len(values) < 2:  # scipy refuses a single observation, of which every resample is the same
        return Estimate(mean, mean, mean)
    found = bootstrap(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=_BATCH,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=seed,
    )
    return Estimate(mean, float(found.confidence_interval.low), float(found.confidence_interval.high))


@dataclass(frozen=True)
class PairedTest:
    """A paired two-tailed t-test at the level of 5%.

    Attributes:
        difference: Mean of the differences.
        t: The t-statistic; NaN if all differences are the same.
        degrees_of_freedom: Number of pairs minus one.
        critical: Critical value of the t-statistic.
        p: The p-value; NaN if all differences are the same.
    """

    difference: float
    t: float
    degrees_of_freedom: int
    critical: float
    p: float

    @property
    def significant(self) -> bool:
        """Whether the mean difference is not 0, at the level of 5%."""
        return abs(self.t) > self.critical

    def as_dict(self) -> dict[str, float | None]:
        """Return plain data, rounded to six digits; None instead of NaN, which JSON does not have."""
        return {name: None if isnan(value) else round(value, 6) for name, value in asdict(self).items()}


def paired_t_test(before: Sequence[float], after: Sequence[float]) -> PairedTest:
    """Test whether the mean of `before` minus `after` differs from 0, as in RoToR (arXiv 2502.08662, appendix I).

    The t-statistics of the paper's Table 8 are larger by a factor of sqrt(9/8): it divides the variance of the nine
    differences by nine, where the t-test divides by eight. The conclusions are the same.

    >>> test = paired_t_test([51.9, 51.7, 34.9], [51.0, 51.0, 34.7])
    >>> round(test.difference, 2), round(test.t, 2), test.significant
    (0.6, 2.88, False)

    Args:
        before: Scores with the initial order, at least two.
        after: Scores with the shuffled order, paired with `before`.
    """
    from scipy.stats import t, ttest_rel

    differences = np.subtract(before, after, dtype=np.float64)
    freedom = len(differences) - 1
    critical = float(t.ppf((1 + CONFIDENCE) / 2, freedom))
    mean = float(differences.mean())
    if np.ptp(differences) == 0:  # no variance to test against
        return PairedTest(mean, nan, freedom, critical, nan)
    found = ttest_rel(before, after)
    return PairedTest(mean, float(found.statistic), freedom, critical, float(found.pvalue))


class PairedBootstrap:
    """Bootstrap of many statistics over the same resamples of the questions, so that their differences are paired.

    Every method returns a statistic of all questions followed by that of every resample, `[1 + B]`. Subtract two of
    these before `percentile_interval` for a paired difference. scipy.stats.bootstrap resamples for one statistic at a
    time and knows no missing values.

    Args:
        questions: Number of questions Q, at least 1.
        resamples: Number of resamples B.
        seed: Seed of the resamples.
    """

    def __init__(self, questions: int, resamples: int = RESAMPLES, seed: int = 0) -> None:
        # A resample is how often each question was drawn; the first row is the questions themselves.
        self._counts = np.ones((1 + resamples, questions))  # [1 + B, Q]
        shares = np.full(questions, 1 / questions)
        self._counts[1:] = np.random.default_rng(seed).multinomial(questions, shares, size=resamples)

    def means(self, values: Floats) -> Floats:
        """Return means `[1 + B, ...]` over the first axis of `[Q, ...]`. NaN is left out; of nothing else it is NaN."""
        flat = values.reshape(len(values), -1)
        known = np.isfinite(flat)
        totals, counts = self._counts @ np.where(known, flat, 0.0), self._counts @ known.astype(np.float64)
        with np.errstate(invalid="ignore"):
            means: Floats = (totals / counts).reshape(-1, *values.shape[1:])
        return means

    def spread(self, scores: Floats) -> Floats:
        """Return the largest minus the smallest column mean, `[1 + B]`, of `[Q, columns]`."""
        means = self.means(scores)
        return np.asarray(np.fmax.reduce(means, axis=1) - np.fmin.reduce(means, axis=1))

    def deviation(self, scores: Floats) -> Floats:
        """Return the standard deviation of the column means (of these columns, not of a population), `[1 + B]`."""
        means = self.means(scores)
        deviations = np.full(len(means), np.nan)
        known = np.isfinite(means).any(axis=1)
        deviations[known] = np.nanstd(means[known], axis=1)
        return deviations


def percentile_interval(statistics: ArrayLike) -> Estimate:
    """Return the first of `[1 + B]` statistics with the percentile interval of the others that are not NaN."""
    listed = np.asarray(statistics, dtype=np.float64)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.nanpercentile(listed[1:], [tail, 100 - tail])
    return Estimate(float(listed[0]), float(low), float(high))


def chance_spread(slots: Floats, seed: int = 0) -> float | None:
    """Return the spread over slots that chance alone stays below 19 times out of 20; None without complete questions.

    The null distribution of a permutation test: every question's scores are shuffled over the slots, which keeps how
    hard the question is and forgets which slot was which. The largest of several noisy means minus the smallest is
    never 0; a spread means something only above this.

    Args:
        slots: Accuracy `[Q, slots]`; questions with a NaN are left out.
        seed: Seed of the shuffles.
    """
    known = slots[np.isfinite(slots).all(axis=1)]
    return float(np.quantile(np.ptp(_shuffled_means(known, seed), axis=1), CONFIDENCE)) if known.size else None


def _shuffled_means(scores: Floats, seed: int) -> Floats:
    """Return column means `[P, columns]` of P shuffles of every row: what they are if no column differs from another.

    scipy.stats.permutation_test would shuffle once more for every statistic of them.
    """
    source = np.random.default_rng(seed)
    return np.stack([source.permuted(scores, axis=1).mean(axis=0) for _ in range(PERMUTATIONS)])


@dataclass(frozen=True)
class Variation:
    """How much the mean score varies over the variants of the questions, and how much it would by chance.

    Attributes:
        estimate: The variation that was seen, which noise makes larger than the true one, with the interval of the true
            one.
        chance: What chance alone stays below 19 times out of 20.
    """

    estimate: Estimate
    chance: float

    @property
    def is_more_than_chance(self) -> bool:
        """Whether the variation is larger than chance would make it."""
        return self.estimate.value > self.chance


def variations(scores: Floats, seed: int = 0) -> dict[str, Variation]:
    """Return `spread` (best mean minus worst) and `deviation` (standard deviation of the means) over variants.

    Both are seminorms of the means: that of a sum is at most the sum of both. So the variation that was seen differs
    from the true one by at most the variation of the errors, of which the bootstrap gives the 95% quantile: the margin
    of the interval. (Percentiles of the variation itself exclude 0 even where the true one is 0.) The margin is at
    least the largest share of questions of which none was seen, so that no interval is without width.

    Args:
        scores: Scores `[questions, variants]` from 0 to 1; questions that lack a variant are left out, since variants
            that were asked of other questions cannot be compared. Nothing is returned if no other is left.
        seed: Seed of resamples and shuffles.
    """
    known = scores[np.isfinite(scores).all(axis=1)]
    if not known.size or known.shape[1] < 2:
        return {}
    means, by_chance = PairedBootstrap(len(known), seed=seed).means(known), _shuffled_means(known, seed)
    found = {}
    for name, statistic in (("spread", np.ptp), ("deviation", np.std)):
        value = float(statistic(means[0]))
        error = float(np.quantile(statistic(means[1:] - means[0], axis=1), CONFIDENCE))
        margin = max(error, zero_share_upper_bound(len(known)))
        chance = float(np.quantile(statistic(by_chance, axis=1), CONFIDENCE))
        found[name] = Variation(Estimate(value, max(0.0, value - margin), min(1.0, value + margin)), chance)
    return found
