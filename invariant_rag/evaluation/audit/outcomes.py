"""Outcomes of calls as arrays, which every measure, test and simulation of an audit works on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


def _nothing() -> Floats:
    return np.empty((0, 0))


@dataclass(frozen=True)
class Outcomes:
    """What came of the calls with one remedy, or with the system as it is.

    The arrays are `[questions, calls]`. An outcome is 1 (right) or 0 (wrong) where gold answers are known, else the
    number of an answer: two outcomes of a question are equal if and only if they are the same. So other words are no
    other outcome where gold answers are known. Scores are those of the metric. NaN: no answer, or nothing to score it
    by.

    Attributes:
        given: Outcomes in the order that the retriever gives, asked repeatedly: what users get today.
        orders: Outcomes in the other input orders.
        salted: Outcomes in salted canonical orders.
        given_scores: Scores in the order that the retriever gives.
        order_scores: Scores in the other input orders.
        slot_scores: Scores by slot of the gold segments in the input.
        salted_scores: Scores by slot of the gold segments in salted canonical orders.
    """

    given: Floats
    orders: Floats
    salted: Floats = field(default_factory=_nothing)
    given_scores: Floats = field(default_factory=_nothing)
    order_scores: Floats = field(default_factory=_nothing)
    slot_scores: Floats = field(default_factory=_nothing)
    salted_scores: Floats = field(default_factory=_nothing)

    @property
    def today(self) -> Floats:
        """Mean scores `[questions]` in the order that the retriever gives."""
        return known_means(self.given_scores)

    @property
    def instability(self) -> Floats:
        """How likely two different input orders are to have different outcomes `[questions]`."""
        return disagreement(np.hstack([self.given[:, :1], self.orders]))

    @property
    def noise(self) -> Floats:
        """How likely two calls in the given order are to have different outcomes `[questions]`."""
        return disagreement(self.given)


def known_means(values: Floats) -> Floats:
    """Return the mean of what is known in each row; NaN where nothing is.

    >>> known_means(np.array([[1.0, np.nan], [np.nan, np.nan]])).tolist()
    [1.0, nan]
    """
    known = np.isfinite(values)
    counts = known.sum(axis=1)
    means = np.full(len(values), np.nan)
    np.divide(np.where(known, values, 0.0).sum(axis=1), counts, out=means, where=counts > 0)
    return means


def disagreement(outcomes: Floats) -> Floats:
    """Return how likely two known outcomes of a row, drawn without replacement, are to differ; NaN for fewer than two.

    >>> disagreement(np.array([[0.0, 1.0, 1.0], [2.0, 2.0, np.nan]])).round(3).tolist()
    [0.667, 0.0]
    """
    counts = np.isfinite(outcomes).sum(axis=1)
    alike = np.zeros(len(outcomes))
    for value in np.unique(outcomes[np.isfinite(outcomes)]):
        same = (outcomes == value).sum(axis=1)
        alike += same * (same - 1)
    pairs = counts * (counts - 1)
    same_share = np.full(len(outcomes), np.nan)
    np.divide(alike, pairs, out=same_share, where=pairs > 0)
    return np.asarray(1.0 - same_share)
