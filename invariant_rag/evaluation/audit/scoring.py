"""Score stored answers: from texts to outcomes, one remedy at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from invariant_rag.evaluation.audit.answer_store import StoredAnswer
from invariant_rag.evaluation.audit.call_plan import CallGroup, CallPlan
from invariant_rag.evaluation.audit.outcomes import Outcomes, disagreement, known_means
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.verdicts import parse_verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

RIGHT = 0.5
"""An answer is right from this score on; of a metric of 0 and 1, if it is 1."""

UNREADABLE = "unreadable"
"""Label of a verdict that names neither response. An empty verdict is a tie, with the label None."""

Metric = Callable[[str, Sequence[str]], float]
Label = Callable[[str], Hashable]


@dataclass(frozen=True)
class ScoredAnswer:
    """The answer of a group of calls; of several calls, the most frequent one.

    Attributes:
        text: The answer, without hashes that were put before its segments.
        label: What it shares with answers of the same wording.
        score: Its score; NaN without gold answers.
        calls: Number of calls.
        tokens: Tokens of all calls; NaN if unknown.
        seconds: Duration of all calls, one after the other.
    """

    text: str
    label: Hashable
    score: float
    calls: int
    tokens: float
    seconds: float


@dataclass(frozen=True)
class ScoredPlan:
    """The answers about one question with one remedy; None where every call of a group failed.

    Attributes:
        question: The question.
        given: In the order that the retriever gives, repeatedly.
        orders: In the other input orders.
        slots: With the gold segments in each slot.
        salted: In salted canonical orders.
        top: In all orders of the first five segments.
    """

    question: Question
    given: tuple[ScoredAnswer | None, ...]
    orders: tuple[ScoredAnswer | None, ...]
    slots: tuple[ScoredAnswer | None, ...]
    salted: tuple[ScoredAnswer | None, ...]
    top: tuple[ScoredAnswer | None, ...]


class AnswerParser:
    """Parses and scores stored answers.

    Args:
        answers: Stored answers by key.
        metric: Compares an answer with the gold answers.
        label: What two answers must share to count as the same wording.
    """

    def __init__(self, answers: Mapping[str, StoredAnswer], metric: Metric, label: Label) -> None:
        self._answers, self._metric, self._label = answers, metric, label

    def score_plan(self, plan: CallPlan) -> ScoredPlan:
        """Score all answers about one question with one remedy."""
        groups = (plan.repeats, plan.orders[1:], plan.slots, plan.salts, plan.top)
        return ScoredPlan(plan.orders[0][0].question, *(tuple(map(self._majority, group)) for group in groups))

    def _majority(self, group: CallGroup) -> ScoredAnswer | None:
        """Return the most frequent answer to a group of calls; of equally frequent ones, the first."""
        answered = [(call, self._answers[call.key]) for call in group if call.key in self._answers]
        if not answered:
            return None
        texts = [call.spec.without_tags(answer.text) for call, answer in answered]
        question = group[0].question
        labels = [
            self._label_of(call.spec.order, question, text) for (call, _), text in zip(answered, texts, strict=True)
        ]
        winner = Counter(labels).most_common(1)[0][0]
        text = texts[labels.index(winner)]
        tokens = [float("nan") if answer.tokens is None else answer.tokens for _, answer in answered]
        seconds = sum(answer.seconds for _, answer in answered)
        return ScoredAnswer(text, winner, self._score(question, winner, text), len(group), sum(tokens), seconds)

    def _label_of(self, order: Sequence[int], question: Question, text: str) -> Hashable:
        if not question.pairwise:
            return self._label(text)
        position = parse_verdict(text, [question.segments[index] for index in order])
        if position is None:
            return UNREADABLE if text.strip() else None
        return order[position]

    def _score(self, question: Question, label: Hashable, text: str) -> float:
        if not question.has_gold:
            return float("nan")
        return float(label in question.gold) if question.pairwise else float(self._metric(text, question.answers))


def outcomes_of(plans: Sequence[ScoredPlan], slots: int) -> Outcomes:
    """Return the outcomes with one remedy.

    Args:
        plans: The answers, one plan per question.
        slots: Number of gold slots.
    """
    rows = [_outcome_numbers(plan) for plan in plans]
    return Outcomes(
        given=_matrix([row["given"] for row in rows]),
        orders=_matrix([row["orders"] for row in rows]),
        salted=_matrix([row["salted"] for row in rows]),
        given_scores=_matrix([_scores(plan.given) for plan in plans]),
        order_scores=_matrix([_scores(plan.orders) for plan in plans]),
        slot_scores=_matrix([_scores(plan.slots) for plan in plans], slots),
        salted_scores=_matrix([_scores(plan.salted) if plan.slots else [] for plan in plans], slots),
    )


def _outcome_numbers(plan: ScoredPlan) -> dict[str, list[float]]:
    """Return the outcomes of a question: right (1) or wrong (0), or the number of its answer."""
    numbers: dict[Hashable, int] = {}

    def number(answer: ScoredAnswer | None) -> float:
        if answer is None:
            return float("nan")
        if plan.question.has_gold:
            return float(answer.score >= RIGHT)
        return float(numbers.setdefault(answer.label, len(numbers)))

    return {name: [number(each) for each in getattr(plan, name)] for name in ("given", "orders", "salted")}


def _scores(answers: Sequence[ScoredAnswer | None]) -> list[float]:
    return [float("nan") if each is None else each.score for each in answers]


def _matrix(rows: Sequence[Sequence[float]], columns: int | None = None) -> Floats:
    """Return rows of different lengths as `[rows, columns]`, filled up with NaN."""
    matrix = np.full((len(rows), columns or max(map(len, rows), default=0)), np.nan)
    for index, row in enumerate(rows):
        matrix[index, : len(row)] = row
    return matrix


def numbers_of(plans: Sequence[ScoredPlan], outcomes: Outcomes) -> dict[str, Floats]:
    """Return measures `[questions]` by name; NaN for questions without a number."""
    every = np.hstack([outcomes.given, outcomes.orders])
    lowest, highest = _extreme(every, np.fmin), _extreme(every, np.fmax)
    scores = np.hstack([outcomes.given_scores[:, :1], outcomes.order_scores])
    numbers = {
        "today": outcomes.today,
        "accuracy": known_means(scores),
        "worst": _extreme(scores, np.fmin),
        "best": _extreme(scores, np.fmax),
        "flip_rate": np.where(np.isfinite(lowest), lowest < highest, np.nan),
        "sensitivity": outcomes.instability,
        "noise": outcomes.noise,
        "salted_accuracy": known_means(outcomes.salted_scores),
        "salted_worst": _extreme(outcomes.salted_scores, np.fmin),
        "salted_sensitivity": disagreement(outcomes.salted),
    }
    rows = [_numbers(plan) for plan in plans]
    return {**numbers, **{name: np.array([row[name] for row in rows]) for name in rows[0]}}


def _extreme(values: Floats, ufunc: np.ufunc) -> Floats:
    return np.asarray(ufunc.reduce(values, axis=1, initial=np.nan))


def _numbers(plan: ScoredPlan) -> dict[str, float]:
    """Return the measures of one question that need its texts or its costs."""
    none = float("nan")
    listed = [each for each in (plan.given[0], *plan.orders) if each is not None]
    again = [each for each in plan.given[1:] if each is not None]
    top = [each for each in plan.top if each is not None]

    def mean(name: str) -> float:
        return float(np.mean([getattr(each, name) for each in listed])) if listed else none

    return {
        "wording_rate": float(len({each.label for each in (*listed, *again)}) > 1),
        "psr": float(len({each.label for each in top}) == 1) if top else none,
        **_pairwise_numbers(plan, [each.label for each in listed]),
        "calls": mean("calls"),
        "tokens": mean("tokens"),
        "seconds": mean("seconds"),
    }


def _pairwise_numbers(plan: ScoredPlan, labels: Sequence[Hashable]) -> dict[str, float]:
    """Return the measures of a pair from its two verdicts: consistency, and 1 (-1) if both name the second (first).

    Both are NaN if a verdict is missing or unreadable, and for questions that are not pairwise.
    """
    unreadable = consistency = fairness = float("nan")
    if plan.question.pairwise and labels:
        unreadable = sum(label == UNREADABLE for label in labels) / len(labels)
        if not unreadable and len(labels) == 2:
            # The orders of a pair are (0, 1) and (1, 0), and a label is the index of a segment as given.
            preferences: dict[tuple[Hashable, ...], float] = {(0, 1): -1.0, (1, 0): 1.0}
            consistency, fairness = float(labels[0] == labels[1]), preferences.get(tuple(labels), 0.0)
    return {"unreadable": unreadable, "position_consistency": consistency, "preference_fairness": fairness}
