"""Say what was found, in the order in which people ask: today, other orders, noise, remedies, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from invariant_rag.evaluation.audit.effects import (
    MAX_LOSS,
    NEGLIGIBLE,
    REMEDY_LEVEL,
    Effects,
    RemedyEffect,
    choose,
    choose_steadier,
)
from invariant_rag.evaluation.audit.failures import Failures
from invariant_rag.evaluation.audit.finding import Finding, Kind, SingleSlot, rounded_up, single_slot
from invariant_rag.evaluation.audit.measures import RemedyMeasures
from invariant_rag.evaluation.statistics import Estimate
from invariant_rag.shown import counted

LEAVE_IT = "leave it"
"""The choice that recommends no change."""

MAX_ERRORS = 0.2
"""Share of failed calls from which on they are to be looked at first."""

_ACTIONS = {
    "sort": "Sort the documents by a hash of their contents before asking",
    "rerank": "List the documents by their scores, ties by content, before asking",
    "top-3": "Keep the three documents with the best scores, best first",
    "long-context-reorder": "List the documents with the best scores at both ends",
    "vote": "Ask in several rotations of the sorted documents and take the majority",
    "reverse": "List the documents in the reverse of the retriever's order, the best last",
    "plain": "Use the plain model",
}

_BY_SCORE = ("rerank", "top-3", "long-context-reorder")
"""Remedies that list by score."""


@dataclass(frozen=True)
class Advice:
    """A recommendation, and what it rests on.

    Attributes:
        choice: `leave it`, `fix the errors`, `make verdicts readable`, or the name of a remedy.
        headline: What to do, first of all; then what is to be known of it.
        verdict: Whether the order matters, in a sentence.
        sections: Questions that people ask, in that order, each with its answers, one sentence each.
    """

    choice: str
    headline: str
    verdict: str
    sections: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """All answers."""
        return tuple(each for _, answers in self.sections for each in answers)


def advise(measured: Sequence[RemedyMeasures], effects: Effects, questions: int, failures: Failures) -> Advice:
    """Recommend what to do, by the first of these rules that applies.

    1. Many calls failed: fix the errors.
    2. Some verdicts on pairs name neither response: make them readable, for they say nothing about order.
    3. What `choose` recommends: a remedy that is surely better than what users get today, or surely steadier and surely
       no loss where the order is known to be no ranking. Nothing is recommended unless the order matters by more than
       chance.
    4. Leave it.

    Args:
        measured: The measures of the system as it is, then those of every remedy.
        effects: What was tested.
        questions: Number of questions that the measures are about.
        failures: What failed.
    """
    system = measured[0]
    remedies = {each.name: each for each in measured[1:]}
    best = choose(effects)
    finding = Finding.of(system, effects, questions, failures.share if failures.share > MAX_ERRORS else 0.0)
    unreadable = system.measures.get("unreadable")
    if failures.share > MAX_ERRORS:
        choice, headline = "fix the errors", f"Fix the errors first: {failures.share:.0%} of the calls failed."
    elif unreadable is not None and unreadable.low > NEGLIGIBLE:
        choice = "make verdicts readable"
        headline = "Have the judge name a response, as A, B or [[A]]: some of its verdicts name neither."
    elif best is not None:
        choice, headline = best.name, _recommend(best, finding, system, remedies[best.name])
    else:
        choice, headline = LEAVE_IT, _leave(finding, system, effects, remedies)
    sections = (
        ("What do you get today?", _today(system, failures)),
        ("What would other orders give?", _other_orders(finding, system)),
        ("Is that more than noise?", _noise(finding, system)),
        ("What does each remedy give, against today?", _against_today(effects, remedies)),
        ("What to do?", (headline,)),
    )
    return Advice(choice, headline, finding.verdict, sections)


def _today(system: RemedyMeasures, failures: Failures) -> tuple[str, ...]:
    found = system.measures
    said = []
    if "today" in found:
        said.append(f"In the order that your retriever gives, {_percent(found['today'])} of the answers are right.")
    else:
        said.append("No gold answers were given: nothing is known about accuracy, only whether answers change.")
    if failures.failed:
        said.append(f"{failures.share:.1%} of the calls failed; what follows is about the others.")
    if failures.failed_tries:
        said.append(f"{failures.share_of_tries:.1%} of the tries failed: so often does a user without retries see one.")
    if "unreadable" in found and found["unreadable"].value:
        said.append(f"Of the verdicts {_percent(found['unreadable'])} name neither response.")
    return tuple(said)


def _other_orders(finding: Finding, system: RemedyMeasures) -> tuple[str, ...]:
    found = system.measures
    said = []
    if "accuracy" in found:
        said.append(
            f"On average over orders {_percent(found['accuracy'])} are right; with each question in its worst order "
            f"{_percent(found['worst'])}, in its best {_percent(found['best'])}."
        )
        said.append(f"{_percent(found['flip_rate'])} of the questions are right in one order and wrong in another.")
        said.append(f"Wording, right or wrong aside, changes for {_percent(found['wording_rate'])} of the questions.")
    else:
        said.append(f"{_percent(found['flip_rate'])} of the questions are answered otherwise in another order.")
    if system.slot_chance is not None and "slot_spread" in found:
        said.append(
            f"Between the slots of the gold document accuracy differs by up to {_percent(found['slot_spread'])}; "
            f"chance alone would make it {system.slot_chance:.1%}."
        )
    slot = _one_slot(finding, system)
    return tuple(said) if slot is None else (*said, slot.description)


def _one_slot(finding: Finding, system: RemedyMeasures) -> SingleSlot | None:
    return single_slot(system) if finding.kind is Kind.MATTERS else None


def _noise(finding: Finding, system: RemedyMeasures) -> tuple[str, ...]:
    found = system.measures
    said = []
    if "sensitivity" in found and "noise" in found:
        said.append(
            f"Two orders disagree with probability {_percent(found['sensitivity'])}, two calls in the same order with "
            f"{_percent(found['noise'])}."
        )
    return (*said, finding.answer)


def _against_today(effects: Effects, remedies: dict[str, RemedyMeasures]) -> tuple[str, ...]:
    if not effects.remedies:
        return ("No remedy was tried.",)
    return tuple(_remedy_sentence(each, remedies[each.name], len(effects.remedies)) for each in effects.remedies)


def _remedy_sentence(effect: RemedyEffect, measured: RemedyMeasures, remedies: int) -> str:
    found = measured.measures
    cost = f"{_calls(effect)} and {_seconds(found['seconds'].value)} per answer"
    if effect.same_as_today:
        return f"{effect.name} is what you do today: it lists (almost) every question in the same order; {cost}."
    parts = []
    if effect.gain is not None:
        sure = "a gain" if effect.is_better else "a loss" if effect.is_loss else "neither surely a gain nor a loss"
        if not (effect.is_better or effect.is_loss) and effect.gain.low > 0:
            corrected = f", corrected for {remedies} remedies" if remedies > 1 else ""
            sure = f"not surely a gain (p = {effect.p_gain:.3f}{corrected}; below {REMEDY_LEVEL} would count)"
        parts.append(f"accuracy {found['today'].value:.1%}, {_signed(effect.gain)}, {sure}")
    else:
        parts.append("accuracy unknown")
    parts.append(f"flips {found['flip_rate'].value:.1%}")
    fairness = {None: "fairness unknown", True: "not fair: its slots matter", False: "no unfairness found"}
    parts += [fairness[effect.unfair], cost]
    return f"{effect.name}: {'; '.join(parts)}."


def _recommend(best: RemedyEffect, finding: Finding, system: RemedyMeasures, measured: RemedyMeasures) -> str:
    """Return what a remedy gives; before that, to rerank, if that is what it does to a system that reads one slot."""
    change, slot = _change(best, system, measured), _one_slot(finding, system)
    if slot is None:
        return change
    if slot.missed and best.name in _BY_SCORE:
        return f"{slot.advice} {change} {slot.description}"
    return f"{change} {slot.description}{f' {slot.advice}' if slot.missed else ''}"


def _change(best: RemedyEffect, system: RemedyMeasures, measured: RemedyMeasures) -> str:
    """Return what a remedy gives, and that it is to be used."""
    flips, before = measured.measures["flip_rate"].value, system.measures["flip_rate"].value
    steadier = f"{flips:.1%} of the questions flip instead of {before:.1%}"
    if best.is_better and best.gain is not None:
        return f"{_action(best)}: {_signed(best.gain)} against what you get today; {steadier}."
    return f"{_action(best)}: {steadier}, and a loss of more than {100 * MAX_LOSS:.0f} points can be ruled out."


def _action(remedy: RemedyEffect) -> str:
    return _ACTIONS.get(remedy.name, f"Use the method {remedy.name}")


def _leave(finding: Finding, system: RemedyMeasures, effects: Effects, remedies: dict[str, RemedyMeasures]) -> str:
    """Return why nothing is recommended."""
    if finding.kind is Kind.MATTERS:
        slot = _one_slot(finding, system)
        if slot is not None and slot.missed:
            return (
                f"{slot.advice} {slot.description} No remedy that was tried is surely better than what you get today."
            )
        why = _why_no_remedy(finding, system, effects, remedies)
        return why if slot is None else f"{why} {slot.description}"
    said = {
        Kind.OWN_RULE: "Leave the order of your documents: it changes nothing, for the system orders them by a rule of "
        "its own.",
        Kind.UNKNOWN: f"Leave it for now: {finding.asked} too few to tell; {finding.more}.",
        Kind.NOISE: "Leave the order: it is not what changes the answers.",
        Kind.NOTHING: "Leave the order: it does not matter here.",
    }[finding.kind]
    if finding.noise is not None:
        said += (
            f" Two calls in the same order differ in {finding.noise.value:.1%} of the cases: to make answers steady, "
            "remove the randomness of the system."
        )
    return said + _gain_without_order(effects)


def _gain_without_order(effects: Effects) -> str:
    """Return " " and the remedy that is better although nothing shows that the order matters; "" if none is."""
    better = [each for each in effects.remedies if each.is_better and each.gain is not None]
    if not better:
        return ""
    best = max(better, key=lambda each: each.gain.value if each.gain else 0.0)
    why = "asking several times outvotes chance" if best.calls > 1 else "though nothing shows that the order does it"
    gain = "" if best.gain is None else _signed(best.gain)
    return f" What gives more right answers than today is {best.name}: {gain}, {why}; {_calls(best)} per answer."


def _why_no_remedy(
    finding: Finding, system: RemedyMeasures, effects: Effects, remedies: dict[str, RemedyMeasures]
) -> str:
    """Return why nothing is recommended although the order matters."""
    known = "today" in system.measures
    unsure = "no remedy is surely more accurate" if known else "without gold answers, no remedy's gain is known"
    steadiest = choose_steadier(effects)
    change = ""
    if steadiest is not None:
        gain = _change(steadiest, system, remedies[steadiest.name])
        change = f" If that order can change from one time to the next: {gain[0].lower()}{gain[1:]}"
    if effects.order_is_fixed:
        fixes = next((each.name for each in effects.remedies if each.same_as_today), None)
        kept = f": {fixes} makes sure of it, in whatever order documents come in." if fixes else f".{change}"
        return (
            f"Leave it: your retriever lists by score, so that users get one order, and {unsure}. Keep that order{kept}"
        )
    if steadiest is not None:
        return (
            "Leave it as long as your retriever always lists the same documents alike: users then get one order, and "
            f"{unsure}.{change}"
        )
    steadier = [each for each in effects.remedies if each.is_steadier]
    possible = [each for each in steadier if not each.is_loss]
    if possible:
        likeliest = min(possible, key=lambda each: (_seems_loss(each), each.calls))
        return _why_not_steadier(likeliest, system, remedies[likeliest.name], finding.questions)
    if steadier:
        return "Leave it: what stops flips gives fewer right answers than you get today. Keep your retriever's order."
    return "Leave it: the order matters, and no remedy that was tried is surely better than what you get today."


def _seems_loss(remedy: RemedyEffect) -> bool:
    """Return whether a remedy was right less often than what users get today, be it by chance."""
    return remedy.gain is not None and remedy.gain.value < 0


def _why_not_steadier(remedy: RemedyEffect, system: RemedyMeasures, measured: RemedyMeasures, questions: int) -> str:
    if remedy.gain is None:
        return (
            f"Leave it until you know the right answers: {remedy.name} would stop flips, but without gold answers "
            "nobody knows what it costs."
        )
    asked = counted(questions, "question")
    if _seems_loss(remedy):
        with_it, today = measured.measures["today"].value, system.measures["today"].value
        return (
            f"Leave it: {remedy.name} stops flips, but was right less often here ({with_it:.1%} against {today:.1%}); "
            f"{asked} cannot tell whether by chance."
        )
    return (
        f"Leave it for now: {remedy.name} would stop flips, but {asked} cannot rule out that it loses more than "
        f"{100 * MAX_LOSS:.0f} points; about {rounded_up(remedy.needed):,} would do."
    )


def _calls(effect: RemedyEffect) -> str:
    return "1 call" if effect.calls == 1 else f"{effect.calls:.1f} calls"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.01 else "under 0.01 s"


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"


def _signed(estimate: Estimate) -> str:
    return f"{100 * estimate.value:+.1f} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}] points"
