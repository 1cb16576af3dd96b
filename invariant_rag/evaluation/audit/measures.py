"""Measures of an audit: how often answers change, accuracy in the worst and the best order, fairness and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from invariant_rag.evaluation.audit.answer_store import StoredAnswer
from invariant_rag.evaluation.audit.call_plan import CallGroup, CallPlan
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.remedies import Remedy
from invariant_rag.evaluation.audit.verdicts import parse_verdict
from invariant_rag.evaluation.statistics import Estimate, PairedBootstrap, chance_spread, percentile_interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNREADABLE = "unreadable"
"""Label of a verdict that names neither response. An empty verdict is a tie, with the label None."""

Metric = Callable[[str, Sequence[str]], float]
Label = Callable[[str], Hashable]

ABOUT = {
    "flip_rate": "share of questions of which some order (or repeat) changes the answer",
    "sensitivity": "permutation sensitivity: probability that two different orders give different answers",
    "noise": "probability that two calls in the same order give different answers",
    "net_sensitivity": "sensitivity less noise: what the order alone changes",
    "psr": "share of questions with one answer in all orders (120) of the first five segments (arXiv 2601.02993)",
    "accuracy": "mean accuracy over orders",
    "worst": "worst case: accuracy where each question is asked in its worst order",
    "best": "best case: accuracy where each question is asked in its best order",
    "slot_spread": "largest less smallest accuracy over the slots of the gold segments in the input",
    "slot_std": "standard deviation of accuracy over these slots",
    "salted_accuracy": "mean accuracy over salted canonical orders",
    "salted_worst": "accuracy where each question is asked in its worst salted order",
    "salted_sensitivity": "probability that two salted orders give different answers",
    "salted_spread": "largest less smallest accuracy over the slots of the gold segments in salted canonical orders",
    "salted_std": "standard deviation of accuracy over these slots",
    "expected_accuracy": "expected accuracy: over salts if the remedy uses a canonical order, else over input orders",
    "unreadable": "share of verdicts that name neither response, empty ones aside",
    "position_consistency": "share of (readable) pairs with the same verdict in both orders (arXiv 2406.07791)",
    "preference_fairness": "1: every pair goes to whatever comes second; -1: to whatever comes first; 0: fair",
    "calls": "calls per answer",
    "tokens": "prompt and completion tokens per answer",
    "seconds": "seconds per answer, one call after the other",
}
"""The measures, and what each means."""


@dataclass(frozen=True)
class RemedyMeasures:
    """The measures of the system with one remedy, or as it is.

    Attributes:
        name: Name of the remedy.
        measures: Estimates by the names in `ABOUT`, without those that need gold answers, pairs or slots where the
            questions have none.
        versus: Paired differences from the system as it is, by the same names; empty for the system as it is.
        slots: Accuracy by slot of the gold segments in the input.
        salts: Accuracy by slot of the gold segments in salted canonical orders.
        slot_chance: Spread over `slots` that chance alone stays below 19 times out of 20.
        salt_chance: The same for `salts`.
        per_question: Sensitivity of each question, in the order of the questions.
        expected: Expected accuracy and its resamples, `[1 + B]` as of `PairedBootstrap`, for paired differences.
    """

    name: str
    measures: Mapping[str, Estimate]
    versus: Mapping[str, Estimate]
    slots: tuple[Estimate, ...]
    salts: tuple[Estimate, ...]
    slot_chance: float | None
    salt_chance: float | None
    per_question: tuple[float, ...]
    expected: NDArray[np.float64] | None = field(repr=False, compare=False)


@dataclass
class QuestionScores:
    """Scores per question with one remedy.

    Attributes:
        numbers: Measures `[Q]` by name.
        slots: Accuracy `[Q, slots]` by slot in the input.
        salts: Accuracy `[Q, slots]` by slot in salted canonical orders.
    """

    numbers: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    slots: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    salts: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))


@dataclass(frozen=True)
class MajorityAnswer:
    """The most frequent answer of a group of calls.

    Attributes:
        label: What it shares with answers that count as the same.
        correct: Its accuracy; NaN without gold answers.
        calls: Number of calls.
        tokens: Tokens of all calls; NaN if unknown.
        seconds: Duration of all calls, one after the other.
    """

    label: Hashable
    correct: float
    calls: int
    tokens: float
    seconds: float


class AnswerParser:
    """Parses and scores stored answers.

    Args:
        answers: Stored answers by key.
        metric: Compares an answer with the gold answers.
        label: What two answers must share to count as the same.
    """

    def __init__(self, answers: Mapping[str, StoredAnswer], metric: Metric, label: Label) -> None:
        self._answers, self._metric, self._label = answers, metric, label

    def majority(self, group: CallGroup) -> MajorityAnswer:
        """Return the most frequent answer to a group of calls; of equally frequent ones, the first."""
        answers = [self._answers[call.key] for call in group]
        texts = [call.spec.without_tags(answer.text) for call, answer in zip(group, answers, strict=True)]
        question = group[0].question
        labels = [self._label_of(call.spec.order, question, text) for call, text in zip(group, texts, strict=True)]
        winner = Counter(labels).most_common(1)[0][0]
        correct = self._correct(question, winner, texts[labels.index(winner)])
        tokens = [float("nan") if answer.tokens is None else answer.tokens for answer in answers]
        return MajorityAnswer(winner, correct, len(group), sum(tokens), sum(answer.seconds for answer in answers))

    def _label_of(self, order: Sequence[int], question: Question, text: str) -> Hashable:
        if not question.pairwise:
            return self._label(text)
        position = parse_verdict(text, [question.segments[index] for index in order])
        if position is None:
            return UNREADABLE if text.strip() else None
        return order[position]

    def _correct(self, question: Question, label: Hashable, text: str) -> float:
        if not question.has_gold:
            return float("nan")
        return float(label in question.gold) if question.pairwise else self._metric(text, question.answers)

    def score(self, plans: Sequence[CallPlan], slots: int) -> QuestionScores:
        """Score the answers with one remedy.

        Args:
            plans: The calls, one plan per question.
            slots: Number of gold slots.
        """
        rows: list[dict[str, float]] = []
        by_slot, by_salt = (np.full((len(plans), slots), np.nan) for _ in range(2))
        for index, plan in enumerate(plans):
            orders, moved, salted, repeats, top = (
                [self.majority(group) for group in groups]
                for groups in (plan.orders, plan.slots, plan.salts, plan.repeats, plan.top)
            )
            rows.append(_numbers(plan, orders, salted, repeats, top))
            if moved:  # the question has room for the slots
                by_slot[index] = [each.correct for each in moved]
                by_salt[index] = [each.correct for each in salted] or np.nan
        numbers = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        return QuestionScores(numbers, by_slot, by_salt)


def _numbers(
    plan: CallPlan,
    orders: list[MajorityAnswer],
    salted: list[MajorityAnswer],
    repeats: list[MajorityAnswer],
    top: list[MajorityAnswer],
) -> dict[str, float]:
    """Return the measures of one question by name; NaN for those that it has no answers for."""
    labels, again = [each.label for each in orders], [each.label for each in repeats]
    correct, salts = [each.correct for each in orders], [each.correct for each in salted]
    sensitivity, noise = _disagreement(labels), _disagreement(again)
    none = float("nan")
    return {
        "flip_rate": float(len({*labels, *again}) > 1),
        "sensitivity": sensitivity,
        "noise": noise,
        "net_sensitivity": sensitivity - noise,
        "psr": float(len({each.label for each in top}) == 1) if top else none,
        "accuracy": float(np.mean(correct)),
        "worst": min(correct),
        "best": max(correct),
        "salted_accuracy": float(np.mean(salts)) if salts else none,
        "salted_worst": min(salts) if salts else none,
        "salted_sensitivity": _disagreement([each.label for each in salted]) if salted else none,
        **_pairwise_numbers(plan, labels),
        "calls": float(np.mean([each.calls for each in orders])),
        "tokens": float(np.mean([each.tokens for each in orders])),
        "seconds": float(np.mean([each.seconds for each in orders])),
    }


def _disagreement(labels: Sequence[Hashable]) -> float:
    """Return the probability that two of the answers, drawn without replacement, differ; 0 for a single one."""
    count = len(labels)
    if count < 2:
        return 0.0
    same = sum(each * (each - 1) for each in Counter(labels).values())
    return 1.0 - same / (count * (count - 1))


def _pairwise_numbers(plan: CallPlan, labels: Sequence[Hashable]) -> dict[str, float]:
    """Return the measures of a pair from its two verdicts: consistency, and 1 (-1) if both name the second (first).

    Both are NaN if a verdict is unreadable, and for questions that are not pairwise.
    """
    unreadable = sum(label == UNREADABLE for label in labels) / len(labels)
    consistency = fairness = float("nan")
    if not plan.orders[0][0].question.pairwise:
        unreadable = float("nan")
    elif not unreadable:
        # The orders of a pair are (0, 1) and (1, 0), and a label is the index of a segment as given.
        preferences: dict[tuple[Hashable, ...], float] = {(0, 1): -1.0, (1, 0): 1.0}
        consistency, fairness = float(labels[0] == labels[1]), preferences.get(tuple(labels), 0.0)
    return {"unreadable": unreadable, "position_consistency": consistency, "preference_fairness": fairness}


def measure(remedies: Sequence[Remedy], scores: Sequence[QuestionScores], seed: int) -> list[RemedyMeasures]:
    """Return the measures of every remedy, with intervals and with paired differences from the first.

    Args:
        remedies: The remedies; the first is the system as it is.
        scores: The scores with each of them.
        seed: Seed of resamples and shuffles.
    """
    bootstrap = PairedBootstrap(len(scores[0].numbers["flip_rate"]), seed=seed)
    resampled = [_resampled(bootstrap, remedy, each) for remedy, each in zip(remedies, scores, strict=True)]
    measured = []
    for remedy, each, statistics in zip(remedies, scores, resampled, strict=True):
        versus = (
            {}
            if statistics is resampled[0]
            else {
                name: percentile_interval(values - resampled[0][name])
                for name, values in statistics.items()
                if name in resampled[0]
            }
        )
        measured.append(
            RemedyMeasures(
                name=remedy.name,
                measures={name: percentile_interval(values) for name, values in statistics.items()},
                versus=versus,
                slots=_by_slot(bootstrap, each.slots),
                salts=_by_slot(bootstrap, each.salts),
                slot_chance=chance_spread(each.slots, seed),
                salt_chance=chance_spread(each.salts, seed),
                per_question=tuple(each.numbers["sensitivity"].tolist()),
                expected=statistics.get("expected_accuracy"),
            )
        )
    return measured


def _resampled(bootstrap: PairedBootstrap, remedy: Remedy, scores: QuestionScores) -> dict[str, NDArray[np.float64]]:
    """Return `[1 + B]` of every measure that at least one question has a number for."""
    numbers = {**scores.numbers}
    numbers["expected_accuracy"] = numbers["salted_accuracy" if remedy.canonical else "accuracy"]
    if remedy.fixes_order:
        del numbers["net_sensitivity"]  # its orders are repeats: there is nothing to subtract
    found = {name: bootstrap.means(values) for name, values in numbers.items() if np.isfinite(values).any()}
    for kind, slots in (("slot", scores.slots), ("salted", scores.salts)):
        if np.isfinite(slots).any():
            found[f"{kind}_spread"], found[f"{kind}_std"] = bootstrap.spread(slots), bootstrap.deviation(slots)
    return {name: found[name] for name in ABOUT if name in found}


def _by_slot(bootstrap: PairedBootstrap, slots: NDArray[np.float64]) -> tuple[Estimate, ...]:
    if not np.isfinite(slots).any():
        return ()
    return tuple(percentile_interval(column) for column in bootstrap.means(slots).T)
