"""What to do about it, in words, with the numbers that say so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from invariant_rag.evaluation.audit.bootstrap import Estimate, interval
from invariant_rag.evaluation.audit.measures import Measured

NEGLIGIBLE = 0.02
"""An order that changes at most this share of answers is nobody's problem."""

UNSURE = 0.1
"""So large a share that may flip unseen is too large for saying that order does not matter: fewer than 29 questions."""

FEW = 100
"""Below so many questions intervals are wide: with few topics order effects are masked or exaggerated (2605.27105)."""


@dataclass(frozen=True)
class Advice:
    """A recommendation.

    Attributes:
        choice: `do nothing`, `remove the randomness`, `make verdicts readable`, or the name of a remedy.
        headline: What to do, in one sentence.
        reasons: The numbers that say so, a sentence each.
    """

    choice: str
    headline: str
    reasons: tuple[str, ...]


def advise(measured: Sequence[Measured]) -> Advice:
    """Recommend something, by these rules, the first that applies.

    1. Verdicts on pairs that name neither response say nothing about order: make them readable.
    2. Answers change, but as often where the order stays: the randomness is the problem.
    3. The order changes (almost) no answer, nor does a salt, and no slot is favoured beyond chance: do nothing.
    4. Of the remedies that flip fewer questions than the system (or, where it flips none, are fairer) and are not less
       accurate, beyond doubt, than it: the cheapest, unless another is beyond doubt more accurate, or favours no slot
       where the cheapest does and is not less accurate beyond doubt.
    5. There is none: do nothing.

    Beyond doubt means that the paired 95% interval of the difference excludes 0.
    """
    system, remedies = measured[0], measured[1:]
    facts = _facts(system)
    return _spoilt(system, facts) or _untroubled(system, facts) or _remedied(system, remedies, facts)


def _facts(system: Measured) -> list[str]:
    """What is to be said of the system whatever is recommended."""
    found = system.measures
    facts = [_flips(system)]
    if "accuracy" in found:
        facts.append(
            f"Accuracy is {_percent(found['accuracy'])} on average over orders, "
            f"{_percent(found['worst'])} in the worst order of each question and {_percent(found['best'])} in the best."
        )
    facts.extend(_slots(system))
    if _orders_itself(system):
        facts.append(
            "Its answers do not depend on the order given, but they do on hashes put before the documents: in two "
            f"salted orders they differ with probability {_percent(found['salted_sensitivity'])}. It seems to order "
            "the documents by a rule of its own, and that order matters."
        )
    if len(system.per_question) < FEW:
        facts.append(f"These are {len(system.per_question)} questions only: several hundred make the intervals narrow.")
    return facts


def _spoilt(system: Measured, facts: Sequence[str]) -> Advice | None:
    """Rules 1 and 2: what hides the effect of the order has to go first."""
    found = system.measures
    noise, unreadable = found["noise"], found.get("unreadable")
    if unreadable is not None and unreadable.value > NEGLIGIBLE:
        return Advice(
            "make verdicts readable",
            "Have the judge name a response first, as A, B or [[A]]: some of its verdicts name neither.",
            (f"Of the verdicts {_percent(unreadable)} cannot be read.", *facts),
        )
    if noise.value > NEGLIGIBLE and found["net_sensitivity"].low <= 0:
        return Advice(
            "remove the randomness",
            "Make the system deterministic first: its answers change as much when nothing is moved.",
            (f"Two calls in the same order disagree with probability {_percent(noise)}.", *facts),
        )
    return None


def _untroubled(system: Measured, facts: Sequence[str]) -> Advice | None:
    """Rule 3: there is nothing to cure."""
    changes = max(system.measures["net_sensitivity"].high, system.measures["sensitivity"].value)
    if changes > NEGLIGIBLE or _favours(system) or _orders_itself(system):
        return None
    headline = "Do nothing: the order of the documents does not matter here."
    if _unseen(system) > UNSURE:
        headline = (
            f"Do nothing yet: the order changed (almost) no answer to {len(system.per_question)} questions, which are "
            f"too few to tell; up to {_unseen(system):.0%} might flip."
        )
    return Advice("do nothing", headline, tuple(facts))


def _remedied(system: Measured, remedies: Sequence[Measured], facts: list[str]) -> Advice:
    """Rules 4 and 5: the best remedy, or none."""
    biased = _favours(system)
    helpful = [each for each in remedies if _helps(each, system, biased)]
    candidates = [each for each in helpful if not _costs_accuracy(each)]
    if not candidates:
        why = "No remedy that was tried helps" if remedies else "No remedy was tried"
        if helpful:
            why = "Every remedy that helps costs accuracy"
            facts.extend(
                f"{each.name}: accuracy changes by {_signed(each.versus['expected_accuracy'])}." for each in helpful
            )
        return Advice("do nothing", f"Do nothing for now. {why}.", tuple(facts))
    best, *dearer = sorted(candidates, key=lambda one: one.measures["calls"].value)
    for each in dearer:
        if _better(each, best):
            best = each
    return Advice(best.name, _headline(best, system), (*facts, *_gains(best, candidates)))


def _orders_itself(system: Measured) -> bool:
    """Whether salts change answers that input orders do not: beyond doubt, and more often than chance does."""
    salted = system.measures.get("salted_sensitivity")
    still = system.measures["sensitivity"].value <= NEGLIGIBLE
    return still and salted is not None and salted.low > max(NEGLIGIBLE, system.measures["noise"].high)


def _flips(system: Measured) -> str:
    found = system.measures
    said = (
        f"The order changes the answer to {_percent(found['flip_rate'])} of the questions; two random orders disagree "
        f"with probability {_percent(found['sensitivity'])}"
    )
    noise = found["noise"].value
    said += f", two calls in the same order with {noise:.1%}." if noise else "."
    if found["flip_rate"].value == 0:
        said += f" That none of {len(system.per_question)} flips still leaves room for up to {_unseen(system):.1%}."
    return said


def _unseen(system: Measured) -> float:
    """Return the exact one-sided 95% bound of a share of which none was seen; a bootstrap cannot know it."""
    return 1.0 - math.pow(0.05, 1 / len(system.per_question))


def _slots(system: Measured) -> list[str]:
    said = []
    for kind, where, chance in (
        ("slot", "in the input", system.slot_chance),
        ("salted", "in salted canonical orders", system.salt_chance),
    ):
        spread = system.measures.get(f"{kind}_spread")
        if spread is not None and chance is not None:
            verdict = "more" if spread.value > chance else "not more"
            said.append(
                f"Between the gold slots {where} accuracy differs by up to {_percent(spread)}; that is {verdict} than "
                f"chance alone would make it ({chance:.1%})."
            )
    return said


def _favours(one: Measured) -> bool:
    """Whether some slot, in the input or in a canonical order, does better than another beyond chance."""
    return any(
        f"{kind}_spread" in one.measures and chance is not None and one.measures[f"{kind}_spread"].value > chance
        for kind, chance in (("slot", one.slot_chance), ("salted", one.salt_chance))
    )


def _helps(remedy: Measured, system: Measured, biased: bool) -> bool:
    if remedy.versus["flip_rate"].high < 0:
        return True
    spread = remedy.versus.get("salted_spread")
    return system.measures["flip_rate"].value == 0 and biased and spread is not None and spread.high < 0


def _costs_accuracy(remedy: Measured) -> bool:
    difference = remedy.versus.get("expected_accuracy")
    return difference is not None and difference.high < 0


def _better(one: Measured, other: Measured) -> bool:
    """Whether the dearer one is worth its price: beyond doubt more accurate, or fair where the other is not."""
    if one.expected is None or other.expected is None:
        return False
    gain = interval(one.expected - other.expected)
    return gain.low > 0 or (_favours_salted(other) and not _favours_salted(one) and gain.high >= 0)


def _favours_salted(one: Measured) -> bool:
    spread = one.measures.get("salted_spread")
    return spread is not None and one.salt_chance is not None and spread.value > one.salt_chance


def _headline(best: Measured, system: Measured) -> str:
    what = {
        "sort": "Sort the documents by a hash of their contents before asking",
        "rerank": "List the documents by their scores, ties by content, before asking",
        "top-3": "Keep the three documents with the best scores, best first",
        "long-context-reorder": "List the documents with the best scores at both ends",
        "vote": "Ask in several rotations of the sorted documents and take the majority",
        "plain": "Use the plain model",
    }.get(best.name, f"Use the method {best.name}")
    flips, before = best.measures["flip_rate"].value, system.measures["flip_rate"].value
    return f"{what}: {flips:.1%} of the questions flip instead of {before:.1%}."


def _gains(best: Measured, candidates: Sequence[Measured]) -> list[str]:
    said = []
    if "expected_accuracy" in best.versus:
        said.append(
            f"With {best.name} the accuracy to expect is {_percent(best.measures['expected_accuracy'])}; against the "
            f"system as it is that is {_signed(best.versus['expected_accuracy'])}."
        )
    else:
        said.append("No gold answers were given: this is about stability alone, and says nothing about accuracy.")
    if _favours_salted(best):
        said.append(
            f"{best.name} is invariant but not fair: the slot that the gold document is sorted into still moves "
            f"accuracy by up to {_percent(best.measures['salted_spread'])}. No remedy that was tried is fairer and as "
            "accurate."
        )
    calls = best.measures["calls"].value
    said.append(f"It takes {calls:.1f} calls per answer.")
    others = ", ".join(
        f"{each.name} {each.measures['expected_accuracy'].value:.1%}"
        for each in candidates
        if each is not best and "expected_accuracy" in each.measures
    )
    if others:
        said.append(f"Other remedies that stop flips without a sure loss, with their accuracy: {others}.")
    return said


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"


def _signed(estimate: Estimate) -> str:
    return f"{100 * estimate.value:+.1f} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}] points"
