"""Recommend a remedy, with the numbers behind the recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from invariant_rag.evaluation.audit.measures import RemedyMeasures
from invariant_rag.evaluation.statistics import Estimate, percentile_interval, zero_share_upper_bound

NEGLIGIBLE = 0.02
"""Share of changed answers up to which order dependence is not worth a remedy."""

MAX_UNSEEN_FLIPS = 0.1
"""Upper bound of the flip rate up to which the audit says that order does not matter: 29 questions without a flip."""

FEW_QUESTIONS = 100
"""With fewer questions intervals are wide: few topics mask or exaggerate order effects (arXiv 2605.27105)."""


@dataclass(frozen=True)
class Advice:
    """A recommendation.

    Attributes:
        choice: `do nothing`, `remove the randomness`, `make verdicts readable`, or the name of a remedy.
        headline: What to do, in one sentence.
        reasons: The numbers behind it, one sentence each.
    """

    choice: str
    headline: str
    reasons: tuple[str, ...]


def advise(measured: Sequence[RemedyMeasures]) -> Advice:
    """Recommend what to do, by the first of these rules that applies.

    1. Some verdicts on pairs name neither response: make them readable, for they say nothing about order.
    2. Answers change as often when the order stays: remove the randomness.
    3. The order changes (almost) no answer, nor does a salt, and no slot is favoured beyond chance: do nothing.
    4. Use a remedy that flips significantly fewer questions (or, if the system flips none, is significantly fairer) and
       is not significantly less accurate. Take the cheapest, unless another is significantly more accurate, or favours
       no slot where the cheapest does and is not significantly less accurate.
    5. There is no such remedy: do nothing.

    Significant means that the paired 95% interval of the difference excludes 0.

    Args:
        measured: The measures of the system as it is, then those of every remedy.
    """
    system, remedies = measured[0], measured[1:]
    facts = _facts(system)
    return _fix_system_first(system, facts) or _no_effect(system, facts) or _choose_remedy(system, remedies, facts)


def _facts(system: RemedyMeasures) -> list[str]:
    """Return the sentences about the system that accompany every recommendation."""
    found = system.measures
    facts = [_flips(system)]
    if "accuracy" in found:
        facts.append(
            f"Accuracy is {_percent(found['accuracy'])} on average over orders, "
            f"{_percent(found['worst'])} in the worst order of each question and {_percent(found['best'])} in the best."
        )
    facts.extend(_slots(system))
    if _sorts_internally(system):
        facts.append(
            "Its answers do not depend on the order given, but they do on hashes put before the documents: in two "
            f"salted orders they differ with probability {_percent(found['salted_sensitivity'])}. It seems to order "
            "the documents by a rule of its own, and that order matters."
        )
    if len(system.per_question) < FEW_QUESTIONS:
        facts.append(f"These are {len(system.per_question)} questions only: several hundred make the intervals narrow.")
    return facts


def _fix_system_first(system: RemedyMeasures, facts: Sequence[str]) -> Advice | None:
    """Apply rules 1 and 2: unreadable verdicts and randomness hide the effect of the order."""
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


def _no_effect(system: RemedyMeasures, facts: Sequence[str]) -> Advice | None:
    """Apply rule 3: the order does not matter."""
    changes = max(system.measures["net_sensitivity"].high, system.measures["sensitivity"].value)
    if changes > NEGLIGIBLE or _favours_slot(system) or _sorts_internally(system):
        return None
    headline = "Do nothing: the order of the documents does not matter here."
    if _max_flip_rate(system) > MAX_UNSEEN_FLIPS:
        headline = (
            f"Do nothing yet: the order changed (almost) no answer to {len(system.per_question)} questions, which are "
            f"too few to tell; up to {_max_flip_rate(system):.0%} might flip."
        )
    return Advice("do nothing", headline, tuple(facts))


def _choose_remedy(system: RemedyMeasures, remedies: Sequence[RemedyMeasures], facts: list[str]) -> Advice:
    """Apply rules 4 and 5: the best remedy, or none."""
    biased = _favours_slot(system)
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
    best, *costlier = sorted(candidates, key=lambda one: one.measures["calls"].value)
    for each in costlier:
        if _is_worth_its_cost(each, best):
            best = each
    return Advice(best.name, _headline(best, system), (*facts, *_gains(best, candidates)))


def _sorts_internally(system: RemedyMeasures) -> bool:
    """Whether salts change answers that input orders do not, significantly and more often than randomness does."""
    salted = system.measures.get("salted_sensitivity")
    still = system.measures["sensitivity"].value <= NEGLIGIBLE
    return still and salted is not None and salted.low > max(NEGLIGIBLE, system.measures["noise"].high)


def _flips(system: RemedyMeasures) -> str:
    found = system.measures
    text = (
        f"The order changes the answer to {_percent(found['flip_rate'])} of the questions; two random orders disagree "
        f"with probability {_percent(found['sensitivity'])}"
    )
    noise = found["noise"].value
    text += f", two calls in the same order with {noise:.1%}." if noise else "."
    if found["flip_rate"].value == 0:
        text += (
            f" That none of {len(system.per_question)} flips still leaves room for up to {_max_flip_rate(system):.1%}."
        )
    return text


def _max_flip_rate(system: RemedyMeasures) -> float:
    """Return the upper bound of the flip rate of a system that flipped no question."""
    return zero_share_upper_bound(len(system.per_question))


def _slots(system: RemedyMeasures) -> list[str]:
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


def _favours_slot(one: RemedyMeasures) -> bool:
    """Whether accuracy differs between slots, of the input or of canonical orders, by more than chance."""
    return any(
        f"{kind}_spread" in one.measures and chance is not None and one.measures[f"{kind}_spread"].value > chance
        for kind, chance in (("slot", one.slot_chance), ("salted", one.salt_chance))
    )


def _helps(remedy: RemedyMeasures, system: RemedyMeasures, biased: bool) -> bool:
    if remedy.versus["flip_rate"].high < 0:
        return True
    spread = remedy.versus.get("salted_spread")
    return system.measures["flip_rate"].value == 0 and biased and spread is not None and spread.high < 0


def _costs_accuracy(remedy: RemedyMeasures) -> bool:
    difference = remedy.versus.get("expected_accuracy")
    return difference is not None and difference.high < 0


def _is_worth_its_cost(one: RemedyMeasures, other: RemedyMeasures) -> bool:
    """Whether the more expensive remedy is significantly more accurate, or fair where the cheaper one is not."""
    if one.expected is None or other.expected is None:
        return False
    gain = percentile_interval(one.expected - other.expected)
    return gain.low > 0 or (_favours_canonical_slot(other) and not _favours_canonical_slot(one) and gain.high >= 0)


def _favours_canonical_slot(one: RemedyMeasures) -> bool:
    spread = one.measures.get("salted_spread")
    return spread is not None and one.salt_chance is not None and spread.value > one.salt_chance


def _headline(best: RemedyMeasures, system: RemedyMeasures) -> str:
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


def _gains(best: RemedyMeasures, candidates: Sequence[RemedyMeasures]) -> list[str]:
    said = []
    if "expected_accuracy" in best.versus:
        said.append(
            f"With {best.name} the accuracy to expect is {_percent(best.measures['expected_accuracy'])}; against the "
            f"system as it is that is {_signed(best.versus['expected_accuracy'])}."
        )
    else:
        said.append("No gold answers were given: this is about stability alone, and says nothing about accuracy.")
    if _favours_canonical_slot(best):
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
