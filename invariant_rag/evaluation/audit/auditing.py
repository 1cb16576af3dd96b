"""The audit: does this system depend on the order of its documents, by how much, and what helps?"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import AuditFailed, InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.evaluation.audit.advice import Advice, advise
from invariant_rag.evaluation.audit.measures import Label, Measured, Metric, Reader, measure
from invariant_rag.evaluation.audit.plan import Ask, Design, Plan, common_slots
from invariant_rag.evaluation.audit.probe import Probe
from invariant_rag.evaluation.audit.questions import Question, as_segment, read_questions
from invariant_rag.evaluation.audit.remedies import variants_of
from invariant_rag.evaluation.audit.runner import AnswerStore, answer_all, answer_over_actors
from invariant_rag.evaluation.audit.systems import ToInput, as_system
from invariant_rag.evaluation.metrics import best_subspan_em, exact_match, normalise_answer, token_f1

if TYPE_CHECKING:
    from invariant_rag.evaluation.audit.questions import Retrieve

METRICS: dict[str, Metric] = {
    "best_subspan_em": best_subspan_em,
    "exact_match": exact_match,
    "token_f1": token_f1,
}


@dataclass(frozen=True)
class Flip:
    """A question whose answers differ, with what was said how often in the input orders."""

    question: str
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        system: Name of the system.
        metric: Name of the metric of accuracy.
        design: How much was asked about each question.
        questions: Number of questions.
        complete: Number of them that were asked in full; every number is about these.
        calls: Calls that these numbers rest on.
        unasked: Calls that the budget left unasked.
        out_of_slots: Questions that were asked in full, but have no gold segment or too few segments for the slots.
        measured: The system as it is, then with every remedy.
        advice: What to do.
        flips: The questions whose answers differ most between the input orders.
    """

    system: str
    metric: str
    design: Design
    questions: int
    complete: int
    calls: int
    unasked: int
    out_of_slots: int
    measured: tuple[Measured, ...]
    advice: Advice
    flips: tuple[Flip, ...]

    def __getitem__(self, name: str) -> Measured:
        """Return the measures of a remedy; of the system itself for `as it is`."""
        for each in self.measured:
            if each.name == name:
                return each
        raise UnknownName("measured variant", name, [each.name for each in self.measured])

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
                    "measures": {name: asdict(estimate) for name, estimate in each.measures.items()},
                    "versus_as_it_is": {name: asdict(estimate) for name, estimate in each.versus.items()},
                    "accuracy_by_slot": [asdict(estimate) for estimate in each.slots],
                    "accuracy_by_salted_slot": [asdict(estimate) for estimate in each.salts],
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
    seed: int = 0,
    workers: int = 1,
    actors: int = 0,
    budget: int | None = None,
    out: str | Path | None = None,
    progress: bool = False,
    to_input: ToInput | None = None,
    tags: bool = True,
    **generation: Any,
) -> Audit:
    """Ask questions again and again with their documents in other orders, and say what changes and what to do.

    Every question is asked in all orders of up to 4 segments, else in a sample; with its gold segments moved through
    the slots of the input; in salted canonical orders, which put them into the same slots; and repeatedly in the order
    given. Then all of that with each remedy. Equal calls are made once. What an answer depends on is fixed by the
    questions and the seed, so neither threads nor interruptions change a number.

    Args:
        system: An `InvariantModel`, a `RAG`, a `Judge`, a Runnable or language model of LangChain, a query engine or
            LLM of LlamaIndex, or a function `(question, segments) -> answer`; see `as_system` in
            `invariant_rag.evaluation.audit.systems`. Of a chain that retrieves by itself, give the combine chain: it
            has to read the documents that the audit lists.
        questions: A .jsonl or .csv file, or `Question`s and mappings; see `invariant_rag.evaluation.audit.questions`.
        retriever: What finds the segments of a question that brings none: an object with `retrieve(question, k)`, a
            retriever of LangChain or LlamaIndex, or a function of the question. None: the system's own, if it has one.
        k: Segments to retrieve, where the retriever takes a number.
        remedies: Names out of `sort`; `rerank`, `top-3` and `long-context-reorder` (by the scores of the segments);
            `vote`; and for our models `plain` and every invariant method. None: all that apply; of the methods,
            `rotor` and `pine`.
        metric: `best_subspan_em`, `exact_match`, `token_f1`, or a function `(answer, gold answers) -> number`.
        label: What two answers must share to count as the same.
        orders: Input orders of a question with more than 4 segments.
        slots: Slots through which gold segments are moved, and salted orders.
        repeats: How often the order given is asked, to tell order from chance.
        seed: Seed of orders, salts and intervals.
        workers: Calls at a time.
        actors: Ray actors that share the calls, each with a copy of the system, which is pickled. 0: this process
            makes them.
        budget: Most calls to make now. Questions are asked one after the other, so some are done and some are not. A
            Runnable without `to_input` is first asked up to three questions about other texts.
        out: Folder for `answers.jsonl`, from which an audit that was interrupted goes on, and for the report. One
            folder for each system: what counts as the same system is its name.
        progress: Show a progress bar.
        to_input: What a Runnable or an LLM of a framework is called with, as a function of question and segments.
        tags: Whether the segments of a system that is not one of our models may begin with hashes in salted orders. A
            system that sorts by text is found out so; one that parses its texts wants False, and is then taken to read
            its segments as they are listed.
        generation: Keywords of `InvariantModel.generate`.

    Raises:
        InvalidQuestion: A question cannot be read.
        InvalidChoice: A number is too small.
        AuditFailed: The system failed, it does not read the segments it is given, or no question was asked in full.
        UnsupportedCombination: The system is none of those, a remedy does not apply to it, or both workers and actors
            were asked for.
        ExtraRequired: Actors were asked for, and Ray is not installed.
        UnknownName: There is no remedy or metric of that name.
    """
    for name, value, least in (
        ("orders", orders, 2),
        ("slots", slots, 2),
        ("repeats", repeats, 1),
        ("workers", workers, 1),
        ("actors", actors, 0),
    ):
        if value < least:
            raise InvalidChoice(f"{name}: expected at least {least}, got {value}")
    if budget is not None and budget < 0:
        raise InvalidChoice(f"budget: expected calls, got {budget}")
    if actors and workers > 1:
        raise UnsupportedCombination(f"{workers} workers are threads of this process, and {actors} actors are others")
    chosen_metric = _metric(metric)
    asked = as_system(system, to_input, generation)
    read = read_questions(questions, asked.retrieve if retriever is None else retrieving(retriever, k))
    if all(len(question.segments) < 2 for question in read):
        raise AuditFailed(
            "expected questions with at least two segments, got none: a single one has no other order",
            hint="Retrieve more segments for each question.",
        )
    variants, askers = variants_of(asked, read, remedies, tags)
    design = Design(orders, common_slots(read, slots), repeats, seed)
    plans = [design.plans(question, variants) for question in read]
    wanted = list({ask.key: ask for each in plans for plan in each for ask in plan.asks}.values())

    folder = None if out is None else Path(out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    store = AnswerStore(None if folder is None else folder / "answers.jsonl")
    answer = partial(_answer, askers=askers, store=store, workers=workers, actors=actors)
    try:
        probe = Probe.of([each[0] for each in plans]) if asked.may_retrieve else None
        left = budget if probe is None else _probe(probe, store, budget, answer)
        missing = _missing(wanted, store)
        answer(missing[:left], progress=progress)
    finally:
        store.close()

    complete = [
        index for index, each in enumerate(plans) if all(ask.key in store.records for plan in each for ask in plan.asks)
    ]
    if not complete:
        raise AuditFailed(
            f"no question was asked in full: {len(missing)} calls were to be made, and {budget} were allowed",
            hint="Allow more calls. With a folder the audit goes on from what has been answered.",
        )
    reader = Reader(store.records, chosen_metric, label)
    kept = [plans[index] for index in complete]
    seen = [reader.see([each[number] for each in kept], design.slots) for number in range(len(variants))]
    measured = measure(variants, seen, seed)
    result = Audit(
        system=asked.name,
        metric=metric if isinstance(metric, str) else getattr(metric, "__name__", "a metric of your own"),
        design=design,
        questions=len(read),
        complete=len(complete),
        calls=len({ask.key for each in kept for plan in each for ask in plan.asks}),
        unasked=sum(ask.key not in store.records for ask in wanted),
        out_of_slots=sum(not each[0].slots for each in kept),
        measured=tuple(measured),
        advice=advise(measured),
        flips=_flips([each[0] for each in kept], measured[0], store),
    )
    if folder is not None:
        from invariant_rag.evaluation.audit.report import write_report

        (folder / "audit.json").write_text(json.dumps(result.as_dict(), indent=2) + "\n", encoding="utf-8")
        write_report(result, folder)
    return result


def retrieving(retriever: Any, k: int) -> Retrieve:
    """Return a retriever of ours, of LangChain or of LlamaIndex, or a function, as a function of the question.

    Raises:
        UnsupportedCombination: It is none of these.
    """
    find = getattr(retriever, "retrieve", None)
    if callable(find):
        takes_k = "k" in inspect.signature(find).parameters
        return lambda question: map(as_segment, find(question, k) if takes_k else find(question))
    if hasattr(retriever, "invoke"):
        return lambda question: map(as_segment, retriever.invoke(question))
    if callable(retriever):
        return lambda question: map(as_segment, retriever(question))
    raise UnsupportedCombination(f"expected a retriever, got {type(retriever).__name__}", hint="Pass a function.")


def _metric(metric: str | Metric) -> Metric:
    if not isinstance(metric, str):
        return metric
    if metric not in METRICS:
        raise UnknownName("metric", metric, METRICS)
    return METRICS[metric]


def _missing(asks: Iterable[Ask], store: AnswerStore) -> list[Ask]:
    return list({ask.key: ask for ask in asks if ask.key not in store.records}.values())


def _probe(probe: Probe, store: AnswerStore, budget: int | None, answer: Callable[..., None]) -> int | None:
    """Find out whether the system reads its segments, and return what is left of the budget."""
    given = _missing(probe.given, store)[:budget]
    answer(given, progress=False)
    left = None if budget is None else budget - len(given)
    exchanged = _missing(probe.exchanged, store)[:left]
    with suppress(AuditFailed):  # what fails over other texts has read them
        answer(exchanged, progress=False)
    probe.check(store)
    return None if left is None else left - len(exchanged)


def _answer(
    asks: list[Ask], askers: Mapping[str, Any], store: AnswerStore, workers: int, actors: int, progress: bool
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        advance: Callable[[], object] = partial(bar.advance, bar.add_task("Asking", total=len(asks)))
        if actors and asks:
            answer_over_actors(asks, askers, store, actors=actors, on_answer=advance)
        else:
            answer_all(asks, askers, store, workers=workers, on_answer=advance)


def _flips(plans: Sequence[Plan], measured: Measured, store: AnswerStore, most: int = 10) -> tuple[Flip, ...]:
    """Return the questions whose answers differ most, with the answers as they were written."""
    worst = sorted(range(len(plans)), key=lambda index: -measured.per_question[index])[:most]
    flips = []
    for index in worst:
        if measured.per_question[index] > 0:
            texts = Counter(store.records[answer[0].key].text for answer in plans[index].orders)
            flips.append(Flip(plans[index].orders[0][0].question.text, tuple(texts.most_common())))
    return tuple(flips)
