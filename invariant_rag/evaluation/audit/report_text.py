"""Texts and tables that every form of a report shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invariant_rag.evaluation.audit.answer_metrics import meaning_of
from invariant_rag.evaluation.audit.measures import ABOUT, COSTS, RemedyMeasures
from invariant_rag.shown import counted

if TYPE_CHECKING:
    from invariant_rag.evaluation.audit.result import Audit

TITLE = "Does the order of the documents matter?"

CAPTIONS = {
    "slots": "Accuracy by the slot of the gold document, with 95% intervals. First: the slot in the input, which "
    "matters only to a system that keeps the order of its input. Then: the slot in salted canonical orders. A method "
    "that sorts is flat in the first, and a fair one in the second as well.",
    "flips": "Each question's probability that two random orders have different outcomes.",
    "cost": "Seconds per answer against accuracy in the order that the retriever gives: what users get today, and with "
    "each remedy. Without gold answers, against the questions that never flip.",
}

NOTES = (
    (
        "Users get one order: the one that the retriever gives. A remedy is worth something if it gives more right "
        "answers than that, or the same ones however the documents come in. What other orders would give is a risk, "
        "not what users get."
    ),
    (
        "An outcome is right or wrong where gold answers are known. Other words are no other outcome; how often the "
        "wording changes is shown apart."
    ),
    (
        "Invariant and fair are two things. Sorting makes every input order the same call, so nothing flips; but the "
        "gold document still lands in some slot, and accuracy may depend on which. Only the salted measures show that. "
        "Where there are none, fairness is unknown."
    ),
    (
        "Salted canonical orders sort the documents by a hash of salt and content. A black-box system may re-sort its "
        "input: prefixing each document with its salted hash moves it even then."
    ),
    (
        "Studies disagree on how much order matters: with real retrievers its effect on mean accuracy can be marginal "
        "(arXiv 2505.15561), while single answers change often (arXiv 2601.02993). This report is about these "
        "questions and this system only."
    ),
    (
        "Shares have Wilson intervals, differences those of paired questions. Tests of the order shuffle answers "
        "within each question; tests of remedies flip signs, and are corrected for the number of remedies (Holm)."
    ),
)


def opening(audit: Audit) -> list[tuple[str, str]]:
    """Return what a report begins with: whether the order matters, what users get today, and what to do."""
    today = audit.advice.sections[0][1][0]
    return [("Finding", audit.advice.verdict), ("Today", today), ("Recommendation", audit.advice.headline)]


def table(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Return the names of the remedies, and a row of cells for every measure that one of them has."""
    rows = []
    for name in ABOUT:
        cells = [_cell(each, name) for each in audit.measured]
        if any(cells):
            rows.append([name.replace("_", " "), *cells])
    return [each.name for each in audit.measured], rows


def differences(audit: Audit) -> list[list[str]]:
    """Return the rows of paired differences from the system as it is; that of `today` is what a remedy gives."""
    rows = []
    for name in ("today", "worst", "flip_rate", "sensitivity", "psr", "wording_rate", "salted_worst"):
        estimates = [each.versus.get(name) for each in audit.measured[1:]]
        if any(estimates):
            cells = (f"{e.value:+.3f} [{e.low:+.3f}, {e.high:+.3f}]" if e else "" for e in estimates)
            rows.append([name.replace("_", " "), *cells])
    return rows


def summary(audit: Audit) -> str:
    """Return a sentence or two on how much was asked."""
    of = "" if audit.complete == audit.questions else f"{audit.complete:,} of "
    text = (
        f"{of}{counted(audit.questions, 'question')} asked, with {counted(audit.calls, 'different call')}; "
        f"{_right(audit)}seed {audit.design.seed}."
    )
    text += "".join(f" {each}" for each in (str(audit.reused), audit.failures.describe(audit.complete)) if each)
    if audit.unasked:
        left = counted(audit.questions - audit.complete, "question")
        text += (
            f" The budget left {counted(audit.unasked, 'call')} unasked: {left} not in these numbers. Start the audit "
            "again to go on."
        )
    if audit.out_of_slots:
        text += (
            f" Not in the accuracy by slot: {counted(audit.out_of_slots, 'question')} without a gold document, or with "
            f"too few documents for {audit.design.slots} slots."
        )
    return text


def _right(audit: Audit) -> str:
    """Return which answers are right, with "; " behind it; "" if no gold answer is known."""
    known = [each.question for each in audit.asked if each.question.has_gold]
    if not known:
        return ""
    if all(each.pairwise for each in known):
        return "a verdict is right if it names the better response; "
    return f"an answer is right if {meaning_of(audit.metric)}; "


def _cell(measured: RemedyMeasures, name: str) -> str:
    estimate = measured.measures.get(name)
    if estimate is None:
        return ""
    digits = 1 if name in COSTS[:2] else 3
    value, low, high = (f"{each:.{digits}f}" for each in (estimate.value, estimate.low, estimate.high))
    return value if low == high == value else f"{value} [{low}, {high}]"
