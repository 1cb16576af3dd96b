"""Paired bootstrap intervals: questions are drawn again, and all that was measured on a question goes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_SHUFFLES, _CHUNK = 1000, 50


@dataclass(frozen=True)
class Estimate:
    """A number with the ends of its 95% percentile interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Bootstrap:
    """Resamples of the same questions for every measure, so that differences are paired.

    Args:
        questions: Number of questions, at least 1.
        resamples: Number of resamples.
        seed: Seed of the resamples.
    """

    def __init__(self, questions: int, resamples: int = 2000, seed: int = 0) -> None:
        shares = np.full(questions, 1 / questions)
        counts = np.random.default_rng(seed).multinomial(questions, shares, size=resamples)
        # The first row is the sample itself.
        self._weights = np.concatenate([np.ones((1, questions)), counts.astype(np.float64)])  # [1 + B, Q]

    def means(self, values: Floats) -> Floats:
        """Return weighted means `[1 + B, ...]` over the first axis of `[Q, ...]`, of what is not NaN."""
        flat = values.reshape(len(values), -1)
        known = np.isfinite(flat)
        totals, counts = self._weights @ np.where(known, flat, 0.0), self._weights @ known.astype(np.float64)
        with np.errstate(invalid="ignore"):
            means: Floats = (totals / counts).reshape(-1, *values.shape[1:])
        return means

    def spread(self, slots: Floats) -> Floats:
        """Return largest less smallest mean over slots, `[1 + B]`, of `[Q, slots]`."""
        means = self.means(slots)
        return np.asarray(means.max(axis=1) - means.min(axis=1))

    def deviation(self, slots: Floats) -> Floats:
        """Return the standard deviation (of the slots at hand, not of a larger population) of the means over slots."""
        return np.asarray(self.means(slots).std(axis=1))


def interval(statistics: Floats) -> Estimate:
    """Return the first of `[1 + B]` with the 2.5th and the 97.5th percentile of the others that are not NaN."""
    low, high = np.nanpercentile(statistics[1:], [2.5, 97.5])
    return Estimate(float(statistics[0]), float(low), float(high))


def chance_spread(slots: Floats, seed: int = 0) -> float | None:
    """Return the spread over slots that chance alone stays below 19 times out of 20.

    Every question's slots are shuffled, which keeps how hard the question is and forgets which slot was which. The
    largest of several noisy means less the smallest is never 0; a spread means something above this.

    Args:
        slots: Accuracy `[Q, slots]`; questions with a NaN are left out.
        seed: Seed of the shuffles.
    """
    known = slots[np.isfinite(slots).all(axis=1)]
    if not known.size:
        return None
    source = np.random.default_rng(seed)
    spreads = []
    for _ in range(_SHUFFLES // _CHUNK):
        means = source.permuted(np.broadcast_to(known, (_CHUNK, *known.shape)), axis=2).mean(axis=1)
        spreads.append(means.max(axis=1) - means.min(axis=1))
    return float(np.percentile(np.concatenate(spreads), 95))
