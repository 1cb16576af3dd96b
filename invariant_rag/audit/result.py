"""The result of an audit: what was asked and answered, the screen, the measures, the remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from invariant_rag.audit.calls import CallResult
from invariant_rag.audit.grading import FAILED, RIGHT, WRONG, AnswerJudge
from invariant_rag.audit.plan import SLOTS, AuditChoices, Order, slot_of
from invariant_rag.audit.questions import Question
from invariant_rag.audit.run_folder import SCHEMA_VERSION
from invariant_rag.audit.sequential_test import ANOTHER, CALLS, FIRST, OTHER, PLACEBO, STOPPED_TAIL, Screen
from invariant_rag.audit.statistics import TAIL, Estimate, mean_interval
from invariant_rag.files import finite

if TYPE_CHECKING:
    from invariant_rag.audit.statistics import Floats

COLUMNS = ("today", "today again", "placebo", "another order", "a third order")  # names of the calls of the screen
REMEDY_LEVEL = 0.02
FEWEST = 5  # calls in a part of the prompt, from which its accuracy is measured

ABOUT = {  # what each of the six measures says
    "accuracy_today": "share of right answers in the order that your retriever gives; a call that failed is not right",
    "accuracy_over_orders": "share of right answers in random orders",
    "net_sensitivity": "disagreement between orders, minus disagreement within one order",
    "worst_slot": "accuracy where the documents with the answer are in the worst part of the prompt",
    "errors": "share of calls without an answer, after all retries",
    "calls": "calls of the screen for each question",
}


@dataclass(frozen=True)
class Asked:
    """A question with order, answer and outcome (a class of equal answers, if it is not `scored`) of each call."""

    question: Question
    orders: list[Order]
    answers: list[CallResult]
    classes: list[int]
    scored: bool

    @property
    def flips(self) -> bool:
        """Whether some order gave another outcome than the first call of today."""
        return len({self.classes[column] for column in (FIRST, OTHER, ANOTHER)}) > 1

    @property
    def rows(self) -> list[tuple[str, Order, str, str]]:
        """Name, order, answer and outcome of each call."""
        names = {FAILED: "failed", RIGHT: "right", WRONG: "wrong"}
        outcomes = [names.get(each, f"meaning {each - 2}") for each in self.classes]
        return list(zip(COLUMNS, self.orders, [each.text or "" for each in self.answers], outcomes, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        calls = [dict(zip(("call", "order", "answer", "outcome"), row, strict=True)) for row in self.rows]
        return {**self.question.as_dict(), "flips": self.flips, "calls": calls}


@dataclass(frozen=True)
class Comparison:
    """A remedy against today: as many distinct draws of each, on the same questions.

    After one that `fixes`, the order of today changes nothing, by construction. `calls` are those for one answer, at
    most; `p` is the one-tailed p-value of the gain, corrected for the number of remedies.
    """

    name: str
    about: str
    fixes: bool
    calls: int
    accuracy: Estimate | None = None
    gain: Estimate | None = None
    p: float = 1.0

    @property
    def is_better(self) -> bool:
        """Whether it is right more often than today, beyond noise."""
        return self.gain is not None and self.gain.value > 0 and self.p <= REMEDY_LEVEL


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        system, date, choices: Name of the system, when the audit ended (UTC), and how it was made.
        screen: The first stage.
        asked: The questions that were asked, with all answers.
        comparisons: Each remedy against today.
        calls: Calls of the system.
        planned, unordered: Questions that would have been asked if nothing had been decided before; and those without
            two different documents, which were not asked.
        judge: The judge, with what it was asked and how often it erred; None without one.
        embeds: Whether answers without gold answers were compared by embeddings.
        toy: Whether the embedded toy model answered.
        sent: What the first call was made with, where all answers are one.
    """

    system: str
    date: str
    choices: AuditChoices
    screen: Screen
    asked: tuple[Asked, ...]
    comparisons: tuple[Comparison, ...]
    calls: int
    planned: int
    unordered: int
    judge: AnswerJudge | None = None
    embeds: bool = False
    toy: bool = False
    sent: str = ""

    @cached_property
    def measures(self) -> dict[str, Estimate]:
        """The six measures, as far as they are known: see `invariant_rag.audit.ABOUT`."""
        found, right = {}, np.array([each.classes for each in self.scored]) == RIGHT
        if len(right):  # of today, the draws that no cache makes equal
            for name, columns in (("accuracy_today", [FIRST, PLACEBO]), ("accuracy_over_orders", [OTHER, ANOTHER])):
                found[name] = mean_interval(right[:, columns].mean(axis=1), tail=STOPPED_TAIL)
        found["net_sensitivity"] = self.screen.net
        if (worst := worst_slot(places_and_outcomes(self.scored))) is not None:
            found["worst_slot"] = worst
        failed = [each.classes.count(FAILED) / CALLS for each in self.asked]
        return found | {"errors": mean_interval(failed, tail=STOPPED_TAIL), "calls": Estimate(CALLS, CALLS, CALLS)}

    @cached_property
    def advice(self) -> list[tuple[str, str]]:
        """Title and text of what a report begins with: finding, today, recommendation, and what to know."""
        from invariant_rag.audit.report import advise

        return advise(self)

    @property
    def order_matters(self) -> bool:
        """Whether the order was shown to matter."""
        return self.screen.outcome == "order matters"

    @property
    def scored(self) -> list[Asked]:
        """Questions of which answers are right or wrong."""
        return [each for each in self.asked if each.scored]

    @property
    def flips(self) -> list[Asked]:
        """Questions of which some order changed the outcome, by chance or not."""
        return [each for each in self.asked if each.flips]

    @property
    def errors(self) -> list[str]:
        """Different errors of tries of the screen, the most recent last."""
        return list(dict.fromkeys(error for each in self.asked for answer in each.answers for error in answer.errors))

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        answers = [answer for each in self.asked for answer in each.answers]
        tokens = [answer.tokens for answer in answers if answer.tokens is not None]
        own = ("system", "toy", "date", "calls", "planned", "unordered", "errors")
        document = {
            "schema_version": SCHEMA_VERSION,
            **{name: getattr(self, name) for name in own},
            "seed": self.choices.seed,
            "advice": [{"title": title, "text": text} for title, text in self.advice],
            "screen": asdict(self.screen),
            "measures": {name: each.as_dict() for name, each in self.measures.items()},
            "slots": [each and each.as_dict() for each in slot_accuracies(places_and_outcomes(self.scored))],
            "remedies": [asdict(each) for each in self.comparisons],
            "judge": self.judge and self.judge.as_dict(),
            "tokens": sum(tokens) if tokens else None,
            "seconds": sum(answer.seconds for answer in answers),
            "versions": package_versions(),
            "questions": [each.as_dict() for each in self.asked],
        }
        return dict(finite(document))


Slots = list[tuple[int | None, bool]]  # of each random order: the part with the gold documents, and whether right


def places_and_outcomes(scored: Sequence[Asked]) -> list[Slots]:
    """Return the `Slots` of each question, without today: what a retriever lists first is also easy to answer."""
    return [
        [(slot_of(each.question, each.orders[column]), each.classes[column] == RIGHT) for column in (OTHER, ANOTHER)]
        for each in scored
    ]


def slot_accuracies(outcomes: Sequence[Slots], tail: float = TAIL) -> list[Estimate | None]:
    """Return the accuracy by the part of the prompt in which the documents with the answer are."""
    return [mean_interval(each, tail=tail) if len(each) >= FEWEST else None for each in _by_slot(outcomes)]


def worst_slot(outcomes: Sequence[Slots]) -> Estimate | None:
    """Return the accuracy of the worst part of the prompt; None if fewer than two are known.

    The minimum of noisy means is too low, so it is chosen on one half of the questions and measured on the other, both
    ways. The interval holds whichever part is the worst (Bonferroni).
    """
    whole = slot_accuracies(outcomes)
    known = [number for number, each in enumerate(whole) if each is not None]
    if len(known) < 2:
        return None
    halves, values = [_by_slot(outcomes[start::2]) for start in range(2)], []
    for chosen, measured in (halves, halves[::-1]):
        usable = [number for number in known if len(chosen[number]) and len(measured[number])]
        if usable:
            worst = min(usable, key=lambda number: float(np.mean(chosen[number])))
            values.append(float(np.mean(measured[worst])))
    low = min(each.low for each in whole if each is not None)
    high = min(each.high for each in slot_accuracies(outcomes, TAIL / len(known)) if each is not None)
    value = sum(values) / len(values) if values else low
    return Estimate(value, min(low, value), max(high, value))


def _by_slot(outcomes: Sequence[Slots]) -> list[Floats]:
    """Return for each part the mean outcome of the calls of each question that has some there."""
    found: list[list[float]] = [[] for _ in range(SLOTS)]
    for each in outcomes:
        for slot in {slot for slot, _ in each if slot is not None}:
            found[slot].append(float(np.mean([right for place, right in each if place == slot])))
    return [np.array(values, dtype=np.float64) for values in found]


def package_versions() -> dict[str, str]:
    """Return versions of what gave the result."""
    return {name: version(name) for name in ("invariant-rag", "numpy", "scipy", "pandas")}
