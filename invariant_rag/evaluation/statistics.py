"""Confidence intervals (Wilson for shares, the bootstrap for everything else), and the spread due to chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    """Return the mean of independent scores: with a Wilson interval if all are 0 or 1, else with a bootstrap one.

    Args:
        scores: One score per question, at least one.
        seed: Seed of the resamples: equal scores give equal intervals.
    """
    if all(score in {0.0, 1.0} for score in scores):
        return wilson_interval(int(sum(scores)), len(scores))
    return _bootstrap_mean(np.array(scores, dtype=np.float64), seed)


def mean_difference(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Estimate:
    """Return the mean of `ours` minus `theirs`, paired by question, with its bootstrap interval."""
    return _bootstrap_mean(np.subtract(ours, theirs, dtype=np.float64), seed)


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
    from scipy.stats import permutation_test

    known = slots[np.isfinite(slots).all(axis=1)]
    if not known.size:
        return None
    if len(known) == 1:  # scipy refuses it: whatever its order, a single question has one spread
        return float(np.ptp(known))
    null = permutation_test(
        tuple(known.T),
        _spread_of_means,
        permutation_type="samples",
        vectorized=True,
        n_resamples=PERMUTATIONS,
        batch=_BATCH,
        alternative="greater",
        rng=seed,
    ).null_distribution
    return float(np.quantile(null, CONFIDENCE))


def _spread_of_means(*samples: Floats, axis: int) -> Floats:
    means = np.stack([sample.mean(axis=axis) for sample in samples])
    return np.asarray(np.ptp(means, axis=0))
