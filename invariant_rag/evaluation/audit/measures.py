"""Measures of an audit: what users get today, what other orders would give, flips, fairness and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from invariant_rag.evaluation.audit.outcomes import Outcomes
from invariant_rag.evaluation.statistics import (
    Estimate,
    bootstrap_mean,
    mean_difference,
    mean_interval,
    variations,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

ABOUT = {
    "today": "accuracy in the order that the retriever gives: what users get today, or would get with the remedy",
    "accuracy": "mean accuracy over input orders",
    "worst": "worst case: accuracy where each question is asked in its worst order",
    "best": "best case: accuracy where each question is asked in its best order",
    "flip_rate": "share of questions right in one order (or repeat) and wrong in another; without gold: answers differ",
    "wording_rate": "share of questions that are answered in other words by some order (or repeat)",
    "sensitivity": "probability that two different orders have different outcomes",
    "noise": "probability that two calls in the same order have different outcomes",
    "net_sensitivity": "sensitivity less noise: what the order alone changes",
    "psr": "share of questions with one answer in all orders (120) of the first five segments (arXiv 2601.02993)",
    "slot_spread": "largest less smallest accuracy over the slots of the gold segments in the input",
    "slot_std": "standard deviation of accuracy over these slots",
    "salted_accuracy": "mean accuracy over salted canonical orders",
    "salted_worst": "accuracy where each question is asked in its worst salted order",
    "salted_sensitivity": "probability that two salted orders have different outcomes",
    "salted_spread": "largest less smallest accuracy over the slots of the gold segments in salted canonical orders",
    "salted_std": "standard deviation of accuracy over these slots",
    "unreadable": "share of verdicts that name neither response, empty ones aside",
    "position_consistency": "share of (readable) pairs with the same verdict in both orders (arXiv 2406.07791)",
    "preference_fairness": "1: every pair goes to whatever comes second; -1: to whatever comes first; 0: fair",
    "calls": "calls per answer",
    "tokens": "prompt and completion tokens per answer",
    "seconds": "seconds per answer, one call after the other",
}
"""The measures, and what each means."""

COSTS = ("calls", "tokens", "seconds")
_SIGNED = ("net_sensitivity", "preference_fairness")
"""Measures from -1 to 1; all others but costs are from 0 to 1."""


@dataclass(frozen=True)
class RemedyMeasures:
    """The measures of the system with one remedy, or as it is.

    Attributes:
        name: Name of the remedy.
        measures: Estimates by the names in `ABOUT`, without those that need gold answers, pairs or slots where the
            questions have none.
        versus: Paired differences from the system as it is, by the same names; empty for the system as it is. That of
            `today` is what the remedy gives against today.
        slots: Accuracy by slot of the gold segments in the input.
        salts: Accuracy by slot of the gold segments in salted canonical orders.
        slot_chance: Spread over `slots` that chance alone stays below 19 times out of 20.
        salt_chance: The same for `salts`.
        per_question: Sensitivity of each question, in the order of the questions.
    """

    name: str
    measures: Mapping[str, Estimate]
    versus: Mapping[str, Estimate]
    slots: tuple[Estimate, ...]
    salts: tuple[Estimate, ...]
    slot_chance: float | None
    salt_chance: float | None
    per_question: tuple[float, ...]


def measure(
    name: str,
    numbers: Mapping[str, Floats],
    outcomes: Outcomes,
    as_is: Mapping[str, Floats] | None,
    seed: int,
) -> RemedyMeasures:
    """Return the measures of a remedy, or of the system as it is, with intervals.

    Args:
        name: Name of the remedy.
        numbers: Measures `[questions]` by name.
        outcomes: Outcomes with the remedy.
        as_is: Measures of the system as it is, for paired differences; None for the system itself.
        seed: Seed of resamples and shuffles.
    """
    found = {each: _estimate(each, numbers[each], seed) for each in numbers if np.isfinite(numbers[each]).any()}
    both = np.isfinite(numbers["sensitivity"]) & np.isfinite(numbers["noise"])
    if both.any():
        found["net_sensitivity"] = mean_difference(numbers["sensitivity"][both], numbers["noise"][both])
    chances: dict[str, float] = {}
    for kind, scores in (("slot", outcomes.slot_scores), ("salted", outcomes.salted_scores)):
        varied = variations(scores, seed)
        if varied:
            found[f"{kind}_spread"], found[f"{kind}_std"] = varied["spread"].estimate, varied["deviation"].estimate
            chances[kind] = varied["spread"].chance
    return RemedyMeasures(
        name=name,
        measures={each: found[each] for each in ABOUT if each in found},
        versus={} if as_is is None else _differences(numbers, as_is, seed),
        slots=_by_slot(outcomes.slot_scores),
        salts=_by_slot(outcomes.salted_scores),
        slot_chance=chances.get("slot"),
        salt_chance=chances.get("salted"),
        per_question=tuple(np.nan_to_num(numbers["sensitivity"]).tolist()),
    )


def _estimate(name: str, values: Floats, seed: int) -> Estimate:
    known = values[np.isfinite(values)]
    if name in COSTS:
        return bootstrap_mean(known, seed)
    if name in _SIGNED:
        found = mean_interval(((known + 1) / 2).tolist())
        return Estimate(*(2 * each - 1 for each in (found.value, found.low, found.high)))
    return mean_interval(known.tolist(), seed)


def _differences(ours: Mapping[str, Floats], theirs: Mapping[str, Floats], seed: int) -> dict[str, Estimate]:
    """Return paired differences, of the questions that have both numbers."""
    found = {}
    for name, values in ours.items():
        known = np.isfinite(values) & np.isfinite(theirs[name])
        if known.any():
            ours_known, theirs_known = values[known], theirs[name][known]
            bounded = name not in COSTS and name not in _SIGNED
            found[name] = (
                mean_difference(ours_known, theirs_known)
                if bounded
                else bootstrap_mean(ours_known - theirs_known, seed)
            )
    return found


def _by_slot(scores: Floats) -> tuple[Estimate, ...]:
    known = scores[np.isfinite(scores).all(axis=1)] if scores.size else scores
    return tuple(mean_interval(column.tolist()) for column in known.T) if len(known) else ()
