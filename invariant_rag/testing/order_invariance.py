"""`assert_order_invariant`: a check of a system's own tests that the order of its documents changes no answer."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from invariant_rag.checks import check_number, check_real
from invariant_rag.errors import NoiseWarning
from invariant_rag.evaluation.audit.answer_metrics import resolve_metric
from invariant_rag.evaluation.audit.auditing import audit
from invariant_rag.evaluation.audit.preparing import Questions
from invariant_rag.evaluation.audit.result import AskedQuestion
from invariant_rag.evaluation.audit.scoring import Label, Metric
from invariant_rag.evaluation.metrics import normalise_answer
from invariant_rag.shown import counted

SHOWN = 5
"""Questions in the message of a failed assertion."""


def assert_order_invariant(
    system: Any,
    questions: Questions,
    orders: int = 10,
    *,
    allowed: float = 0.0,
    metric: str | Metric = "best_subspan_em",
    label: Label = normalise_answer,
    seed: int = 0,
    **options: Any,
) -> None:
    """Ask every question with its documents in several orders, and assert that no outcome changes.

    An outcome is right or wrong where gold answers are known; else it is the answer without case, punctuation and
    articles. Questions that flip are asked anew, in orders and as often in the order given, so that a system that
    answers at random is told from one that follows the order: if its answers change as much when nothing is moved, a
    warning says so, and nothing is asserted.

    >>> def first(question, segments):
    ...     return segments[0].text
    >>> asked = [{"question": "Who?", "segments": ["Ann did.", "Bo did."], "answers": ["Ann"]}]
    >>> assert_order_invariant(first, asked)
    Traceback (most recent call last):
        ...
    AssertionError: the order of the documents changes the outcome of 1 of 1 question; in one order, that of 0
    Who?: 2 x 'Ann did.' (right); 1 x 'Bo did.' (wrong)

    Args:
        system: Anything that an audit takes: a function `(question, segments) -> answer`, a Runnable, a URL...
        questions: Questions with their segments: a file, or mappings.
        orders: Orders of each question with more than four segments; of fewer, every order is asked.
        allowed: Share of questions that may flip.
        metric: Compares an answer with the gold answers.
        label: What two answers must share to count as the same, without gold answers.
        seed: Seed of the orders.
        options: Other arguments of `audit`, such as `workers`, `retries` or `retriever`.

    Raises:
        AssertionError: More questions flip, or a call failed.
        InvalidQuestion: A question cannot be read.

    Warns:
        NoiseWarning: Answers change, and nothing shows that it is the order.
    """
    check_number("orders", orders, 2)
    check_real("allowed", allowed)
    resolve_metric(metric)
    settings = {"remedies": [], "orders": orders, "repeats": 2, "slots": 2, "seed": seed, "tags": False}
    result = audit(system, questions, metric=metric, label=label, **{**settings, **options})
    if result.failed:
        raise AssertionError(f"{result.failed:,} of {counted(result.calls, 'call')} failed: {result.errors[0][0]}")
    flips = result.flips
    if len(flips) <= allowed * len(result.asked):
        return
    anew = {**settings, "repeats": orders, "seed": seed + 1, **options, "out": None, "retriever": None}
    again = audit(system, [each.question for each in flips], metric=metric, label=label, **anew)
    noisy = sum(_flips_in_place(each) for each in again.asked)
    found = f"{len(flips):,} of {counted(len(result.asked), 'question')}"
    if noisy and not again.effects.order.is_real:
        warnings.warn(
            NoiseWarning(
                f"the outcome of {found} changes, but in one order, that of {noisy} does as well: nothing shows that "
                f"the order does it (p = {again.effects.order.p:.3f})"
            ),
            stacklevel=2,
        )
        return
    first = f"the order of the documents changes the outcome of {found}; in one order, that of {noisy}"
    raise AssertionError("\n".join([first, *(_line(each) for each in flips[:SHOWN])]))


def _flips_in_place(asked: AskedQuestion) -> bool:
    given = [each for each in asked.answers if each.kind == "given"]
    return len({each.text if each.score is None else each.score for each in given}) > 1


def _line(asked: AskedQuestion) -> str:
    counts: Counter[tuple[str | None, float | None]] = Counter(
        (each.text, each.score) for each in _once_per_order(asked)
    )
    shown = (
        f"{count} x {text!r}" + ("" if score is None else " (right)" if score >= 0.5 else " (wrong)")
        for (text, score), count in counts.most_common()
    )
    return f"{asked.question.text}: {'; '.join(shown)}"


def _once_per_order(asked: AskedQuestion) -> Sequence[Any]:
    return [each for each in asked.answers if each.kind in {"given", "order"}]
