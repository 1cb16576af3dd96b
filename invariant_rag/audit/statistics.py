"""Confidence intervals of shares, means and differences, and a paired test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

CONFIDENCE = 0.95
TAIL = (1 - CONFIDENCE) / 2  # how often either bound of an interval may miss
DIFFERENCE_TAIL = 0.015  # of a difference, by its formula: it covers 95% in the worst simulated world, too
RESAMPLES = 2000
FLIPS = 4999
_BATCH = 100  # sign flips that are drawn at a time, which bounds memory
_SAME = 1e-9  # differences of sums of thirds that are equal but for rounding


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


def wilson_interval(successes: int, trials: int, tail: float = TAIL) -> Estimate:
    """Return a share with its Wilson score interval."""
    from scipy.stats import binomtest

    interval = binomtest(successes, trials).proportion_ci(1 - 2 * tail, method="wilson")
    return Estimate(successes / trials, float(interval.low), float(interval.high))


def exact_upper_bound(total: float, trials: int, tail: float = 1 - CONFIDENCE) -> float:
    """Return the exact (Clopper-Pearson) one-sided upper bound of a share; a total of parts counts as in between."""
    from scipy.stats import beta

    return 1.0 if total >= trials else float(beta.isf(tail, total + 1, trials - total))


def mean_interval(scores: Sequence[float] | Floats, seed: int = 0, tail: float = TAIL) -> Estimate:
    """Return the mean of independent scores, one per question, with its interval; either bound may miss by `tail`.

    Scores that are all 0 or 1 have a Wilson interval, others from 0 to 1 that of Agresti and Coull (1998) for means:
    two scores of 0 and two of 1 are added. Scores without bounds, such as seconds, have a percentile bootstrap by
    `seed`, which is too narrow for the others where most are equal.
    """
    values = np.asarray(scores, dtype=np.float64)
    if np.isin(values, (0.0, 1.0)).all():
        return wilson_interval(int(values.sum()), len(values), tail)
    if values.min() >= 0 and values.max() <= 1:
        return _adjusted_mean(values, (0.0, 1.0), 2.0, tail)
    low, high = np.quantile(resampled_means(values[:, None], seed), (tail, 1 - tail))
    return Estimate(float(values.mean()), float(low), float(high))


def mean_difference(ours: ArrayLike, theirs: ArrayLike, tail: float = DIFFERENCE_TAIL, added: float = 1.0) -> Estimate:
    """Return the mean of `ours` minus `theirs`, scores from 0 to 1 that are paired by question, with its interval.

    One pair that gains everything and one that loses everything are `added` (Agresti and Min, 2005, add half of each),
    so the interval is never without width, and covers where few pairs differ at all. Either bound may miss by `tail`.
    """
    return _adjusted_mean(np.subtract(ours, theirs, dtype=np.float64), (-1.0, 1.0), added, tail)


def _adjusted_mean(values: Floats, bounds: tuple[float, float], added: float, tail: float) -> Estimate:
    """Return a mean with the normal interval of the values and of so many more at each of their bounds."""
    from scipy.stats import norm

    every, weights = np.append(values, bounds), np.append(np.ones(len(values)), [added, added])
    centre = float(np.average(every, weights=weights))
    variance = float(np.average((every - centre) ** 2, weights=weights))
    margin = float(norm.isf(tail)) * (variance / float(weights.sum())) ** 0.5
    return Estimate(float(values.mean()), max(bounds[0], centre - margin), min(bounds[1], centre + margin))


def resampled_means(scores: Floats, seed: int) -> Floats:
    """Return column means `[B, columns]` of B resamples of the rows, for all statistics of them at once."""
    shares = np.full(len(scores), 1 / len(scores))
    counts = np.random.default_rng(seed).multinomial(len(scores), shares, size=RESAMPLES)  # how often each was drawn
    return np.asarray(counts @ scores / len(scores))


def paired_p_value(differences: ArrayLike, seed: int = 0) -> float:
    """Return the one-tailed p-value of "the mean of these paired differences is above 0": the sign-flip test.

    Differences of one size, such as right against wrong, make it the exact test of McNemar; few others are flipped in
    every way, more at random. NaN is left out.
    """
    from scipy.stats import binomtest, permutation_test

    values = np.asarray(differences, dtype=np.float64)
    values = values[np.abs(values) > _SAME]  # NaN is above nothing
    if not len(values):
        return 1.0
    if np.ptp(np.abs(values)) < _SAME:
        return float(binomtest(int((values > 0).sum()), len(values), alternative="greater").pvalue)
    options = {"permutation_type": "samples", "vectorized": True, "alternative": "greater", "n_resamples": FLIPS}
    return float(permutation_test((values,), np.mean, rng=seed, batch=_BATCH, **options).pvalue)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values that are corrected for their number (Holm 1979)."""
    corrected, largest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda each: p_values[each])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        corrected[name] = largest
    return {name: corrected[name] for name in p_values}
