"""The audit: a screen that says whether the order matters, then remedies against today where it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from invariant_rag.audit.calling import Answer, make_calls
from invariant_rag.audit.choices import AuditChoices
from invariant_rag.audit.folder import AnswerFile, read_run, start_run
from invariant_rag.audit.grading import AnswerEmbedder, Grader, build_judge, resolve_metric
from invariant_rag.audit.plan import (
    DRAWS,
    TODAY,
    Call,
    Remedy,
    asking_order,
    build_remedies,
    check_remedies,
    choose_remedies,
    has_orders,
    screen_calls,
)
from invariant_rag.audit.progress import Progress, no_progress
from invariant_rag.audit.questions import Question, as_retrieve_function, read_questions
from invariant_rag.audit.result import Asked, Audit, Drawn, package_versions, slot_accuracies
from invariant_rag.audit.screen import CALLS, FIRST, PLACEBO, Screen, looks, screen
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
        questions: A file, a folder, or `Question`s and mappings; see `read_questions` in
            `invariant_rag.audit.questions`. None: those of the run that is resumed.
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
        UnknownName: There is no remedy or metric of that name.

    Warns:
        FieldWarning: Questions have checks that take a judge, and there is none; or as `parse_questions` does.
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
    judge = build_judge(chosen.judge, asked)
    unscored = judge is None and not all(each.answers for each in asked)
    grader = Grader(resolve_metric(chosen.metric)[0], judge, AnswerEmbedder() if unscored else None)
    grader.check(asked)
    if out is not None:
        described = {"system": called, "seed": chosen.seed, "margin": chosen.margin, "versions": package_versions()}
        folder = start_run(out, described, asked)
    store = AnswerFile(folder)
    try:
        running = _Running(wrapped, asked, chosen, grader, store, progress, on_step)
        screened = running.screen()
        remedies, drawn = running.compare(screened)
    finally:
        store.close()
    result = Audit(
        system=called,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        choices=chosen,
        screen=screened,
        asked=tuple(running.asked),
        remedies=tuple(remedies),
        drawn=tuple(drawn),
        planned=len(running.order),
        unordered=len(asked) - len(running.order),
        judge=None if judge is None else judge.record,
        embeds=grader.embedder is not None and grader.embedder.works,
    )
    if folder is not None:
        from invariant_rag.audit.report import write_report

        write_report(result, folder)
    return result


def check_extras() -> None:
    """Check that the packages are installed that an audit needs, before a model is loaded or a system is asked."""
    for module in ("scipy", "tenacity", "jinja2", "pandas"):
        require_extra(module, "evaluation")


@dataclass
class _Running:
    """The steps of an audit: asks, grades, decides.

    Attributes:
        order: Numbers of the questions that have two orders, in the order in which they are asked.
        asked: What was asked, with the outcomes.
    """

    _system: System
    _questions: Sequence[Question]
    _choices: AuditChoices
    _grader: Grader
    _store: AnswerFile
    _progress: Progress
    _on_step: Callable[[str], object]

    def __post_init__(self) -> None:
        self._calls_left = self._choices.max_calls
        every = asking_order(len(self._questions), self._choices.seed)
        self.order = [number for number in every if has_orders(self._questions[number])]
        self.asked: list[Asked] = []
        if not self.order:
            raise InvalidQuestion(
                f"{counted(len(self._questions), 'question')}, and none has two different documents: there is no order",
                hint="Give each question its retrieved documents one by one.",
            )

    def screen(self) -> Screen:
        """Ask in steps until the order matters, does not matter, or all was asked."""
        planned, found = len(self.order), None
        for count in looks(planned):
            step = self.order[len(self.asked) : count]
            self._on_step(
                f"Step: {counted(len(step), 'question')}, at most {counted(CALLS * len(step), 'call')}, in today's "
                "order and two others."
            )
            calls = {n: screen_calls(self._questions[n], n, self.order.index(n), self._choices.seed) for n in step}
            answers = self._ask([call for n in step for call in calls[n]], self._system.ask)
            for n in step:
                if all(call.key in answers for call in calls[n]):
                    self.asked.append(self._grade(n, calls[n], answers))
            if not self.asked:
                break
            classes = np.array([each.classes for each in self.asked], dtype=np.int64)
            two = [len(each.question.segments) == 2 for each in self.asked]
            found = screen(classes, two, self._choices.margin, planned)
            self._on_step(f"After {counted(found.asked, 'question')}: {found.outcome}.")
            if found.outcome != "cannot tell yet" or len(self.asked) < count:
                break
        if found is None:
            raise AuditFailed(
                "no question is complete", hint="Raise max_calls (--max-calls): a question takes 5 calls."
            )
        self._check_use(found)
        return found

    def compare(self, found: Screen) -> tuple[list[Remedy], list[Drawn]]:
        """Ask all planned questions with remedies and as today, if the order matters or remedies were asked for."""
        names = self._choices.remedies
        scored = [each for each in self.asked if each.scored]
        if names is None:
            if found.outcome != "order matters" or not scored:
                return [], []
            slots = [None if each is None else each.value for each in slot_accuracies(scored)]
            names = tuple(choose_remedies(self._system, slots, [each.question for each in scored]))
        remedies = build_remedies(names, self._system)
        if not remedies:
            return [], []
        self._on_step(
            f"{', '.join(each.name for each in remedies)} against today: {counted(len(self.order), 'question')}, "
            f"{DRAWS} calls each."
        )
        arms: dict[str, dict[int, list[Call]]] = {TODAY: {}}
        for place, n in enumerate(self.order):
            calls = screen_calls(self._questions[n], n, place, self._choices.seed)
            arms[TODAY][n] = [calls[FIRST], calls[PLACEBO]]
        for each in remedies:
            arms[each.name] = {n: each.calls(self._questions[n], n) for n in self.order}
        asks = {TODAY: self._system.ask} | {each.name: each.ask for each in remedies}
        for name, planned in arms.items():
            self._ask([call for each in planned.values() for call in each], asks[name])
        drawn = []
        for n in self.order:
            draws = {name: self._settle(self._questions[n], planned[n]) for name, planned in arms.items()}
            scores = self._grader.is_scored(self._questions[n])
            drawn.append(Drawn(n, scores, {name: each for name, each in draws.items() if each is not None}))
        return remedies, drawn

    def _settle(self, question: Question, calls: Sequence[Call]) -> list[int] | None:
        """Return the class of each draw: of several votes, the most frequent, the first of equals. None: not asked."""
        answers = self._store.answers
        if not all(call.key in answers for call in calls):
            return None
        classes = self._grader.classes(question, [answers[call.key].text for call in calls])
        draws: dict[int, list[int]] = {}
        for call, each in zip(calls, classes, strict=True):
            draws.setdefault(call.draw, []).append(each)
        return [max(votes, key=votes.count) for votes in draws.values()]

    def _grade(self, index: int, calls: Sequence[Call], answers: Mapping[str, Answer]) -> Asked:
        question = self._questions[index]
        given = [answers[call.key] for call in calls]
        classes = self._grader.classes(question, [each.text for each in given])
        return Asked(index, question, [call.order for call in calls], given, classes, self._grader.is_scored(question))

    def _ask(self, calls: Sequence[Call], ask: Ask) -> Mapping[str, Answer]:
        """Make the calls that have no answer, as far as `max_calls` goes, and return all answers."""
        missing = [call for call in calls if call.key not in self._store.answers]
        if self._calls_left is not None:
            missing = missing[: self._calls_left]
            self._calls_left -= len(missing)

        def bound(call: Call) -> Callable[[], Any]:
            return lambda: ask(self._questions[call.index], call.segments)

        if missing:
            with self._progress("Asking", len(missing)) as advance:

                def keep(answer: Answer) -> None:
                    self._store.add(answer)
                    advance()

                known = any(each.text is not None for each in self._store.answers.values())
                pairs = [(call.key, bound(call)) for call in missing]
                make_calls(pairs, keep, answers_before=known, **self._choices.calling)
        return self._store.answers

    def _check_use(self, found: Screen) -> None:
        """Refuse a chain whose answers do not change with the order, nor with other texts: it retrieves by itself.

        Equal answers to all questions prove nothing: "I don't know" may be right for both texts.
        """
        probed = self.asked[:PROBED]
        before = [each.answers[0].text for each in probed]
        if not self._system.may_retrieve or found.between or len(set(before)) < 2 or None in before:
            return
        calls = []
        for each in probed:
            blank = tuple(Segment(f"Page {number} is left blank.") for number in range(len(each.question.segments)))
            calls.append(Call(each.index, "other texts", 0, (), blank))
        answers = self._ask(calls, self._system.ask)
        if [answers[call.key].text for call in calls if call.key in answers] == before:
            raise AuditFailed(
                "the system does not read the documents it is given: with other texts in them it answers the same",
                hint="Of a chain that retrieves, give the part behind the retriever; or say with to_input= what it is "
                "called with.",
            )
