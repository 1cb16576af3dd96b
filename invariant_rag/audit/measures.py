"""The measures of an audit, each with its interval: six of the system, and the differences of remedies from today."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from invariant_rag.audit.grading import FAILED, RIGHT
from invariant_rag.audit.plan import TODAY, relative_places
from invariant_rag.audit.remedies import SLOTS, slot_of
from invariant_rag.audit.screen import ANOTHER, FIRST, OTHER, PLACEBO
from invariant_rag.audit.statistics import (
    CONFIDENCE,
    Estimate,
    holm,
    mean_difference,
    mean_of_shares,
    paired_p_value,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from invariant_rag.audit.remedies import Remedy
    from invariant_rag.audit.result import Asked, Drawn

    Floats = NDArray[np.float64]

ABOUT = {
    "accuracy_today": "share of right answers in the order that your retriever gives; a call that failed is not right",
    "accuracy_over_orders": "share of right answers in random orders",
    "net_sensitivity": "disagreement between orders, minus disagreement within one order",
    "worst_slot": "accuracy where the documents with the answer stand in the worst part of the prompt",
    "errors": "share of calls without an answer, after all retries",
    "calls": "calls of the screen for each question",
}
"""What each of the six measures says."""

TODAY_DRAWS = (FIRST, PLACEBO)
"""Distinct draws of today, which no cache makes equal."""

TAIL = (1 - CONFIDENCE) / 2
REMEDY_LEVEL = 0.02
FEWEST = 5
"""Calls in a part of the prompt, from which its accuracy is measured."""


def measure(asked: Sequence[Asked]) -> dict[str, Estimate]:
    """Return the measures of the system as it is, but for net sensitivity and calls."""
    scored = [each for each in asked if each.scored]
    failed = np.array([[each == FAILED for each in one.classes] for one in asked], dtype=np.float64)
    found = {"errors": mean_of_shares(failed.mean(axis=1))}
    if scored:
        found["accuracy_today"] = mean_of_shares(_right(scored, TODAY_DRAWS))
        found["accuracy_over_orders"] = mean_of_shares(_right(scored, (OTHER, ANOTHER)))
        worst = worst_slot(scored)
        if worst is not None:
            found["worst_slot"] = worst
    return found


def flips(asked: Sequence[Asked]) -> tuple[Estimate, Estimate | None]:
    """Return the share of questions of which some order changes the outcome, and of those right in every order asked.

    Both grow with the number of calls and with noise, so they describe one system and are never compared.
    """
    scored = [each for each in asked if each.scored]
    always = [float(all(each.classes[column] == RIGHT for column in (FIRST, OTHER, ANOTHER))) for each in scored]
    flipping = np.array([float(each.flips) for each in asked])
    return mean_of_shares(flipping), mean_of_shares(np.array(always)) if scored else None


def slot_accuracies(scored: Sequence[Asked], tail: float = TAIL) -> list[Estimate | None]:
    """Return the accuracy by the part of the prompt in which the documents with the answer stand, from random orders.

    The order of today is left out: what a retriever lists first is also what is easy to answer.
    """
    return [mean_of_shares(values, tail) if len(values) >= FEWEST else None for values in _by_slot(scored)]


def worst_slot(scored: Sequence[Asked]) -> Estimate | None:
    """Return the accuracy of the worst part of the prompt; None if fewer than two are known.

    The minimum of noisy means is too low, so the worst part is chosen on one half of the questions and measured on the
    other, both ways. The interval holds whichever part is the worst (Bonferroni).
    """
    whole = slot_accuracies(scored)
    known = [number for number, each in enumerate(whole) if each is not None]
    if len(known) < 2:
        return None
    halves = [_by_slot(scored[start::2]) for start in range(2)]
    values = []
    for chosen, measured in (halves, halves[::-1]):
        usable = [number for number in known if len(chosen[number]) and len(measured[number])]
        if usable:
            worst = min(usable, key=lambda number: float(np.mean(chosen[number])))
            values.append(float(np.mean(measured[worst])))
    bounds = slot_accuracies(scored, TAIL / len(known))
    low = min(each.low for each in whole if each is not None)
    high = min(each.high for each in bounds if each is not None)
    value = sum(values) / len(values) if values else low
    return Estimate(value, min(low, value), max(high, value))


def _by_slot(scored: Sequence[Asked]) -> list[Floats]:
    """Return for each part the mean outcome of the calls of each question that has some there."""
    found: list[list[float]] = [[] for _ in range(SLOTS)]
    for each in scored:
        places = relative_places(each.question, [each.orders[column] for column in (OTHER, ANOTHER)])
        slots = [None if place is None else slot_of(place) for place in places]
        for slot in {slot for slot in slots if slot is not None}:
            columns = [column for column, one in zip((OTHER, ANOTHER), slots, strict=True) if one == slot]
            found[slot].append(sum(each.classes[column] == RIGHT for column in columns) / len(columns))
    return [np.array(values, dtype=np.float64) for values in found]


def _right(asked: Sequence[Asked], columns: Sequence[int]) -> Floats:
    return np.array([np.mean([each.classes[column] == RIGHT for column in columns]) for each in asked])


@dataclass(frozen=True)
class Comparison:
    """A remedy against today: as many distinct draws of each, on the same questions.

    Attributes:
        name: The remedy.
        about: What it does.
        fixes: Whether the order of today changes nothing after it, by construction.
        questions: Questions that were compared.
        accuracy: Accuracy with it; None without gold answers.
        gain: Accuracy with it minus accuracy today.
        p: One-tailed p-value of the gain, corrected for the number of remedies.
        calls: Calls for one answer.
    """

    name: str
    about: str
    fixes: bool
    questions: int
    accuracy: Estimate | None
    gain: Estimate | None
    p: float
    calls: float

    @property
    def is_better(self) -> bool:
        """Whether it is right more often than today, beyond noise."""
        return self.gain is not None and self.gain.value > 0 and self.p <= REMEDY_LEVEL

    def costs_less_than(self, margin: float) -> bool:
        """Return whether it loses less accuracy than a margin, beyond doubt."""
        return self.gain is not None and self.gain.low > -margin


def compare(drawn: Sequence[Drawn], remedies: Sequence[Remedy]) -> list[Comparison]:
    """Compare remedies with today, on the questions that both were asked."""
    found, p_values = [], {}
    for remedy in remedies:
        both = [each for each in drawn if each.scored and {TODAY, remedy.name} <= each.draws.keys()]
        accuracy = gain = None
        if both:
            ours, today = (
                np.array([np.mean([draw == RIGHT for draw in each.draws[arm]]) for each in both])
                for arm in (remedy.name, TODAY)
            )
            accuracy, gain = mean_of_shares(ours), mean_difference(ours, today)
            p_values[remedy.name] = paired_p_value(ours - today)
        found.append(
            Comparison(remedy.name, remedy.about, remedy.fixes, len(both), accuracy, gain, 1.0, float(remedy.votes))
        )
    corrected = holm(p_values)
    return [replace(each, p=corrected.get(each.name, 1.0)) for each in found]
