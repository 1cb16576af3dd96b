"""Say what was found, in the order in which people ask: today, other orders, noise, remedies, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from invariant_rag.evaluation.audit.effects import MAX_LOSS, NEGLIGIBLE, Effects, RemedyEffect, choose
from invariant_rag.evaluation.audit.measures import RemedyMeasures
from invariant_rag.evaluation.statistics import Estimate, zero_share_upper_bound

LEAVE_IT = "leave it"
"""The choice that recommends no change."""

MAX_UNSEEN_FLIPS = 0.05
"""Upper bound of the flip rate up to which no flip means that order does not matter."""

ENOUGH = 59
"""So many questions without a flip bound the flip rate by that."""

MAX_ERRORS = 0.2
"""Share of failed calls from which on they are to be looked at first."""

_ACTIONS = {
    "sort": "Sort the documents by a hash of their contents before asking",
    "rerank": "List the documents by their scores, ties by content, before asking",
    "top-3": "Keep the three documents with the best scores, best first",
    "long-context-reorder": "List the documents with the best scores at both ends",
    "vote": "Ask in several rotations of the sorted documents and take the majority",
    "plain": "Use the plain model",
}


@dataclass(frozen=True)
class Advice:
    """A recommendation, and what it rests on.

    Attributes:
        choice: `leave it`, `fix the errors`, `make verdicts readable`, or the name of a remedy.
        headline: What to do, in one sentence.
        sections: Questions that people ask, in that order, each with its answers, one sentence each.
    """

    choice: str
    headline: str
    sections: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """All answers."""
        return tuple(each for _, answers in self.sections for each in answers)


def advise(measured: Sequence[RemedyMeasures], effects: Effects, questions: int, errors: float) -> Advice:
    """Recommend what to do, by the first of these rules that applies.

    1. Many calls failed: fix the errors.
    2. Some verdicts on pairs name neither response: make them readable, for they say nothing about order.
    3. What `choose` recommends: a remedy that is surely better than what users get today, or surely steadier and surely
       no loss. Nothing is recommended unless the order matters by more than chance.
    4. Leave it.

    Args:
        measured: The measures of the system as it is, then those of every remedy.
        effects: What was tested.
        questions: Number of questions that the measures are about.
        errors: Share of calls that failed.
    """
    system = measured[0].measures
    remedies = {each.name: each for each in measured[1:]}
    best = choose(effects)
    unreadable = system.get("unreadable")
    if errors > MAX_ERRORS:
        choice, headline = "fix the errors", f"Fix the errors first: {errors:.0%} of the calls failed."
    elif unreadable is not None and unreadable.low > NEGLIGIBLE:
        choice = "make verdicts readable"
        headline = "Have the judge name a response, as A, B or [[A]]: some of its verdicts name neither."
    elif best is not None:
        choice, headline = best.name, _recommendation(best, measured[0], remedies[best.name])
    else:
        choice, headline = LEAVE_IT, _why_leave(measured[0], effects, questions)
    sections = (
        ("What do you get today?", _today(measured[0], errors)),
        ("What would other orders give?", _other_orders(measured[0])),
        ("Is that more than noise?", _noise(measured[0], effects, questions)),
        ("What does each remedy give, against today?", _against_today(effects, remedies)),
        ("What to do?", (headline,)),
    )
    return Advice(choice, headline, sections)


def _today(system: RemedyMeasures, errors: float) -> tuple[str, ...]:
    found = system.measures
    said = []
    if "today" in found:
        said.append(f"In the order that your retriever gives, {_percent(found['today'])} of the answers are right.")
    else:
        said.append("No gold answers were given: nothing is known about accuracy, only whether answers change.")
    if errors:
        said.append(f"{errors:.1%} of the calls failed; what follows is about the others.")
    if "unreadable" in found and found["unreadable"].value:
        said.append(f"Of the verdicts {_percent(found['unreadable'])} name neither response.")
    return tuple(said)


def _other_orders(system: RemedyMeasures) -> tuple[str, ...]:
    found = system.measures
    said = []
    if "accuracy" in found:
        said.append(
            f"On average over orders {_percent(found['accuracy'])} are right; with each question in its worst order "
            f"{_percent(found['worst'])}, in its best {_percent(found['best'])}."
        )
        said.append(f"{_percent(found['flip_rate'])} of the questions are right in one order and wrong in another.")
        said.append(f"The wording alone says less: it changes for {_percent(found['wording_rate'])} of the questions.")
    else:
        said.append(f"{_percent(found['flip_rate'])} of the questions are answered otherwise in another order.")
    if system.slot_chance is not None and "slot_spread" in found:
        said.append(
            f"Between the slots of the gold document accuracy differs by up to {_percent(found['slot_spread'])}; "
            f"chance alone would make it {system.slot_chance:.1%}."
        )
    return tuple(said)


def _noise(system: RemedyMeasures, effects: Effects, questions: int) -> tuple[str, ...]:
    found, order = system.measures, effects.order
    said = []
    if "sensitivity" in found and "noise" in found:
        said.append(
            f"Two orders disagree with probability {_percent(found['sensitivity'])}, two calls in the same order with "
            f"{_percent(found['noise'])}."
        )
    if order.is_real:
        said.append(f"Yes: chance would hardly make that (p = {_p(order.p)}).")
    elif questions < order.needed:
        said.append(
            f"Nothing that chance could not make (p = {_p(order.p)}), but {questions} questions are too few to see an "
            f"effect of 10 points: about {order.needed} would do."
        )
    else:
        said.append(f"No: chance makes as much (p = {_p(order.p)}), and {questions} questions are enough to tell.")
    if order.has_own_rule:
        said.append(
            "The answers do not depend on the order given, but they do on hashes put before the documents: the system "
            "seems to order the documents by a rule of its own, and that order matters."
        )
    return tuple(said)


def _against_today(effects: Effects, remedies: dict[str, RemedyMeasures]) -> tuple[str, ...]:
    if not effects.remedies:
        return ("No remedy was tried.",)
    return tuple(_remedy_sentence(each, remedies[each.name]) for each in effects.remedies)


def _remedy_sentence(effect: RemedyEffect, measured: RemedyMeasures) -> str:
    found = measured.measures
    cost = f"{found['calls'].value:.1f} calls and {_seconds(found['seconds'].value)} per answer"
    if effect.same_as_today:
        return f"{effect.name} is what you do today: it lists (almost) every question in the same order; {cost}."
    parts = []
    if effect.gain is not None:
        sure = "a gain" if effect.is_better else "a loss" if effect.is_loss else "neither surely a gain nor a loss"
        parts.append(f"accuracy {found['today'].value:.1%}, {_signed(effect.gain)}, {sure}")
    else:
        parts.append("accuracy unknown")
    parts.append(f"flips {found['flip_rate'].value:.1%}")
    fairness = {None: "fairness unknown", True: "not fair: its slots matter", False: "no unfairness found"}
    parts += [fairness[effect.unfair], cost]
    return f"{effect.name}: {'; '.join(parts)}."


def _recommendation(best: RemedyEffect, system: RemedyMeasures, measured: RemedyMeasures) -> str:
    what = _ACTIONS.get(best.name, f"Use the method {best.name}")
    flips, before = measured.measures["flip_rate"].value, system.measures["flip_rate"].value
    steadier = f"{flips:.1%} of the questions flip instead of {before:.1%}"
    if best.is_better and best.gain is not None:
        return f"{what}: {_signed(best.gain)} against what you get today; {steadier}."
    return f"{what}: {steadier}, and a loss of more than {100 * MAX_LOSS:.0f} points can be ruled out."


def _why_leave(system: RemedyMeasures, effects: Effects, questions: int) -> str:
    """Return why nothing is recommended."""
    if effects.order.has_own_rule:
        return "Leave the order of your documents: it changes nothing, for the system orders them by a rule of its own."
    if not effects.order.is_real:
        return _why_no_effect(system, effects, questions)
    if effects.order_is_fixed:
        known = "today" in system.measures
        unsure = "no remedy is surely more accurate" if known else "without gold answers, no remedy's gain is known"
        return f"Leave it: your retriever lists by score, so that users get one order, and {unsure}. Keep that order."
    steadier = [each for each in effects.remedies if each.is_steadier]
    possible = [each for each in steadier if not each.is_loss]
    if possible:
        return _why_not_steadier(min(possible, key=lambda each: each.calls), "today" in system.measures, questions)
    if steadier:
        return "Leave it: what stops flips gives fewer right answers than you get today. Keep your retriever's order."
    return "Leave it: the order matters, and no remedy that was tried is surely better than what you get today."


def _why_no_effect(system: RemedyMeasures, effects: Effects, questions: int) -> str:
    found = system.measures
    if "noise" in found and found["noise"].low > NEGLIGIBLE:
        return (
            "Leave the order: answers change as much when nothing is moved "
            f"({found['noise'].value:.1%} of the time). To make them steady, remove the randomness of the system."
        )
    unseen = found["flip_rate"].value == 0 and zero_share_upper_bound(questions) > MAX_UNSEEN_FLIPS
    if questions < effects.order.needed or unseen:
        return (
            f"Leave it for now: no effect of the order was found, and {questions} questions are too few to tell; "
            f"about {max(effects.order.needed, ENOUGH)} would do."
        )
    return "Leave it: the order of the documents does not matter here."


def _why_not_steadier(remedy: RemedyEffect, has_gold: bool, questions: int) -> str:
    if not has_gold:
        return (
            f"Leave it until you know the right answers: {remedy.name} would stop flips, but without gold answers "
            "nobody knows what it costs."
        )
    return (
        f"Leave it for now: {remedy.name} would stop flips, but {questions} questions cannot rule out that it loses "
        f"more than {100 * MAX_LOSS:.0f} points; about {remedy.needed} would do."
    )


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 0.01 else "under 0.01 s"


def _p(value: float) -> str:
    return "under 0.01" if value < 0.01 else f"{value:.2f}"


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"


def _signed(estimate: Estimate) -> str:
    return f"{100 * estimate.value:+.1f} [{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}] points"
