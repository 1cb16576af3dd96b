"""The audit: a screen that says whether the order matters, then remedies against today where it does."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from invariant_rag.audit import plan
from invariant_rag.audit.calls import CallResult, Progress, make_calls, no_progress
from invariant_rag.audit.grading import RIGHT, Grader
from invariant_rag.audit.plan import DRAWS, TODAY, AuditCall, AuditChoices
from invariant_rag.audit.questions import Question, Questions, as_retrieve_function, read_questions
from invariant_rag.audit.report import write_report
from invariant_rag.audit.result import Asked, Audit, Comparison, package_versions, places_and_outcomes, slot_accuracies
from invariant_rag.audit.run_folder import RUN, SCHEMA_VERSION, make_new_folder, open_answers, read_run
from invariant_rag.audit.sequential_test import ANOTHER, CALLS, FIRST, OTHER, PLACEBO, Screen, looks, screen
from invariant_rag.audit.statistics import holm, mean_difference, mean_interval, paired_p_value
from invariant_rag.audit.systems import Ask, System, ToInput, as_system
from invariant_rag.checks import require_extra
from invariant_rag.errors import AuditFailed, InvalidChoice, InvalidQuestion, UnsupportedCombination
from invariant_rag.files import LineFile, encode_json, write_file
from invariant_rag.shown import counted, shortened

OnStep = Callable[[str], object]

PROBED = 3  # questions asked with other texts, if no order ever changes an outcome: does the system read its documents?
LONGEST_INPUT = 1000  # characters of what was sent that are shown


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
    on_step: OnStep = lambda _: None,
    **changes: Any,
) -> Audit:
    """Find out whether the order of its documents matters to a system and, where it does, what helps.

    The screen asks each question five times: in the order that the retriever gives, again, with a placebo, and in two
    other orders. It stops as soon as it is clear. Then remedies are compared with today, on the same questions.

    Args:
        system: Anything that answers questions; see `invariant_rag.audit.systems.as_system`.
        questions: A file, or `Question`s and mappings; see `read_questions` in `invariant_rag.audit.questions`. None:
            those of the run that is resumed.
        choices: How the audit is made.
        changes: Choices, as keywords: `audit(system, questions, workers=8)`.
        retriever: Finds the segments of questions that have none: an object with `retrieve(question, k)`, a retriever
            of LangChain or LlamaIndex, or a function of the question. None: the system's own, if it has one.
        to_input: Makes the input of the system from question and segments.
        out: New folder for the answers and the report. None: nothing is written.
        resume: Folder of a run to continue: the same questions, orders, margin and name; what was answered is not asked
            again. You vouch that the system is the same.
        name: Name of the system in reports.
        progress: Shows a progress bar.
        on_step: Called with a sentence before and after each step: what it costs, and what is known.

    Raises:
        InvalidQuestion: A question cannot be read, or none has an order.
        InvalidChoice, UnknownName: A choice is no such number or function, or there is no remedy of that name.
        UnusableFile: The folder cannot be written, holds a run already, or another process writes it.
        AuditFailed: The system answers nothing or does not read its documents, or the judge cannot judge.
        UnsupportedCombination: The system is none of those, or a remedy does not apply to it.

    Warns:
        FieldWarning: Questions have checks that take a judge, and there is none; or fields that mean nothing.
        ToyModelWarning: The server says that the embedded toy model answers.
    """
    check_extras()
    chosen = (choices or AuditChoices()).changed(changes)
    if (questions is None) == (resume is None) or (out is not None and resume is not None):
        raise InvalidChoice("expected questions for a new audit (and out, to keep it), or resume, to continue one")
    wrapped = as_system(system, to_input, chosen.generation)
    plan.build_remedies(chosen.remedies or (), wrapped)
    called = wrapped.name if name is None else name
    folder: Path | None = None
    if resume is not None:
        folder, run, asked = read_run(resume)
        if called != run["system"]:
            hint = f"To continue it, pass name={run['system']!r} (--name); to audit another system, a new folder."
            message = f"{str(folder)!r} is an audit of {run['system']!r}, and this is {called!r}"
            raise UnsupportedCombination(message, hint=hint)
        chosen = chosen.changed({"seed": run["seed"], "margin": run["margin"]})
    else:
        retrieve = wrapped.retrieve if retriever is None else as_retrieve_function(retriever, chosen.k)
        asked = read_questions(() if questions is None else questions, retrieve, chosen.fields)
    # A file is often sorted by topic, and an audit may stop early.
    mixed = random.Random(f"{chosen.seed} questions").sample(range(len(asked)), len(asked))
    ordered = [number for number in mixed if plan.has_orders(asked[number])]
    if not ordered:
        message = f"{counted(len(asked), 'question')}, and none has two different documents: there is no order"
        raise InvalidQuestion(message, hint="Give each question its retrieved documents one by one.")
    grader = Grader(asked, chosen.metric, chosen.judge)
    if out is not None:
        folder = make_new_folder(out)
        described = {"system": called, "seed": chosen.seed, "margin": chosen.margin, "versions": package_versions()}
        run = {"schema_version": SCHEMA_VERSION, **described, "questions": [each.as_dict() for each in asked]}
        write_file(folder / RUN, encode_json(run, indent=1, default=str) + b"\n")
    with nullcontext() if folder is None else open_answers(folder) as file:
        running = _Running(wrapped, [(n, asked[n]) for n in ordered], chosen, grader, file, progress, on_step)
        screened = running.screen()
        compared = running.compare(screened)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    facts = (len(running.answers), len(ordered), len(asked) - len(ordered), grader.judge, grader.embeds)
    sent = running.first_input() if screened.alike else ""
    result = Audit(called, date, chosen, screened, tuple(running.asked), tuple(compared), *facts, wrapped.toy, sent)
    if folder is not None:
        write_report(result, folder)
    return result


def check_extras() -> None:
    """Check that the packages are installed that an audit needs, before a model is loaded or a system is asked."""
    for module in ("scipy", "tenacity", "jinja2", "pandas"):
        require_extra(module, "evaluation")


@dataclass
class _Running:
    """The steps of an audit: asks, grades, decides. `asked` is what was asked so far, with the outcomes."""

    system: System
    questions: Sequence[tuple[int, Question]]
    choices: AuditChoices
    grader: Grader
    file: LineFile[CallResult] | None
    progress: Progress
    on_step: OnStep

    def __post_init__(self) -> None:
        self.asked: list[Asked] = []
        self.answers = {each.key: each for each in (self.file.lines if self.file is not None else ())}
        numbered = enumerate(self.questions)
        self.calls = [plan.screen_calls(one, number, index, self.choices.seed) for index, (number, one) in numbered]

    def screen(self) -> Screen:
        """Ask in steps until the order matters, does not matter, or all was asked."""
        for count in looks(len(self.calls)):
            step = self.calls[len(self.asked) : count]
            most = counted(CALLS * len(step), "call")
            self.on_step(f"Step: {counted(len(step), 'question')}, at most {most}, in today's order and two others.")
            self._ask([call for calls in step for call in calls], self.system.ask)
            for calls in step:
                question, answers = calls[0].question, [self.answers[call.key] for call in calls]
                classes = self.grader.classes(question, [each.text for each in answers])
                orders = [call.order for call in calls]
                self.asked.append(Asked(question, orders, answers, classes, self.grader.is_scored(question)))
            table = np.array([each.classes for each in self.asked], dtype=np.int64)
            two = [len(each.question.segments) == 2 for each in self.asked]
            screened = screen(table, two, self.choices.margin, len(self.calls))
            alike = not screened.between and self._ignores_documents()
            self.on_step(f"After {counted(screened.asked, 'question')}: {screened.outcome}.")
            if screened.outcome != "cannot tell yet":
                break
        scored = [each for each in self.asked if each.scored]
        texts = [{each.answers[column].text for column in (FIRST, OTHER, ANOTHER)} for each in scored]
        vacuous = any(len(each) > 1 for each in texts) and not any(RIGHT in each.classes for each in scored)
        if alike or (vacuous and screened.outcome != "order matters"):
            screened = replace(screened, outcome="cannot tell yet", more=0, alike=alike)
            self.on_step(f"{'Every answer is the same' if alike else 'No answer is right'}: {screened.outcome}.")
        return screened

    def _ignores_documents(self) -> bool:
        """Return whether all questions have one answer, with other documents, too; raise if several come back so."""
        texts = [each.answers[FIRST].text for each in self.asked]
        probed = sorted(range(len(texts)), key=lambda index: texts.index(texts[index]) != index)[:PROBED]
        calls = [self.calls[index][FIRST].blanked() for index in probed]
        self._ask(calls, self.system.ask, retries=0)
        before = [texts[index] for index in probed]
        if None in before or [self.answers[call.key].text for call in calls] != before:
            return False
        if len(set(before)) == 1:
            return True
        why = "the system does not read the documents it is given: with other texts in them it answers the same"
        hint = "Of a chain, give the part behind the retriever, or make its input: to_input=. Ask what no model knows."
        raise AuditFailed(f"{why}. The first call was: {self.first_input()}", hint=hint)

    def first_input(self) -> str:
        """Return what the system was called with first, without its middle."""
        call = self.calls[0][FIRST]
        made = self.system.sent(call.question, call.segments)
        return shortened(made if isinstance(made, str) else repr(made), LONGEST_INPUT)

    def compare(self, screened: Screen) -> list[Comparison]:
        """Ask all planned questions with remedies and as today, if the order matters or remedies were asked for."""
        names: Sequence[str] | None = self.choices.remedies
        if names is None:
            scored = [each for each in self.asked if each.scored]
            if screened.outcome != "order matters" or not scored:
                return []
            slots = [None if each is None else each.value for each in slot_accuracies(places_and_outcomes(scored))]
            names = plan.choose_remedies(self.system, slots, [each.question for each in scored])
        remedies = plan.build_remedies(names, self.system)
        if not remedies:
            return []
        planned = {TODAY: [[calls[FIRST], calls[PLACEBO]] for calls in self.calls]} | {
            name: [remedy.calls(name, question, n) for n, question in self.questions]
            for name, (remedy, _) in remedies.items()
        }
        new = {call.key for each in planned.values() for calls in each for call in calls} - self.answers.keys()
        asked = counted(len(self.calls), "question")
        self.on_step(f"{', '.join(remedies)} against today: {asked}, {counted(len(new), 'call')} more.")
        asks = {TODAY: self.system.ask} | {name: ask for name, (_, ask) in remedies.items()}
        scores = dict[str, Any]()
        for name, each in planned.items():
            self._ask([call for calls in each for call in calls], asks[name])
            graded = [calls for calls in each if self.grader.is_scored(calls[0].question)]
            scores[name] = np.array([self._accuracy(calls) for calls in graded])
        today = scores.pop(TODAY)
        compared = [
            Comparison(name, each.about, each.fixes, max(map(len, planned[name])) // DRAWS)
            for name, (each, _) in remedies.items()
        ]
        if not len(today):
            return compared
        p = holm({name: paired_p_value(ours - today) for name, ours in scores.items()})
        return [
            replace(each, accuracy=mean_interval(ours), gain=mean_difference(ours, today), p=p[each.name])
            for each, ours in zip(compared, scores.values(), strict=True)
        ]

    def _accuracy(self, calls: Sequence[AuditCall]) -> float:
        """Return the share of right draws; of several votes of a draw the most frequent counts, the first of equals."""
        texts = [self.answers[call.key].text for call in calls]
        draws: dict[int, list[int]] = {}
        for call, each in zip(calls, self.grader.classes(calls[0].question, texts), strict=True):
            draws.setdefault(call.draw, []).append(each)
        return float(np.mean([max(votes, key=votes.count) == RIGHT for votes in draws.values()]))

    def _ask(self, calls: Sequence[AuditCall], ask: Ask, retries: int | None = None) -> None:
        """Make the calls that have no answer, and keep their answers; those that failed are not written."""
        new = [call for call in calls if call.key not in self.answers]
        missing = [(call.key, lambda call=call: ask(call.question, call.segments)) for call in new]
        if not missing:
            return
        answered = any(each.text is not None for each in self.answers.values())
        with self.progress("Asking", len(missing)) as advance:

            def keep(answer: CallResult) -> None:
                self.answers[answer.key] = answer
                if self.file is not None and answer.text is not None:
                    self.file.append([asdict(answer)])
                advance()

            tries = self.choices.retries if retries is None else retries
            make_calls(missing, keep, answered=answered, retries=tries, workers=self.choices.workers)
