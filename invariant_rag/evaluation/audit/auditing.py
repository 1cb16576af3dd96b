"""The audit: does this system depend on the order of its documents, by how much, and what helps?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from invariant_rag.checks import MOST_CALLS, check_flag, check_items, check_number, check_real, require_extra
from invariant_rag.errors import AuditFailed, InvalidChoice, UnsupportedCombination
from invariant_rag.evaluation.audit.advice import advise
from invariant_rag.evaluation.audit.answer_metrics import AnswerMetric, resolve_metric
from invariant_rag.evaluation.audit.answer_store import AnswerStore
from invariant_rag.evaluation.audit.call_plan import Call
from invariant_rag.evaluation.audit.effects import assess
from invariant_rag.evaluation.audit.failures import Failures
from invariant_rag.evaluation.audit.folder import AuditFolder
from invariant_rag.evaluation.audit.measures import measure
from invariant_rag.evaluation.audit.patience import Patience
from invariant_rag.evaluation.audit.preparing import CallEstimate, Preparation, Questions, prepare
from invariant_rag.evaluation.audit.remedies import check_remedies
from invariant_rag.evaluation.audit.result import Audit, Reused, asked_question, package_versions
from invariant_rag.evaluation.audit.runner import CallLog, FailedCall, hopeless, make_calls, make_calls_with_ray
from invariant_rag.evaluation.audit.scoring import AnswerParser, Label, Metric, numbers_of, outcomes_of
from invariant_rag.evaluation.audit.segment_use import SegmentUseCheck
from invariant_rag.evaluation.audit.systems import ToInput, as_system
from invariant_rag.evaluation.metrics import normalise_answer
from invariant_rag.evaluation.progress import Progress, no_progress


def audit(
    system: Any,
    questions: Questions,
    *,
    retriever: Any = None,
    k: int = 10,
    remedies: Sequence[str] | None = None,
    metric: str | Metric = "best_subspan_em",
    label: Label = normalise_answer,
    orders: int = 10,
    slots: int = 5,
    repeats: int = 3,
    all_orders: bool = False,
    seed: int = 0,
    workers: int = 1,
    actors: int = 0,
    retries: int = 3,
    timeout: float | None = None,
    budget: int | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    name: str | None = None,
    progress: Progress = no_progress,
    before_asking: Callable[[CallEstimate, Reused], object] | None = None,
    to_input: ToInput | None = None,
    tags: bool = True,
    **generation: Any,
) -> Audit:
    """Ask questions with their segments in many orders; measure what changes, and recommend what to do.

    Every question is asked repeatedly in the order that the retriever gives, which is what users get today; in all
    orders of up to 4 segments, else in a sample of orders; with its gold segments moved through the slots of the input;
    and in salted canonical orders, which put them into the same slots. All of that is done for the system as it is and
    with each remedy. Equal calls are made once. The calls follow from the questions and the seed, so threads, actors
    and interruptions do not change the measures.

    Args:
        system: An `InvariantModel`, a `RAG`, a `Judge`, a Runnable or language model of LangChain, a query engine or
            LLM of LlamaIndex, an `Endpoint` or the URL of a server like that of OpenAI, or a function
            `(question, segments) -> answer`, which may be async; see `as_system` in
            `invariant_rag.evaluation.audit.systems`. Of a chain that retrieves for itself, pass the combine chain: the
            audit chooses the order of the documents.
        questions: A file, a folder, or `Question`s and mappings; see `invariant_rag.evaluation.audit.questions`.
        retriever: Finds the segments of questions that have none: an object with `retrieve(question, k)`, a retriever
            of LangChain or LlamaIndex, or a function of the question. None: the system's own, if it has one.
        k: Segments to retrieve, if the retriever takes a number.
        remedies: Names out of `sort`; `rerank`, `top-3` and `long-context-reorder` (by the scores of the segments);
            `vote`; `reverse` (what the retriever lists first comes last); and for an `InvariantModel` also `plain` and
            every invariant method. None: all that apply but `reverse`; of the methods, `rotor` and `pine`.
        metric: `best_subspan_em`, `exact_match`, `token_f1`, or a function `(answer, gold answers) -> number` from 0 to
            1; an answer is right from 0.5 on.
        label: What two answers must share to count as the same wording.
        orders: Input orders of a question with more than 4 segments.
        slots: Slots through which gold segments are moved, and salted orders.
        repeats: How often the given order is asked, to tell the effect of the order from randomness.
        all_orders: Whether to ask the first five segments of each question in all of their orders too, 120 calls, for
            the measure `psr`: the share of questions whose answers all agree (Stable-RAG, arXiv 2601.02993). Fewer
            segments have fewer orders.
        seed: Seed of orders, salts and intervals.
        workers: Number of threads that make calls.
        actors: Number of Ray actors that make calls, each with a pickled copy of the system. 0: no Ray.
        retries: Tries of a call that raised an error, after the first one, with pauses that double. A call that fails
            all the same does not stop the audit: the share of errors is reported.
        timeout: Seconds after which a try counts as failed. None: never.
        budget: Most calls to make now. Questions are asked one after the other, so that some are complete. For a
            Runnable without `to_input` this includes up to three calls with other texts, which check whether it uses
            its input.
        out: Folder for `answers.jsonl`, from which an interrupted audit continues, and for the report. Stored answers
            are only used for the very system that gave them.
        fresh: Whether to ask everything anew. The answers that are in the folder are set aside.
        name: Name of the system in reports. It vouches for the system: answers that are stored under it are used,
            whatever has changed.
        progress: Shows a progress bar.
        before_asking: Called with what the audit will take, and what it need not ask.
        to_input: Makes the input of a Runnable or an LLM of a framework from question and segments.
        tags: Whether the segments of a black-box system may be prefixed with hashes in salted orders. This detects a
            system that sorts by text. Pass False for a system that parses its texts; it is then assumed not to re-sort
            its input.
        generation: Keywords of `InvariantModel.generate`.

    Raises:
        InvalidQuestion: A question cannot be read.
        InvalidChoice: An argument is no such number or function, or too small.
        UnusableFile: The folder cannot be written, or another process writes it.
        AuditFailed: The system answers nothing or does not use the segments it is given, or no question is complete.
        UnsupportedCombination: The system is none of those, a remedy does not apply to it, or both workers and actors
            were requested.
        ExtraRequired: The extra `evaluation` is not installed, Ray is not installed for actors, or pyarrow for a folder
            of `datasets`.
        UnknownName: There is no remedy or metric of that name.
    """
    check_extras(writes=out is not None, actors=actors)
    for option, value, least in (
        ("orders", orders, 2),
        ("slots", slots, 2),
        ("repeats", repeats, 1),
        ("workers", workers, 1),
        ("actors", actors, 0),
        ("retries", retries, 0),
    ):
        check_number(option, value, least, MOST_CALLS)
    check_number("k", k, 1)
    check_number("seed", seed, 0)
    check_flag("all_orders", all_orders)
    check_flag("tags", tags)
    if remedies is not None:
        check_remedies(check_items("remedies", remedies, str))
    if budget is not None:
        check_number("budget", budget, 0)
    if timeout is not None and check_real("timeout", timeout) <= 0:
        raise InvalidChoice(f"timeout: expected seconds above 0, got {timeout}")
    if actors and workers > 1:
        raise UnsupportedCombination(f"{workers} workers are threads of this process, and {actors} actors are others")
    answer_metric = resolve_metric(metric)
    if not callable(label):
        raise InvalidChoice(f"label: expected a function of an answer, got {type(label).__name__}")
    folder = AuditFolder.of(out)
    prepared = prepare(
        system,
        questions,
        retriever=retriever,
        k=k,
        remedies=remedies,
        orders=orders,
        slots=slots,
        repeats=repeats,
        all_orders=all_orders,
        seed=seed,
        to_input=to_input,
        tags=tags,
        name=name,
        identities=folder.identities,
        **generation,
    )
    answer_metric.check(prepared.questions)
    store = folder.open_store(fresh)
    caller = _Caller(prepared, store, workers, actors, Patience(retries, timeout))
    reused = _reused(prepared, store)
    try:
        if before_asking is not None:
            before_asking(prepared.estimate(store.answers, max(workers, actors)), reused)
        failed = caller.make_all(budget, progress)
    finally:
        store.close()
        if prepared.system.lm is None and prepared.system.identity and not isinstance(system, str):
            folder.remember(as_system(system, to_input, generation).identity, prepared.system.identity)
    result = _evaluate(prepared, store, failed, answer_metric, label, reused, budget)
    folder.write(result)
    return result


def check_extras(*, writes: bool, actors: int = 0) -> None:
    """Check that the packages are installed that an audit needs, before a model is loaded or a system is asked.

    Args:
        writes: Whether a report is written, which has plots.
        actors: Number of Ray actors.

    Raises:
        ExtraRequired: One is not.
    """
    require_extra("scipy", "evaluation")
    if writes:
        require_extra("matplotlib", "plots")
    if actors:
        require_extra("ray", "ray")


def estimate_calls(
    system: Any, questions: Questions, *, out: str | Path | None = None, workers: int = 1, **options: Any
) -> CallEstimate:
    """Estimate what an audit will take. No call is made, and nothing is written.

    Args:
        system: The system.
        questions: The questions.
        out: Folder of an audit whose answers would be reused.
        workers: Number of threads.
        options: Other arguments of `audit` that decide what is asked.
    """
    check_number("workers", workers, 1)
    folder = AuditFolder.of(out, writes=False)
    prepared = prepare(system, questions, identities=folder.identities, **options)
    return prepared.estimate(folder.read_answers(), workers)


def _reused(prepared: Preparation, store: AnswerStore) -> Reused:
    used = [store.answers[call.key] for call in prepared.calls if call.key in store.answers]
    dates = sorted(each.date for each in used if each.date)
    return Reused(len(used), dates[0][:10] if dates else "", len(store.answers) - len(used))


@dataclass(frozen=True)
class _Caller:
    """Makes the calls of an audit in threads or Ray actors, and stores their answers."""

    prepared: Preparation
    store: AnswerStore
    workers: int
    actors: int
    patience: Patience

    def make_all(self, budget: int | None, progress: Progress) -> Mapping[str, FailedCall]:
        """Make every call that has no answer, as far as the budget goes, and return those that failed, by key."""
        failed: dict[str, FailedCall] = {}
        remaining = budget
        if self.prepared.system.may_retrieve:
            check = SegmentUseCheck.of([each[0] for each in self.prepared.plans])
            once = Patience(retries=0, timeout=self.patience.timeout)  # a system that fails on other texts uses them
            for calls, patience in ((check.original, self.patience), (check.replaced, once)):
                missing = self._unanswered(calls, failed)[:remaining]
                failed |= self._make(missing, patience)
                remaining = None if remaining is None else remaining - len(missing)
            check.verify(self.store)
        missing = self._unanswered(self.prepared.calls, failed)[:remaining]
        return failed | self._make(missing, self.patience, progress)

    def _unanswered(self, calls: Iterable[Call], failed: Mapping[str, FailedCall]) -> list[Call]:
        """Return the calls without an answer that have not failed, each key once."""
        missing = [call for call in calls if call.key not in self.store.answers and call.key not in failed]
        return list({call.key: call for call in missing}.values())

    def _make(
        self, calls: Sequence[Call], patience: Patience, progress: Progress = no_progress
    ) -> dict[str, FailedCall]:
        if not calls:
            return {}
        with progress("Asking", len(calls)) as advance:
            log = CallLog(self.store, advance)
            if self.actors:
                make_calls_with_ray(calls, self.prepared.askers, log, actors=self.actors, patience=patience)
            else:
                make_calls(calls, self.prepared.askers, log, workers=self.workers, patience=patience)
        return {each.call.key: each for each in log.failed}


def _evaluate(
    prepared: Preparation,
    store: AnswerStore,
    failed: Mapping[str, FailedCall],
    metric: AnswerMetric,
    label: Label,
    reused: Reused,
    budget: int | None,
) -> Audit:
    """Score the answers, test what they show, and advise."""
    made = store.answers.keys() | failed.keys()
    complete = [each for each in prepared.plans if all(call.key in made for plan in each for call in plan.calls)]
    asked = {call.key for each in complete for plan in each for call in plan.calls}
    if complete and not asked & store.answers.keys():
        raise hopeless(list(failed.values()))
    if not complete:
        first = {call.key for plan in prepared.plans[0] for call in plan.calls}
        raise AuditFailed(
            f"no question was asked in full: the budget of {budget} calls is used up, the first question alone takes "
            f"{len(first)}, and all take {len(prepared.calls)}",
            hint="Raise budget (--budget). With a folder (out, --out) the audit goes on from what has been answered.",
        )
    parser = AnswerParser(store.answers, metric.score, label)
    scored = [[parser.score_plan(plan) for plan in each] for each in complete]  # [questions][remedies]
    names = [each.name for each in prepared.remedies]
    seed, slots = prepared.design.seed, prepared.design.slots
    outcomes = {name: outcomes_of([each[i] for each in scored], slots) for i, name in enumerate(names)}
    numbers = {name: numbers_of([each[i] for each in scored], outcomes[name]) for i, name in enumerate(names)}
    as_is = names[0]
    measured = [
        measure(name, numbers[name], outcomes[name], None if name == as_is else numbers[as_is], seed) for name in names
    ]
    remedies = {name: outcomes[name] for name in names[1:]}
    calls = {name: float(np.nanmean(numbers[name]["calls"])) for name in remedies}
    effects = assess(outcomes[as_is], remedies, calls, prepared.same_as_today, seed, prepared.listing)
    failures = Failures.of([call for each in complete for plan in each for call in plan.calls], store.answers, failed)
    return Audit(
        system=prepared.system.name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=package_versions(),
        metric=metric.name,
        design=prepared.design,
        questions=len(prepared.questions),
        complete=len(complete),
        unasked=sum(call.key not in made for call in prepared.calls),
        failures=failures,
        reused=reused,
        out_of_slots=sum(not each[0].slots for each in complete),
        measured=tuple(measured),
        effects=effects,
        advice=advise(measured, effects, len(complete), failures),
        asked=tuple(asked_question(plans, found, names) for plans, found in zip(complete, scored, strict=True)),
    )
