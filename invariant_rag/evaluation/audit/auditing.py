"""The audit: does this system depend on the order of its documents, by how much, and what helps?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from invariant_rag.checks import check_items, check_number, require_extra
from invariant_rag.errors import AuditFailed, InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.evaluation.audit.advice import Advice, advise
from invariant_rag.evaluation.audit.answer_store import AnswerStore
from invariant_rag.evaluation.audit.call_plan import AuditDesign, Call, CallPlan, common_slots
from invariant_rag.evaluation.audit.measures import AnswerParser, Label, Metric, RemedyMeasures, measure
from invariant_rag.evaluation.audit.questions import Question, as_retrieve_function, read_questions
from invariant_rag.evaluation.audit.remedies import AskFunction, build_remedies
from invariant_rag.evaluation.audit.runner import make_calls, make_calls_with_ray
from invariant_rag.evaluation.audit.segment_use import SegmentUseCheck
from invariant_rag.evaluation.audit.systems import ToInput, as_system
from invariant_rag.evaluation.metrics import best_subspan_em, exact_match, normalise_answer, token_f1
from invariant_rag.evaluation.progress import Progress, no_progress
from invariant_rag.files import encode_json, make_folder, write_file

METRICS: dict[str, Metric] = {
    "best_subspan_em": best_subspan_em,
    "exact_match": exact_match,
    "token_f1": token_f1,
}


@dataclass(frozen=True)
class Flip:
    """A question whose answers differ between the input orders.

    Attributes:
        question: The question.
        answers: The different answers with their counts, most frequent first.
    """

    question: str
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        system: Name of the system.
        metric: Name of the accuracy metric.
        design: How many calls are made about each question.
        questions: Number of questions.
        complete: Number of questions all of whose calls were answered; the measures are about these.
        calls: Number of different calls behind the measures.
        unasked: Number of calls that the budget did not allow.
        out_of_slots: Complete questions without gold segments, or with too few segments for the slots.
        measured: Measures of the system as it is, then of every remedy.
        advice: What to do.
        flips: The questions whose answers differ most between the input orders.
    """

    system: str
    metric: str
    design: AuditDesign
    questions: int
    complete: int
    calls: int
    unasked: int
    out_of_slots: int
    measured: tuple[RemedyMeasures, ...]
    advice: Advice
    flips: tuple[Flip, ...]

    def __getitem__(self, name: str) -> RemedyMeasures:
        """Return the measures of a remedy; `as it is` for the system itself."""
        for each in self.measured:
            if each.name == name:
                return each
        raise UnknownName("measured remedy", name, [each.name for each in self.measured])

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        fields = {
            name: getattr(self, name) for name in ("system", "metric", "questions", "complete", "calls", "unasked")
        }
        return {
            **fields,
            "out_of_slots": self.out_of_slots,
            "design": asdict(self.design),
            "advice": asdict(self.advice),
            "measured": [
                {
                    "name": each.name,
                    "measures": {name: estimate.as_dict() for name, estimate in each.measures.items()},
                    "versus_as_it_is": {name: estimate.as_dict() for name, estimate in each.versus.items()},
                    "accuracy_by_slot": [estimate.as_dict() for estimate in each.slots],
                    "accuracy_by_salted_slot": [estimate.as_dict() for estimate in each.salts],
                    "slot_spread_by_chance": each.slot_chance,
                    "salted_spread_by_chance": each.salt_chance,
                }
                for each in self.measured
            ],
            "flips": [asdict(each) for each in self.flips],
        }


def audit(
    system: Any,
    questions: str | Path | Iterable[Question | Mapping[str, Any]],
    *,
    retriever: Any = None,
    k: int = 10,
    remedies: Sequence[str] | None = None,
    metric: str | Metric = "best_subspan_em",
    label: Label = normalise_answer,
    orders: int = 10,
    slots: int = 5,
    repeats: int = 2,
    all_orders: bool = False,
    seed: int = 0,
    workers: int = 1,
    actors: int = 0,
    budget: int | None = None,
    out: str | Path | None = None,
    progress: Progress = no_progress,
    to_input: ToInput | None = None,
    tags: bool = True,
    **generation: Any,
) -> Audit:
    """Ask questions with their segments in many orders; measure what changes, and recommend what to do.

    Every question is asked in all orders of up to 4 segments, else in a sample of orders; with its gold segments moved
    through the slots of the input; in salted canonical orders, which put them into the same slots; and repeatedly in
    the given order. All of that is done for the system as it is and with each remedy. Equal calls are made once. The
    calls follow from the questions and the seed, so threads, actors and interruptions do not change the measures.

    Args:
        system: An `InvariantModel`, a `RAG`, a `Judge`, a Runnable or language model of LangChain, a query engine or
            LLM of LlamaIndex, or a function `(question, segments) -> answer`; see `as_system` in
            `invariant_rag.evaluation.audit.systems`. Of a chain that retrieves for itself, pass the combine chain: the
            audit chooses the order of the documents.
        questions: A .jsonl or .csv file, or `Question`s and mappings; see `invariant_rag.evaluation.audit.questions`.
        retriever: Finds the segments of questions that have none: an object with `retrieve(question, k)`, a retriever
            of LangChain or LlamaIndex, or a function of the question. None: the system's own, if it has one.
        k: Segments to retrieve, if the retriever takes a number.
        remedies: Names out of `sort`; `rerank`, `top-3` and `long-context-reorder` (by the scores of the segments);
            `vote`; and for an `InvariantModel` also `plain` and every invariant method. None: all that apply; of the
            methods, `rotor` and `pine`.
        metric: `best_subspan_em`, `exact_match`, `token_f1`, or a function `(answer, gold answers) -> number`.
        label: What two answers must share to count as the same.
        orders: Input orders of a question with more than 4 segments.
        slots: Slots through which gold segments are moved, and salted orders.
        repeats: How often the given order is asked, to tell the effect of the order from randomness.
        all_orders: Whether to ask the first five segments of each question in all of their orders too, 120 calls, for
            the measure `psr`: the share of questions whose answers all agree (Stable-RAG, arXiv 2601.02993). Fewer
            segments have fewer orders.
        seed: Seed of orders, salts and intervals.
        workers: Number of threads that make calls.
        actors: Number of Ray actors that make calls, each with a pickled copy of the system. 0: no Ray.
        budget: Most calls to make now. Questions are asked one after the other, so that some are complete. For a
            Runnable without `to_input` this includes up to three calls with other texts, which check whether it uses
            its input.
        out: Folder for `answers.jsonl`, from which an interrupted audit continues, and for the report. Use one folder
            per system: stored answers are matched by the system's name.
        progress: Shows a progress bar.
        to_input: Makes the input of a Runnable or an LLM of a framework from question and segments.
        tags: Whether the segments of a black-box system may be prefixed with hashes in salted orders. This detects a
            system that sorts by text. Pass False for a system that parses its texts; it is then assumed not to re-sort
            its input.
        generation: Keywords of `InvariantModel.generate`.

    Raises:
        InvalidQuestion: A question cannot be read.
        InvalidChoice: An argument is no such number or function, or too small.
        UnusableFile: The folder cannot be written, or another process writes it.
        AuditFailed: The system failed or does not use the segments it is given, or no question is complete.
        UnsupportedCombination: The system is none of those, a remedy does not apply to it, or both workers and actors
            were requested.
        ExtraRequired: The extra `evaluation` is not installed, or actors were requested, and Ray is not.
        UnknownName: There is no remedy or metric of that name.
    """
    require_extra("scipy", "evaluation")  # which brings matplotlib, too
    for name, value, least in (
        ("orders", orders, 2),
        ("slots", slots, 2),
        ("repeats", repeats, 1),
        ("workers", workers, 1),
        ("actors", actors, 0),
        ("k", k, 1),
        ("seed", seed, 0),
    ):
        check_number(name, value, least)
    if budget is not None:
        check_number("budget", budget, 0)
    if actors and workers > 1:
        raise UnsupportedCombination(f"{workers} workers are threads of this process, and {actors} actors are others")
    if not isinstance(out, str | Path | None):
        raise InvalidChoice(f"out: expected a folder or None, got {type(out).__name__}")
    folder = None if out is None else make_folder(Path(out))
    metric_function = _resolve_metric(metric)
    if remedies is not None:
        check_items("remedies", remedies, str)
    if not callable(label):
        raise InvalidChoice(f"label: expected a function of an answer, got {type(label).__name__}")
    wrapped = as_system(system, to_input, generation)
    parsed = read_questions(questions, wrapped.retrieve if retriever is None else as_retrieve_function(retriever, k))
    if all(len(question.segments) < 2 for question in parsed):
        raise AuditFailed(
            "expected questions with at least two segments, got none: a single one has no other order",
            hint="Retrieve more segments for each question.",
        )
    built, askers = build_remedies(wrapped, parsed, remedies, tags)
    design = AuditDesign(orders, common_slots(parsed, slots), repeats, seed, all_orders)
    plans = [design.plan_calls(question, built) for question in parsed]  # [questions][remedies]
    calls = list({call.key: call for each in plans for plan in each for call in plan.calls}.values())

    store = AnswerStore(None if folder is None else folder / "answers.jsonl")
    caller = _Caller(askers, store, workers, actors)
    try:
        check = SegmentUseCheck.of([each[0] for each in plans]) if wrapped.may_retrieve else None
        remaining = budget if check is None else _check_segment_use(check, caller, budget)
        missing = caller.unanswered(calls)
        caller.make(missing[:remaining], progress)
    finally:
        store.close()

    complete = [each for each in plans if all(call.key in store.answers for plan in each for call in plan.calls)]
    if not complete:
        raise AuditFailed(
            f"no question was asked in full: {len(missing)} calls were to be made, and {budget} were allowed",
            hint="Allow more calls. With a folder the audit goes on from what has been answered.",
        )
    parser = AnswerParser(store.answers, metric_function, label)
    scores = [parser.score([each[index] for each in complete], design.slots) for index in range(len(built))]
    measured = measure(built, scores, seed)
    result = Audit(
        system=wrapped.name,
        metric=metric if isinstance(metric, str) else getattr(metric, "__name__", "a metric of your own"),
        design=design,
        questions=len(parsed),
        complete=len(complete),
        calls=len({call.key for each in complete for plan in each for call in plan.calls}),
        unasked=sum(call.key not in store.answers for call in calls),
        out_of_slots=sum(not each[0].slots for each in complete),
        measured=tuple(measured),
        advice=advise(measured),
        flips=_most_changed([each[0] for each in complete], measured[0], store),
    )
    if folder is not None:
        from invariant_rag.evaluation.audit.report import write_report

        write_file(folder / "audit.json", encode_json(result.as_dict(), indent=2) + b"\n")
        write_report(result, folder)
    return result


def _resolve_metric(metric: str | Metric) -> Metric:
    if callable(metric):
        return metric
    if not isinstance(metric, str):
        raise InvalidChoice(f"metric: expected a name or a function, got {type(metric).__name__}")
    if metric not in METRICS:
        raise UnknownName("metric", metric, METRICS)
    return METRICS[metric]


@dataclass(frozen=True)
class _Caller:
    """Makes calls in threads or Ray actors, and stores their answers."""

    askers: Mapping[str, AskFunction]
    store: AnswerStore
    workers: int
    actors: int

    def unanswered(self, calls: Iterable[Call]) -> list[Call]:
        """Return the calls without a stored answer, each key once."""
        return list({call.key: call for call in calls if call.key not in self.store.answers}.values())

    def make(self, calls: Sequence[Call], progress: Progress = no_progress) -> None:
        """Make the calls."""
        with progress("Asking", len(calls)) as advance:
            if self.actors and calls:
                make_calls_with_ray(calls, self.askers, self.store, actors=self.actors, on_answer=advance)
            else:
                make_calls(calls, self.askers, self.store, workers=self.workers, on_answer=advance)


def _check_segment_use(check: SegmentUseCheck, caller: _Caller, budget: int | None) -> int | None:
    """Check whether the system uses its segments, and return the rest of the budget."""
    original = caller.unanswered(check.original)[:budget]
    caller.make(original)
    remaining = None if budget is None else budget - len(original)
    replaced = caller.unanswered(check.replaced)[:remaining]
    with suppress(AuditFailed):  # a system that fails on other texts uses them
        caller.make(replaced)
    check.verify(caller.store)
    return None if remaining is None else remaining - len(replaced)


def _most_changed(
    plans: Sequence[CallPlan], measured: RemedyMeasures, store: AnswerStore, most: int = 10
) -> tuple[Flip, ...]:
    """Return the questions whose answers differ most, with the answers as the system wrote them."""
    ranked = sorted(range(len(plans)), key=lambda index: -measured.per_question[index])[:most]
    flips = []
    for index in ranked:
        if measured.per_question[index] > 0:
            texts = Counter(store.answers[group[0].key].text for group in plans[index].orders)
            flips.append(Flip(plans[index].orders[0][0].question.text, tuple(texts.most_common())))
    return tuple(flips)
