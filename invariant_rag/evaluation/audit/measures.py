"""What the answers say: how often they flip, how right they are at best and at worst, and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from invariant_rag.evaluation.audit.bootstrap import Bootstrap, Estimate, chance_spread, interval
from invariant_rag.evaluation.audit.plan import Answer, Plan
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.remedies import Variant
from invariant_rag.evaluation.audit.runner import Record
from invariant_rag.evaluation.audit.systems import read_pick

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNREADABLE = "unreadable"
"""Label of a verdict that names neither response. An empty one is a tie, and the label None."""

Metric = Callable[[str, Sequence[str]], float]
Label = Callable[[str], Hashable]

ABOUT = {
    "flip_rate": "share of questions of which some order (or repeat) changes the answer",
    "sensitivity": "permutation sensitivity: probability that two different orders give different answers",
    "noise": "probability that two calls in the same order give different answers",
    "net_sensitivity": "sensitivity less noise: what the order alone changes",
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
    "expected_accuracy": "accuracy to expect: over salts where a canonical order is read, else over input orders",
    "unreadable": "share of verdicts that name neither response, empty ones aside",
    "position_consistency": "share of (readable) pairs with the same verdict in both orders (arXiv 2406.07791)",
    "preference_fairness": "1: every pair goes to whatever comes second; -1: to whatever comes first; 0: fair",
    "calls": "calls per answer",
    "tokens": "tokens read and written per answer",
    "seconds": "seconds per answer, one call after the other",
}
"""What every measure means."""


@dataclass(frozen=True)
class Measured:
    """The measures of one way of asking.

    Attributes:
        name: What was measured.
        measures: By the names in `ABOUT`; those that the questions cannot tell are missing.
        versus: The same less that of the system as it is, on the same resamples; nothing for the system itself.
        slots: Accuracy by slot of the gold segments in the input.
        salts: Accuracy by their slot in salted canonical orders.
        slot_chance: Spread over `slots` that chance alone stays below 19 times out of 20.
        salt_chance: The same of `salts`.
        per_question: Sensitivity of each question, in the order of the questions.
        expected: Accuracy to expect, `[1 + resamples]`, the sample itself first; for paired differences.
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
class Seen:
    """Everything that one way of asking gave, one entry per question: numbers, and accuracies `[Q, slots]`."""

    numbers: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    slots: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    salts: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))


@dataclass(frozen=True)
class Settled:
    """One answer: what tells it from others, how right it is, and what it cost."""

    label: Hashable
    correct: float
    calls: int
    tokens: float
    seconds: float


class Reader:
    """Reads stored answers.

    Args:
        records: Answers by key.
        metric: Compares an answer with the gold answers.
        label: What two answers must share to count as the same.
    """

    def __init__(self, records: Mapping[str, Record], metric: Metric, label: Label) -> None:
        self._records, self._metric, self._label = records, metric, label

    def settle(self, answer: Answer) -> Settled:
        """Return the answer that most calls give; of equally many, the one that comes first."""
        records = [self._records[ask.key] for ask in answer]
        texts = [ask.call.cleaned(record.text) for ask, record in zip(answer, records, strict=True)]
        question = answer[0].question
        labels = [self._read(ask.call.order, question, text) for ask, text in zip(answer, texts, strict=True)]
        winner = Counter(labels).most_common(1)[0][0]
        correct = self._correct(question, winner, texts[labels.index(winner)])
        tokens = [float("nan") if record.tokens is None else record.tokens for record in records]
        return Settled(winner, correct, len(answer), sum(tokens), sum(record.seconds for record in records))

    def _read(self, order: Sequence[int], question: Question, text: str) -> Hashable:
        if not question.pairwise:
            return self._label(text)
        position = read_pick(text, [question.segments[index] for index in order])
        if position is None:
            return UNREADABLE if text.strip() else None
        return order[position]

    def _correct(self, question: Question, label: Hashable, text: str) -> float:
        if not question.judged:
            return float("nan")
        return float(label in question.gold) if question.pairwise else self._metric(text, question.answers)

    def see(self, plans: Sequence[Plan], slots: int) -> Seen:
        """Read everything that one way of asking gave."""
        rows: list[dict[str, float]] = []
        by_slot, by_salt = (np.full((len(plans), slots), np.nan) for _ in range(2))
        for index, plan in enumerate(plans):
            orders, moved, salted, repeats = (
                [self.settle(answer) for answer in answers]
                for answers in (plan.orders, plan.slots, plan.salts, plan.repeats)
            )
            rows.append(_numbers(plan, orders, salted, repeats))
            if moved:  # the question takes part
                by_slot[index] = [each.correct for each in moved]
                by_salt[index] = [each.correct for each in salted] or np.nan
        numbers = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        return Seen(numbers, by_slot, by_salt)


def _numbers(plan: Plan, orders: list[Settled], salted: list[Settled], repeats: list[Settled]) -> dict[str, float]:
    labels, again = [each.label for each in orders], [each.label for each in repeats]
    correct, salts = [each.correct for each in orders], [each.correct for each in salted]
    sensitivity, noise = _disagreement(labels), _disagreement(again)
    none = float("nan")
    return {
        "flip_rate": float(len({*labels, *again}) > 1),
        "sensitivity": sensitivity,
        "noise": noise,
        "net_sensitivity": sensitivity - noise,
        "accuracy": float(np.mean(correct)),
        "worst": min(correct),
        "best": max(correct),
        "salted_accuracy": float(np.mean(salts)) if salts else none,
        "salted_worst": min(salts) if salts else none,
        "salted_sensitivity": _disagreement([each.label for each in salted]) if salted else none,
        **_judging(plan, labels),
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


def _judging(plan: Plan, labels: Sequence[Hashable]) -> dict[str, float]:
    """Return what a pair's two verdicts say: whether they agree, and 1 or -1 where both name what came second or first.

    A pair of which a verdict cannot be read says neither.
    """
    unreadable = sum(label == UNREADABLE for label in labels) / len(labels)
    consistency = fairness = float("nan")
    if not plan.orders[0][0].question.pairwise:
        unreadable = float("nan")
    elif not unreadable:
        # The orders of a pair are (0, 1) and (1, 0): a pick of segment i is the i-th place in the first of them.
        places: dict[tuple[Hashable, ...], float] = {(0, 1): -1.0, (1, 0): 1.0}
        consistency, fairness = float(labels[0] == labels[1]), places.get(tuple(labels), 0.0)
    return {"unreadable": unreadable, "position_consistency": consistency, "preference_fairness": fairness}


def measure(variants: Sequence[Variant], seen: Sequence[Seen], seed: int) -> list[Measured]:
    """Return the measures of every way of asking, with paired intervals and differences from the first."""
    bootstrap = Bootstrap(len(seen[0].numbers["flip_rate"]), seed=seed)
    resampled = [_resampled(bootstrap, variant, each) for variant, each in zip(variants, seen, strict=True)]
    measured = []
    for variant, each, statistics in zip(variants, seen, resampled, strict=True):
        versus = (
            {}
            if statistics is resampled[0]
            else {
                name: interval(values - resampled[0][name])
                for name, values in statistics.items()
                if name in resampled[0]
            }
        )
        measured.append(
            Measured(
                name=variant.name,
                measures={name: interval(values) for name, values in statistics.items()},
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


def _resampled(bootstrap: Bootstrap, variant: Variant, seen: Seen) -> dict[str, NDArray[np.float64]]:
    """Return `[1 + B]` of every measure that some question tells."""
    numbers = {**seen.numbers}
    numbers["expected_accuracy"] = numbers["salted_accuracy" if variant.canonical else "accuracy"]
    if variant.collapses:
        del numbers["net_sensitivity"]  # its orders are repeats: there is nothing to subtract
    found = {name: bootstrap.means(values) for name, values in numbers.items() if np.isfinite(values).any()}
    for kind, slots in (("slot", seen.slots), ("salted", seen.salts)):
        if np.isfinite(slots).any():
            found[f"{kind}_spread"], found[f"{kind}_std"] = bootstrap.spread(slots), bootstrap.deviation(slots)
    return {name: found[name] for name in ABOUT if name in found}


def _by_slot(bootstrap: Bootstrap, slots: NDArray[np.float64]) -> tuple[Estimate, ...]:
    if not np.isfinite(slots).any():
        return ()
    return tuple(interval(column) for column in bootstrap.means(slots).T)
