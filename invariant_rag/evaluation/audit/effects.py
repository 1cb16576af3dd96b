"""Test what the order does, and what each remedy changes against today: the numbers that advice rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from invariant_rag.evaluation.audit.outcomes import Outcomes, known_means
from invariant_rag.evaluation.statistics import (
    Estimate,
    holm,
    mean_difference,
    order_p_values,
    paired_p_value,
    questions_needed,
    variation_p_value,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

ORDER_LEVEL = 0.02
"""Level of the test whether the order matters. Without that, no remedy is recommended: noise is never sold as order."""

REMEDY_LEVEL = 0.02
"""Level of the tests whether a remedy helps, together: they are corrected for their number (Holm)."""

LOSS_LEVEL = 0.05
"""Level of the test whether a remedy costs accuracy, and of the lower bound of its difference."""

FAIRNESS_LEVEL = 0.01
"""Level of the test whether a remedy favours a slot of its canonical order."""

MAX_LOSS = 0.05
"""A remedy that is only steadier must surely lose less than this, in the share of right answers."""

NEGLIGIBLE = 0.02
"""Share of answers up to which a change is not worth a remedy."""

SAME_AS_TODAY = 0.9
"""Share of questions of which a remedy gives today's order, from which on it is what happens today."""


class Listing(Enum):
    """How the retriever lists, as far as the scores of the segments tell."""

    BY_SCORE = "by score"
    NOT_BY_SCORE = "not by score"
    UNKNOWN = "unknown"


EFFECT = 0.1
"""The difference in accuracy that an audit should see: it says how many questions that takes."""


@dataclass(frozen=True)
class OrderEffect:
    """Whether the order changes outcomes by more than chance does.

    Attributes:
        p_values: Of each test, before they are corrected for their number. `disagreement`: other orders against
            repeats; `difference`: mean of the given order against others; `slots` and `salted slots`: accuracy by slot
            of the gold segments.
        own_rule: P-value of salted orders changing outcomes that input orders do not; None unless that is so.
        needed: How many questions it takes to see `EFFECT` between the given order and others.
        p_today: One-tailed p-value of the given order having more right answers than others.
    """

    p_values: Mapping[str, float]
    own_rule: float | None
    needed: int
    p_today: float = 1.0

    @property
    def p(self) -> float:
        """The p-value of all tests together."""
        return min(holm(self.p_values).values())

    @property
    def is_real(self) -> bool:
        """Whether it is more than chance."""
        return self.p <= ORDER_LEVEL

    @property
    def today_is_better(self) -> bool:
        """Whether the given order has more right answers than others, so that it is not any order."""
        return self.p_today <= LOSS_LEVEL

    @property
    def has_own_rule(self) -> bool:
        """Whether the system seems to order its documents by a rule of its own."""
        return self.own_rule is not None and self.own_rule <= ORDER_LEVEL


@dataclass(frozen=True)
class RemedyEffect:
    """What a remedy changes, against what users get today.

    Attributes:
        name: Name of the remedy.
        calls: Calls per answer.
        same_as_today: Whether it gives (almost) every question today's order.
        gain: Difference of mean scores, in the order that the retriever gives; None without gold answers.
        p_gain: P-value of a gain, corrected for the number of remedies.
        p_loss: P-value of a loss, not corrected: caution is cheap.
        least: One-sided lower bound of `gain`.
        steadier: Difference of instability; negative: fewer outcomes change with the order.
        p_steadier: P-value of that, corrected for the number of remedies.
        needed: How many questions it takes to rule out a loss of `MAX_LOSS`.
        unfair: Whether the slot in salted canonical orders matters by more than chance; None: not measured.
    """

    name: str
    calls: float
    same_as_today: bool
    gain: Estimate | None
    p_gain: float
    p_loss: float
    least: float
    steadier: Estimate
    p_steadier: float
    needed: int
    unfair: bool | None

    @property
    def is_better(self) -> bool:
        """Whether it gives more right answers than users get today."""
        return not self.same_as_today and self.p_gain <= REMEDY_LEVEL

    @property
    def is_steadier(self) -> bool:
        """Whether it makes fewer outcomes depend on the order."""
        return not self.same_as_today and self.p_steadier <= REMEDY_LEVEL

    @property
    def is_loss(self) -> bool:
        """Whether it gives fewer right answers than users get today."""
        return self.p_loss <= LOSS_LEVEL

    @property
    def is_safe(self) -> bool:
        """Whether a loss that matters can be ruled out."""
        return not self.is_loss and self.least >= -MAX_LOSS


@dataclass(frozen=True)
class Effects:
    """All that was tested.

    Attributes:
        order: What the order does.
        remedies: What each remedy changes.
        better: Pairs of remedies of which the first is surely more accurate than the second.
        listing: How the retriever lists.
    """

    order: OrderEffect
    remedies: tuple[RemedyEffect, ...]
    better: frozenset[tuple[str, str]]
    listing: Listing = Listing.UNKNOWN

    @property
    def order_is_fixed(self) -> bool:
        """Whether users get one order, however documents come in: today's is by score."""
        return self.listing is Listing.BY_SCORE


def assess(
    system: Outcomes,
    remedies: Mapping[str, Outcomes],
    calls: Mapping[str, float],
    same_as_today: Sequence[str] = (),
    seed: int = 0,
    listing: Listing = Listing.UNKNOWN,
) -> Effects:
    """Test what the order does to a system, and what remedies change against today.

    Args:
        system: Outcomes of the system as it is.
        remedies: Outcomes with each remedy.
        calls: Calls per answer with each remedy.
        same_as_today: Remedies that give (almost) every question today's order.
        seed: Seed of shuffles.
        listing: How the retriever lists.
    """
    tried = {name: each for name, each in remedies.items() if name not in same_as_today}
    gains = {name: each.today - system.today for name, each in tried.items()}
    steadier = {name: system.instability - each.instability for name, each in tried.items()}
    p_gains = holm({name: paired_p_value(each, seed) for name, each in gains.items()})
    p_steadier = holm({name: paired_p_value(each, seed) for name, each in steadier.items()})
    effects = tuple(
        _remedy_effect(name, system, each, calls[name], p_gains.get(name), p_steadier.get(name), seed)
        for name, each in remedies.items()
    )
    better = frozenset(
        (one, other)
        for one in tried
        for other in tried
        if calls[one] > calls[other] and paired_p_value(tried[one].today - tried[other].today, seed) <= LOSS_LEVEL
    )
    return Effects(_order_effect(system, seed), effects, better, listing)


def _order_effect(system: Outcomes, seed: int) -> OrderEffect:
    scored = np.asarray(np.isfinite(system.given_scores).any(axis=1))
    p_values = order_p_values(system.given, system.orders, seed, scored=scored)
    p_slots, p_salted = (variation_p_value(each, seed) for each in (system.slot_scores, system.salted_scores))
    if p_slots is not None:
        p_values["slots"] = p_slots
    ignores_input = min(holm(p_values).values()) > ORDER_LEVEL and np.nanmean(system.instability) <= NEGLIGIBLE
    own_rule = None
    if system.salted.size and ignores_input:
        own_rule = order_p_values(system.given, system.salted, seed)["disagreement"]
    if p_salted is not None:
        p_values["salted slots"] = p_salted
    today_less_others = np.asarray(system.today - known_means(system.order_scores))
    needed = questions_needed(today_less_others, EFFECT, ORDER_LEVEL)
    return OrderEffect(p_values, own_rule, needed, paired_p_value(today_less_others, seed))


def _remedy_effect(
    name: str,
    system: Outcomes,
    remedy: Outcomes,
    calls: float,
    p_gain: float | None,
    p_steadier: float | None,
    seed: int,
) -> RemedyEffect:
    ours, theirs = remedy.today, system.today
    known = np.isfinite(ours) & np.isfinite(theirs)
    gain = mean_difference(ours[known], theirs[known]) if known.any() else None
    bound = mean_difference(ours[known], theirs[known], tails=1) if known.any() else None
    steady, before = remedy.instability, system.instability
    both = np.isfinite(steady) & np.isfinite(before)
    p_slots = variation_p_value(remedy.salted_scores, seed)
    return RemedyEffect(
        name=name,
        calls=calls,
        same_as_today=p_gain is None,
        gain=gain,
        p_gain=1.0 if p_gain is None else p_gain,
        p_loss=paired_p_value(theirs - ours, seed),
        least=-1.0 if bound is None else bound.low,
        steadier=mean_difference(steady[both], before[both]),
        p_steadier=1.0 if p_steadier is None else p_steadier,
        needed=questions_needed(ours - theirs, MAX_LOSS, LOSS_LEVEL),
        unfair=None if p_slots is None else p_slots <= FAIRNESS_LEVEL,
    )


def choose(effects: Effects) -> RemedyEffect | None:
    """Return the remedy to recommend; None: leave it.

    None if the order does nothing that chance does not do. Else a remedy that is better than today. If there is none,
    one that is steadier and surely no loss, provided that today's order is known to be no ranking: it is not by score,
    and has no more right answers than others. Users get one order, and gain nothing from another that is only steadier;
    whether their retriever keeps to that order, an audit of documents without scores cannot know.
    """
    if not effects.order.is_real:
        return None
    better = _cheapest([each for each in effects.remedies if each.is_better], effects)
    is_any_order = effects.listing is Listing.NOT_BY_SCORE and not effects.order.today_is_better
    return choose_steadier(effects) if better is None and is_any_order else better


def choose_steadier(effects: Effects) -> RemedyEffect | None:
    """Return the remedy to use if the order of the documents can change: it is steadier, and surely no loss."""
    return _cheapest([each for each in effects.remedies if each.is_steadier and each.is_safe], effects)


def _cheapest(candidates: Sequence[RemedyEffect], effects: Effects) -> RemedyEffect | None:
    """Return the cheapest remedy, unless another is surely more accurate."""
    best: RemedyEffect | None = None
    for each in sorted(candidates, key=lambda one: (one.calls, -(one.gain.value if one.gain else 0.0))):
        if best is None or (each.name, best.name) in effects.better:
            best = each
    return best
