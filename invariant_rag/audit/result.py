"""The result of an audit: what was asked and answered, the screen, the measures, the remedies, the advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from importlib.metadata import version
from math import isfinite
from typing import Any

from invariant_rag.audit.advice import advise
from invariant_rag.audit.calling import Answer
from invariant_rag.audit.choices import AuditChoices
from invariant_rag.audit.folder import SCHEMA_VERSION
from invariant_rag.audit.grading import FAILED, RIGHT, WRONG
from invariant_rag.audit.judging import JudgeRecord
from invariant_rag.audit.measures import Comparison, compare, flips, measure, slot_accuracies
from invariant_rag.audit.plan import Order
from invariant_rag.audit.questions import Question
from invariant_rag.audit.remedies import DRAWS, Remedy
from invariant_rag.audit.screen import ANOTHER, CALLS, FIRST, OTHER, Screen
from invariant_rag.audit.statistics import Estimate

COLUMNS = ("today", "today again", "placebo", "another order", "a third order")
"""Names of the calls of the screen."""


@dataclass(frozen=True)
class Asked:
    """A question with the answers of the screen, and the outcomes.

    Attributes:
        index: Its number in the run.
        question: The question.
        orders: The order of the documents of each call.
        answers: The answer of each call.
        classes: The outcome of each call: right, wrong, failed, or a class of answers that mean the same.
        scored: Whether outcomes are right or wrong.
    """

    index: int
    question: Question
    orders: list[Order]
    answers: list[Answer]
    classes: list[int]
    scored: bool

    @property
    def flips(self) -> bool:
        """Whether some order gave another outcome than the first call of today."""
        return len({self.classes[column] for column in (FIRST, OTHER, ANOTHER)}) > 1

    @property
    def outcomes(self) -> list[str]:
        """What the classes mean, in words."""
        names = {RIGHT: "right", WRONG: "wrong"} if self.scored else {}
        return [names.get(each, "failed" if each == FAILED else f"meaning {each - 2}") for each in self.classes]

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """Name, order, answer and outcome of each call, in words. Documents are counted from 1, as listed today."""
        orders = [" ".join(str(place + 1) for place in order) for order in self.orders]
        return list(zip(COLUMNS, orders, [each.text or "" for each in self.answers], self.outcomes, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        calls = zip(COLUMNS, self.orders, self.answers, self.outcomes, strict=True)
        said = [
            {"call": name, "order": order, "answer": answer.text, "outcome": outcome}
            for name, order, answer, outcome in calls
        ]
        return {**self.question.as_dict(), "flips": self.flips, "calls": said}


@dataclass(frozen=True)
class Drawn:
    """A question as today and with remedies: as many distinct draws of each.

    Attributes:
        index: Its number in the run.
        scored: Whether outcomes are right or wrong.
        draws: Outcome of each draw, by `today` or the name of a remedy.
    """

    index: int
    scored: bool
    draws: dict[str, list[int]]


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        system: Name of the system.
        date: When it ended, in UTC.
        choices: How it was made.
        screen: The first stage.
        asked: The questions that were asked, with all answers.
        remedies: What was compared with today.
        drawn: The draws of these comparisons.
        planned: Questions that would have been asked if nothing had been decided before.
        unordered: Questions without two different documents, which were not asked.
        judge: What the judge was asked, and how often it erred; None without one.
        embeds: Whether answers without gold answers were compared by embeddings.
    """

    system: str
    date: str
    choices: AuditChoices
    screen: Screen
    asked: tuple[Asked, ...]
    remedies: tuple[Remedy, ...]
    drawn: tuple[Drawn, ...]
    planned: int
    unordered: int
    judge: JudgeRecord | None = None
    embeds: bool = False

    @cached_property
    def measures(self) -> dict[str, Estimate]:
        """The six measures, as far as they are known: see `invariant_rag.audit.ABOUT`."""
        return measure(self.asked) | {"net_sensitivity": self.screen.net, "calls": Estimate(CALLS, CALLS, CALLS)}

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Each remedy against today."""
        return compare(self.drawn, self.remedies)

    @cached_property
    def advice(self) -> list[tuple[str, str]]:
        """Title and text of what a report begins with: finding, today, recommendation, and what to know."""
        return advise(self)

    @property
    def order_matters(self) -> bool:
        """Whether the order was shown to matter."""
        return self.screen.outcome == "order matters"

    @property
    def flips(self) -> list[Asked]:
        """Questions of which some order changed the outcome."""
        return [each for each in self.asked if each.flips]

    @property
    def steady(self) -> list[Asked]:
        """Questions of which none did."""
        return [each for each in self.asked if not each.flips]

    @property
    def calls(self) -> int:
        """Calls of the system: those of the screen, and of today and all remedies."""
        votes = {each.name: each.votes for each in self.remedies}
        compared = sum(len(draws) * votes.get(name, 0) for each in self.drawn for name, draws in each.draws.items())
        today = len({each.index for each in self.drawn} - {each.index for each in self.asked})
        return CALLS * len(self.asked) + compared + DRAWS * today

    @property
    def errors(self) -> list[str]:
        """Different errors of tries of the screen, the most recent last."""
        return list(dict.fromkeys(error for each in self.asked for answer in each.answers for error in answer.errors))

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON."""
        flip_rate, always = flips(self.asked)
        scored = [each for each in self.asked if each.scored]
        answers = [answer for each in self.asked for answer in each.answers]
        tokens = [answer.tokens for answer in answers if answer.tokens is not None]
        document: dict[str, Any] = plain(
            {
                "schema_version": SCHEMA_VERSION,
                "system": self.system,
                "date": self.date,
                "seed": self.choices.seed,
                "advice": [{"title": title, "text": text} for title, text in self.advice],
                "screen": self.screen,
                "measures": self.measures,
                "described": {
                    "flip_rate": flip_rate,
                    "right_in_every_order": always,
                    "slots": slot_accuracies(scored) if scored else [],
                    "tokens": sum(tokens) if tokens else None,
                    "seconds": sum(answer.seconds for answer in answers),
                    "calls": self.calls,
                    "planned": self.planned,
                    "unordered": self.unordered,
                    "errors": self.errors,
                },
                "remedies": self.comparisons,
                "judge": self.judge,
                "versions": package_versions(),
                "questions": [each.as_dict() for each in self.asked],
                "draws": [
                    {"index": each.index, **{arm: [one == RIGHT for one in said] for arm, said in each.draws.items()}}
                    for each in self.drawn
                    if each.scored
                ],
            }
        )
        return document


def plain(value: Any) -> Any:
    """Return dataclasses as plain data for JSON, with numbers of six digits, and None for those that JSON lacks.

    >>> plain(Estimate(1 / 3, 0.25, float("nan")))
    {'value': 0.333333, 'low': 0.25, 'high': None}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return (round(value, 6) if isfinite(value) else None) if isinstance(value, float) else value


def package_versions() -> dict[str, str]:
    """Return versions of what gave the result."""
    return {name: version(name) for name in ("invariant-rag", "numpy", "scipy", "pandas")}
