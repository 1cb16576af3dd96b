"""The audit: a screen that says whether the order matters, then remedies against today where it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from invariant_rag.audit.calling import Answer, Progress, make_calls, no_progress
from invariant_rag.audit.choices import AuditChoices
from invariant_rag.audit.folder import AnswerFile, read_run, start_run
from invariant_rag.audit.grading import RIGHT, Grader
from invariant_rag.audit.plan import (
    DRAWS,
    TODAY,
    Call,
    asking_order,
    build_remedies,
    check_remedies,
    choose_remedies,
    has_orders,
    screen_calls,
)
from invariant_rag.audit.questions import Question, as_retrieve_function, read_questions
from invariant_rag.audit.result import Asked, Audit, Comparison, package_versions, slot_accuracies
from invariant_rag.audit.screen import CALLS, FIRST, PLACEBO, Screen, looks, screen
from invariant_rag.audit.statistics import holm, mean_difference, mean_interval, paired_p_value
from invariant_rag.audit.systems import Ask, System, ToInput, as_system
from invariant_rag.checks import require_extra
from invariant_rag.errors import AuditFailed, InvalidChoice, InvalidQuestion, UnsupportedCombination
from invariant_rag.segments import Segment
from invariant_rag.shown import counted

Questions = str | Path | Iterable[Question | Mapping[str, Any]]

PROBED = 3
"""Questions that are asked with other texts, if no order ever changes an answer: does the system read its documents?"""


def audit(
    system: Any,
    questions: Questions | None = None,
    choices: AuditChoices | None = None,
    *,
    retriever: Any = None,
    to_input: ToInput | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    name: str | None = None,
    progress: Progress = no_progress,
    on_step: Callable[[str], object] = lambda _: None,
    **changes: Any,
) -> Audit:
    """Find out whether the order of its documents matters to a system and, where it does, what helps.

    The screen asks each question five times: in the order that the retriever gives, again, with a placebo, and in two
    other orders. It stops as soon as it is clear that the order matters, or that it does not. Then remedies are
    compared with today, on the same questions. See `docs/explanation/audit.md`.

    Args:
        system: Anything that answers questions; see `invariant_rag.audit.systems.as_system`.
        questions: A file, or `Question`s and mappings; see `read_questions` in `invariant_rag.audit.questions`. None:
            those of the run that is resumed.
        choices: How the audit is made.
        retriever: Finds the segments of questions that have none: an object with `retrieve(question, k)`, a retriever
            of LangChain or LlamaIndex, or a function of the question. None: the system's own, if it has one.
        to_input: Makes the input of the system from question and segments.
        out: New folder for the answers and the report. None: nothing is written.
        resume: Folder of a run to continue: the same questions, orders, margin and name; what was answered is not asked
            again. You vouch that the system is the same.
        name: Name of the system in reports.
        progress: Shows a progress bar.
        on_step: Called with a sentence before and after each step: what it costs, and what is known.
        changes: Choices, as keywords: `audit(system, questions, workers=8)`.

    Raises:
        InvalidQuestion: A question cannot be read.
        InvalidChoice: A choice is no such number or function, or too small.
        UnusableFile: The folder cannot be written, holds a run already, or another process writes it.
        AuditFailed: The system answers nothing or does not read its documents, or there is nothing to compare.
        UnsupportedCombination: The system is none of those, or a remedy does not apply to it.
        ExtraRequired: The extra `evaluation` is not installed.
        UnknownName: There is no remedy of that name.

    Warns:
        FieldWarning: Questions have checks that take a judge, and there is none; or fields that mean nothing.
    """
    check_extras()
    chosen = (choices or AuditChoices()).changed(changes)
    if (questions is None) == (resume is None) or (out is not None and resume is not None):
        raise InvalidChoice("expected questions for a new audit (and out, to keep it), or resume, to continue one")
    wrapped = as_system(system, to_input, chosen.generation)
    check_remedies(chosen.remedies, wrapped)
    called = wrapped.name if name is None else name
    folder: Path | None = None
    if resume is not None:
        folder, run, asked = read_run(resume)
        if called != run["system"]:
            raise UnsupportedCombination(
                f"{str(folder)!r} is an audit of {run['system']!r}, and this is {called!r}",
                hint=f"To continue it, pass name={run['system']!r} (--name); to audit another system, a new folder.",
            )
        chosen = chosen.changed({"seed": run["seed"], "margin": run["margin"]})
    else:
        retrieve = wrapped.retrieve if retriever is None else as_retrieve_function(retriever, chosen.k)
        asked = read_questions(() if questions is None else questions, retrieve, chosen.fields)
    ordered = [number for number in asking_order(len(asked), chosen.seed) if has_orders(asked[number])]
    if not ordered:
        raise InvalidQuestion(
            f"{counted(len(asked), 'question')}, and none has two different documents: there is no order",
            hint="Give each question its retrieved documents one by one.",
        )
    grader = Grader(asked, chosen.metric, chosen.judge)
    if out is not None:
        described = {"system": called, "seed": chosen.seed, "margin": chosen.margin, "versions": package_versions()}
        folder = start_run(out, described, asked)
    store = AnswerFile(folder)
    try:
        running = _Running(wrapped, [(n, asked[n]) for n in ordered], chosen, grader, store, progress, on_step)
        screened = running.screen()
        compared = running.compare(screened)
    finally:
        store.close()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    calls, unordered = len(store.answers), len(asked) - len(ordered)
    facts = (calls, len(ordered), unordered, grader.judge, grader.embeds)
    result = Audit(called, date, chosen, screened, tuple(running.asked), tuple(compared), *facts)
    if folder is not None:
        from invariant_rag.audit.report import write_report

        write_report(result, folder)
    return result


def check_extras() -> None:
    """Check that the packages are installed that an audit needs, before a model is loaded or a system is asked."""
    for module in ("scipy", "tenacity", "jinja2", "pandas"):
        require_extra(module, "evaluation")


class _Running:
    """The steps of an audit: asks, grades, decides. `asked` is what was asked so far, with the outcomes."""

    def __init__(
        self,
        system: System,
        questions: Sequence[tuple[int, Question]],
        choices: AuditChoices,
        grader: Grader,
        store: AnswerFile,
        progress: Progress,
        on_step: Callable[[str], object],
    ) -> None:
        self._system, self._choices, self._grader, self._store = system, choices, grader, store
        self._progress, self._on_step = progress, on_step
        self._questions = questions
        self._calls = [screen_calls(one, n, place, choices.seed) for place, (n, one) in enumerate(questions)]
        self.asked: list[Asked] = []

    def screen(self) -> Screen:
        """Ask in steps until the order matters, does not matter, or all was asked."""
        for count in looks(len(self._calls)):
            step = self._calls[len(self.asked) : count]
            self._on_step(
                f"Step: {counted(len(step), 'question')}, at most {counted(CALLS * len(step), 'call')}, in today's "
                "order and two others."
            )
            answers = self._ask([call for calls in step for call in calls], self._system.ask)
            for calls in step:
                question, said = calls[0].question, [answers[call.key] for call in calls]
                classes = self._grader.classes(question, [each.text for each in said])
                scored = self._grader.is_scored(question)
                self.asked.append(Asked(question, [call.order for call in calls], said, classes, scored))
            table = np.array([each.classes for each in self.asked], dtype=np.int64)
            two = [len(each.question.segments) == 2 for each in self.asked]
            found = screen(table, two, self._choices.margin, len(self._calls))
            self._on_step(f"After {counted(found.asked, 'question')}: {found.outcome}.")
            if found.outcome != "cannot tell yet":
                break
        self._check_use(found)
        return found

    def compare(self, found: Screen) -> list[Comparison]:
        """Ask all planned questions with remedies and as today, if the order matters or remedies were asked for."""
        names = self._choices.remedies
        if names is None:
            asked = [each for each in self.asked if each.scored]
            if found.outcome != "order matters" or not asked:
                return []
            slots = [None if each is None else each.value for each in slot_accuracies(asked)]
            names = tuple(choose_remedies(self._system, slots, [each.question for each in asked]))
        remedies = build_remedies(names, self._system)
        if not remedies:
            return []
        self._on_step(
            f"{', '.join(each.name for each in remedies)} against today: {counted(len(self._calls), 'question')}, "
            f"{DRAWS} calls each."
        )
        arms = {TODAY: (self._system.ask, [[calls[FIRST], calls[PLACEBO]] for calls in self._calls])}
        for each in remedies:
            arms[each.name] = each.ask, [each.calls(question, n) for n, question in self._questions]
        scores = {}
        for name, (ask, planned) in arms.items():
            self._ask([call for calls in planned for call in calls], ask)
            scored = [calls for calls in planned if self._grader.is_scored(calls[0].question)]
            scores[name] = np.array([self._accuracy(calls) for calls in scored])
        today = scores[TODAY]
        described = [Comparison(each.name, each.about, each.fixes, each.votes) for each in remedies]
        if not len(today):
            return described
        p = holm({each.name: paired_p_value(scores[each.name] - today) for each in remedies})
        return [
            replace(each, accuracy=mean_interval(ours), gain=mean_difference(ours, today), p=p[each.name])
            for each in described
            for ours in [scores[each.name]]
        ]

    def _accuracy(self, calls: Sequence[Call]) -> float:
        """Return the share of right draws; of several votes of a draw the most frequent counts, the first of equals."""
        said = [self._store.answers[call.key].text for call in calls]
        draws: dict[int, list[int]] = {}
        for call, each in zip(calls, self._grader.classes(calls[0].question, said), strict=True):
            draws.setdefault(call.draw, []).append(each)
        return float(np.mean([max(votes, key=votes.count) == RIGHT for votes in draws.values()]))

    def _ask(self, calls: Sequence[Call], ask: Ask) -> Mapping[str, Answer]:
        """Make the calls that have no answer, and return all answers."""
        known = self._store.answers

        def bound(call: Call) -> Callable[[], Any]:
            return lambda: ask(call.question, call.segments)

        missing = [(call.key, bound(call)) for call in calls if call.key not in known]
        if missing:
            answered = any(each.text is not None for each in known.values())
            with self._progress("Asking", len(missing)) as advance:

                def keep(answer: Answer) -> None:
                    self._store.add(answer)
                    advance()

                patience = {"retries": self._choices.retries, "workers": self._choices.workers}
                make_calls(missing, keep, answered=answered, **patience)
        return known

    def _check_use(self, found: Screen) -> None:
        """Refuse a chain whose answers do not change with the order, nor with other texts: it retrieves by itself.

        Equal answers to all questions prove nothing: "I don't know" may be right for both texts.
        """
        probed = self.asked[:PROBED]
        before = [each.answers[0].text for each in probed]
        if not self._system.may_retrieve or found.between or len(set(before)) < 2 or None in before:
            return
        calls = []
        for (n, question), each in zip(self._questions, probed, strict=False):
            blank = tuple(Segment(f"Page {number} is left blank.") for number in range(len(question.segments)))
            calls.append(Call(replace(question, segments=blank), n, "other texts", 0, each.orders[FIRST]))
        answers = self._ask(calls, self._system.ask)
        if [answers[call.key].text for call in calls] == before:
            raise AuditFailed(
                "the system does not read the documents it is given: with other texts in them it answers the same",
                hint="Of a chain that retrieves, give the part behind the retriever; or say with to_input= what it is "
                "called with.",
            )
