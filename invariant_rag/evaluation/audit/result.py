"""The result of an audit, as objects and as plain data."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from typing import Any

from invariant_rag import __version__
from invariant_rag.errors import UnknownName
from invariant_rag.evaluation.audit.advice import Advice
from invariant_rag.evaluation.audit.call_plan import AuditDesign, CallPlan
from invariant_rag.evaluation.audit.effects import Effects
from invariant_rag.evaluation.audit.failures import Failures
from invariant_rag.evaluation.audit.measures import RemedyMeasures
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.scoring import ScoredAnswer, ScoredPlan
from invariant_rag.files import finite
from invariant_rag.shown import counted

GIVEN = "given"
"""Where an answer comes from: the order that the retriever gives."""

OTHER = "order"
"""Where an answer comes from: another input order. The rest are `slot 1`..."""


@dataclass(frozen=True)
class AskedAnswer:
    """One answer to a question.

    Attributes:
        remedy: With which remedy; `as it is` for the system itself.
        kind: In which order: `given`, `order` (another one), or `slot N` (of the gold segments).
        order: Indices of the segments as they were listed, before what the remedy did.
        text: The answer; None if the call failed.
        score: Its score; None without gold answers.
    """

    remedy: str
    kind: str
    order: tuple[int, ...]
    text: str | None
    score: float | None


@dataclass(frozen=True)
class AskedQuestion:
    """A question with all of its answers.

    Attributes:
        question: The question.
        flips: Whether some order (or repeat) changes the outcome.
        answers: Answers of the system as it is, then those with each remedy in the order that the retriever gives.
    """

    question: Question
    flips: bool
    answers: tuple[AskedAnswer, ...]

    @property
    def by_order(self) -> tuple[AskedAnswer, ...]:
        """Answers of the system as it is, one for each input order: the first to the given order, then to others."""
        own = [each for each in self.answers if each.remedy == self.answers[0].remedy]
        given = [each for each in own if each.kind == GIVEN]
        return (*given[:1], *(each for each in own if each.kind == OTHER))

    @property
    def accuracy(self) -> dict[str, float | None]:
        """Accuracy of the system as it is, by the names of the measures `today`, `accuracy` and `worst`."""
        own = self.answers[0].remedy
        given = _known_scores(each for each in self.answers if each.remedy == own and each.kind == GIVEN)
        every = _known_scores(self.by_order)
        return {"today": _mean(given), "accuracy": _mean(every), "worst": min(every, default=None)}

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data; a number that JSON does not have is None."""
        asked = self.question
        document = {
            "id": asked.id,
            "question": asked.text,
            "answers": list(asked.answers),
            "gold": list(asked.gold),
            "segments": [
                {"title": each.title, "text": each.text, "score": None if each.score is None else float(each.score)}
                for each in asked.segments
            ],
            "extra": {name: _plain(value) for name, value in asked.extra.items()},
            "flips": self.flips,
            "accuracy": self.accuracy,
            "asked": [asdict(each) for each in self.answers],
        }
        plain: dict[str, Any] = finite(document)
        return plain


@dataclass(frozen=True)
class Reused:
    """Answers of an earlier audit in the same folder.

    Attributes:
        answers: How many were used again, of this very system.
        since: Date of the first of them; "" if there is none.
        others: How many were not used: they are of another system, or other questions and options.
    """

    answers: int = 0
    since: str = ""
    others: int = 0

    def __str__(self) -> str:
        said = []
        if self.answers:
            said.append(
                f"{counted(self.answers, 'answer')} reused from {self.since or 'an unknown date'} (--fresh asks anew)."
            )
        if self.others:
            others = counted(self.others, "answer")
            said.append(f"In the folder, and not used: {others} of another system, or to other questions or options.")
        return " ".join(said)


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        system: Name of the system.
        date: When it was finished, in UTC.
        versions: Versions of the packages that took part.
        metric: Name of the accuracy metric.
        design: How many calls are made about each question.
        questions: Number of questions.
        complete: Number of questions all of whose calls were made; the measures are about these.
        unasked: Number of calls that the budget did not allow.
        failures: What failed of the calls behind the measures; they are asked again by the next audit in the folder.
        reused: Answers of an earlier audit.
        out_of_slots: Complete questions without gold segments, or with too few segments for the slots.
        measured: Measures of the system as it is, then of every remedy.
        effects: What was tested.
        advice: What to do.
        asked: Every complete question with its answers.
    """

    system: str
    date: str
    versions: Mapping[str, str]
    metric: str
    design: AuditDesign
    questions: int
    complete: int
    unasked: int
    failures: Failures
    reused: Reused
    out_of_slots: int
    measured: tuple[RemedyMeasures, ...]
    effects: Effects
    advice: Advice
    asked: tuple[AskedQuestion, ...]

    def __getitem__(self, name: str) -> RemedyMeasures:
        """Return the measures of a remedy; `as it is` for the system itself."""
        for each in self.measured:
            if each.name == name:
                return each
        raise UnknownName("measured remedy", name, [each.name for each in self.measured])

    @property
    def calls(self) -> int:
        """Number of different calls behind the measures."""
        return self.failures.calls

    @property
    def failed(self) -> int:
        """Number of calls that failed, whatever the retries."""
        return self.failures.failed

    @property
    def errors(self) -> tuple[tuple[str, int], ...]:
        """The most frequent errors of tries, with their counts."""
        return self.failures.errors

    @property
    def flips(self) -> list[AskedQuestion]:
        """The questions whose outcome changes with the order, those that change most first."""
        ranked = sorted(range(len(self.asked)), key=lambda index: -self.measured[0].per_question[index])
        return [self.asked[index] for index in ranked if self.asked[index].flips]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data; a number that JSON does not have is None."""
        names = ("system", "date", "metric", "questions", "complete", "calls", "unasked", "failed", "out_of_slots")
        document = {
            **{name: getattr(self, name) for name in names},
            "versions": dict(self.versions),
            "failed_questions": self.failures.questions,
            "tries": self.failures.tries,
            "failed_tries": self.failures.failed_tries,
            "errors": [list(each) for each in self.errors],
            "reused": asdict(self.reused),
            "design": asdict(self.design),
            "advice": asdict(self.advice),
            "measured": [_measures_as_dict(each) for each in self.measured],
            "effects": _effects_as_dict(self.effects),
            "asked": [each.as_dict() for each in self.asked],
        }
        plain: dict[str, Any] = finite(document)
        return plain


def _known_scores(answers: Iterable[AskedAnswer]) -> list[float]:
    return [each.score for each in answers if each.score is not None]


def _mean(scores: Sequence[float]) -> float | None:
    return sum(scores) / len(scores) if scores else None


def _measures_as_dict(each: RemedyMeasures) -> dict[str, Any]:
    return {
        "name": each.name,
        "measures": {name: estimate.as_dict() for name, estimate in each.measures.items()},
        "versus_as_it_is": {name: estimate.as_dict() for name, estimate in each.versus.items()},
        "accuracy_by_slot": [estimate.as_dict() for estimate in each.slots],
        "accuracy_by_salted_slot": [estimate.as_dict() for estimate in each.salts],
        "slot_spread_by_chance": each.slot_chance,
        "salted_spread_by_chance": each.salt_chance,
    }


def _effects_as_dict(effects: Effects) -> dict[str, Any]:
    order = effects.order
    return {
        "order_is_real": order.is_real,
        "order_p": order.p,
        "order_p_values": dict(order.p_values),
        "questions_needed": order.needed,
        "listing": effects.listing.value,
        "remedies": [asdict(each) for each in effects.remedies],
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def package_versions() -> dict[str, str]:
    """Return the versions of this package, of Python, and of what a system may be built on."""
    found = {"invariant-rag": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "langchain-core", "llama-index-core", "openai"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def asked_question(plans: Sequence[CallPlan], scored: Sequence[ScoredPlan], names: Sequence[str]) -> AskedQuestion:
    """Return a question with its answers.

    Args:
        plans: Its calls, with the system as it is and with every remedy.
        scored: Their answers.
        names: Names of the remedies.
    """
    own, found = plans[0], scored[0]
    answers = []
    groups = (
        (own.repeats, found.given, GIVEN),
        (own.orders[1:], found.orders, OTHER),
        *(((group,), (found.slots[index],), f"slot {index + 1}") for index, group in enumerate(own.slots)),
    )
    for calls, replies, kind in groups:
        for group, reply in zip(calls, replies, strict=True):
            answers.append(_asked_answer(names[0], kind, group[0].spec.order, reply))
    for name, plan, replied in zip(names[1:], plans[1:], scored[1:], strict=True):
        for group, reply in zip(plan.repeats, replied.given, strict=True):
            answers.append(_asked_answer(name, GIVEN, group[0].spec.order, reply))
    outcomes = {each.score if found.question.has_gold else each.label for each in (*found.given, *found.orders) if each}
    return AskedQuestion(found.question, len(outcomes) > 1, tuple(answers))


def _asked_answer(remedy: str, kind: str, order: tuple[int, ...], reply: ScoredAnswer | None) -> AskedAnswer:
    text = None if reply is None else reply.text
    score = reply.score if reply is not None and isfinite(reply.score) else None
    return AskedAnswer(remedy, kind, order, text, score)
