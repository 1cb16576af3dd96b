"""Intervals: Wilson's for shares, the bootstrap over questions for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Matrix: TypeAlias = npt.NDArray[np.float64]

RESAMPLES = 1000
_Z = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """Return plain data, rounded to what can be meant."""
        return {name: round(value, 6) for name, value in asdict(self).items()}


def wilson(right: float, count: int) -> Estimate:
    """Return a share with Wilson's 95% interval.

    >>> wilson(8, 10).as_dict()
    {'value': 0.8, 'low': 0.490162, 'high': 0.943318}
    """
    share, width = right / count, _Z * _Z / count
    middle = (share + width / 2) / (1 + width)
    reach = _Z / (1 + width) * math.sqrt(share * (1 - share) / count + width / (4 * count))
    return Estimate(share, max(0.0, middle - reach), min(1.0, middle + reach))


def of_shares(scores: Sequence[float], seed: int = 0) -> Estimate:
    """Return the mean of independent scores: with Wilson's interval where all are 0 or 1, else by bootstrap."""
    if all(score in {0.0, 1.0} for score in scores):
        return wilson(sum(scores), len(scores))
    import numpy as np

    values = np.array(scores, dtype=np.float64)[:, None]
    return bootstrap(values, lambda weights: (weights @ values)[:, 0] / weights.sum(axis=1), seed)


def difference(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Estimate:
    """Return the mean of ours minus theirs, question by question, with its bootstrap interval."""
    import numpy as np

    values = np.array(ours, dtype=np.float64)[:, None] - np.array(theirs, dtype=np.float64)[:, None]
    return bootstrap(values, lambda weights: (weights @ values)[:, 0] / weights.sum(axis=1), seed)


def bootstrap(matrix: Matrix, statistic: Callable[[Matrix], Matrix], seed: int = 0) -> Estimate:
    """Return a statistic with its percentile interval, the questions (rows) drawn anew with replacement.

    Args:
        matrix: Scores `[questions, variants]`; only its number of rows is used here.
        statistic: Takes weights of the questions `[resamples, questions]` and returns its values `[resamples]`.
        seed: Seed of the draws: the same records give the same interval.
    """
    import numpy as np

    rows = matrix.shape[0]
    draws = np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), RESAMPLES).astype(np.float64)
    low, high = np.nanpercentile(statistic(draws), [2.5, 97.5])
    return Estimate(float(statistic(np.ones((1, rows)))[0]), float(low), float(high))
