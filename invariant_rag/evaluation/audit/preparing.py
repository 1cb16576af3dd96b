"""Prepare an audit: read what is asked, plan every call, and estimate what the calls will take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from invariant_rag.checks import check_items, check_number, check_text
from invariant_rag.errors import AuditFailed
from invariant_rag.evaluation.audit.answer_store import StoredAnswer
from invariant_rag.evaluation.audit.call_plan import AuditDesign, Call, CallPlan, common_slots
from invariant_rag.evaluation.audit.effects import SAME_AS_TODAY, Listing
from invariant_rag.evaluation.audit.questions import Question, as_retrieve_function, read_questions
from invariant_rag.evaluation.audit.remedies import AskFunction, Remedy, build_remedies, is_listed_by_score
from invariant_rag.evaluation.audit.systems import System, ToInput, as_system
from invariant_rag.shown import counted

CHARACTERS_PER_TOKEN = 4
"""Of English text, about."""

Questions = str | Path | Iterable[Question | Mapping[str, Any]]


@dataclass(frozen=True)
class CallEstimate:
    """What an audit will take, before it begins.

    Attributes:
        calls: Calls to make.
        answered: Calls that are answered already.
        by_remedy: Calls of each remedy that no remedy before it makes.
        tokens: Prompt tokens of the calls to make, about: four characters are one.
        seconds: Duration of the calls to make, from answers that are known; None if none is.
    """

    calls: int
    answered: int
    by_remedy: Mapping[str, int]
    tokens: int
    seconds: float | None

    def __str__(self) -> str:
        if not self.calls:
            return "nothing"
        shares = ", ".join(f"{name} {count:,}" for name, count in self.by_remedy.items() if count)
        time = "time unknown until it is asked" if self.seconds is None else f"about {_duration(self.seconds)}"
        return f"{counted(self.calls, 'call')} ({shares}), about {counted(self.tokens, 'prompt token')}, {time}"


def _duration(seconds: float) -> str:
    return counted(round(seconds / 60), "minute") if seconds >= 120 else counted(round(seconds), "second")


@dataclass(frozen=True)
class Preparation:
    """Everything that is fixed before the first call.

    Attributes:
        system: The system.
        questions: What it is asked.
        design: How many calls are made about each question.
        remedies: The system as it is, then every remedy.
        askers: The functions that are called, by name.
        plans: The calls `[questions][remedies]`.
    """

    system: System
    questions: Sequence[Question]
    design: AuditDesign
    remedies: Sequence[Remedy]
    askers: Mapping[str, AskFunction]
    plans: Sequence[Sequence[CallPlan]]

    @cached_property
    def calls(self) -> list[Call]:
        """Every call, each key once."""
        return list({call.key: call for each in self.plans for plan in each for call in plan.calls}.values())

    @property
    def same_as_today(self) -> list[str]:
        """Names of remedies that list (almost) every question in the order that the retriever gives."""
        return [
            remedy.name
            for index, remedy in enumerate(self.remedies)
            if index and self._share_as_given(index) >= SAME_AS_TODAY
        ]

    @property
    def listing(self) -> Listing:
        """How the retriever lists (almost) every question: by score, the best first or at both ends, or otherwise."""
        scored = [each for each in self.questions if len({segment.score for segment in each.segments} - {None}) > 1]
        if len(scored) < SAME_AS_TODAY * sum(len(each.segments) > 1 for each in self.questions):
            return Listing.UNKNOWN
        by_score = sum(is_listed_by_score(each.segments) for each in scored)
        return Listing.BY_SCORE if by_score >= SAME_AS_TODAY * len(scored) else Listing.NOT_BY_SCORE

    def _share_as_given(self, index: int) -> float:
        pairs = [(plans[index].repeats[0], plans[0].repeats[0]) for plans in self.plans]
        return sum(_keys(ours) == _keys(theirs) for ours, theirs in pairs) / len(pairs)

    def estimate(self, answers: Mapping[str, StoredAnswer], workers: int) -> CallEstimate:
        """Estimate what the calls will take that no answer is known to."""
        seen: set[str] = set()
        by_remedy = {}
        for index, remedy in enumerate(self.remedies):
            keys = {call.key for plans in self.plans for call in plans[index].calls} - answers.keys() - seen
            by_remedy[remedy.name] = len(keys)
            seen |= keys
        missing = [call for call in self.calls if call.key not in answers]
        characters = sum(_length(call.question) for call in missing)
        known = [each.seconds for each in answers.values()]
        seconds = sum(known) / len(known) * len(missing) / workers if known else None
        return CallEstimate(
            calls=len(missing),
            answered=len(self.calls) - len(missing),
            by_remedy=by_remedy,
            tokens=characters // CHARACTERS_PER_TOKEN,
            seconds=seconds,
        )


def _keys(group: Sequence[Call]) -> list[str]:
    return [call.key for call in group]


def _length(question: Question) -> int:
    return len(question.text) + sum(len(each.text) + len(each.title or "") for each in question.segments)


def prepare(
    system: Any,
    questions: Questions,
    *,
    retriever: Any = None,
    k: int = 10,
    remedies: Sequence[str] | None = None,
    orders: int = 10,
    slots: int = 5,
    repeats: int = 3,
    all_orders: bool = False,
    seed: int = 0,
    to_input: ToInput | None = None,
    tags: bool = True,
    name: str | None = None,
    identities: Mapping[str, str] | None = None,
    **generation: Any,
) -> Preparation:
    """Read the questions, wrap the system, and plan every call.

    The arguments are those of `audit`, and `identities` of an `AuditFolder`.
    """
    numbers = (("orders", orders, 2), ("slots", slots, 2), ("repeats", repeats, 1), ("k", k, 1), ("seed", seed, 0))
    for label, value, least in numbers:
        check_number(label, value, least)
    if remedies is not None:
        check_items("remedies", remedies, str)
    if name is not None:
        check_text("name", name)
    wrapped = as_system(system, to_input, generation)
    wrapped = replace(wrapped, identity=(identities or {}).get(wrapped.identity, wrapped.identity))
    if name is not None:
        wrapped = replace(wrapped, name=name, identity="")
    asked = read_questions(questions, wrapped.retrieve if retriever is None else as_retrieve_function(retriever, k))
    if all(len(question.segments) < 2 for question in asked):
        raise AuditFailed(
            "expected questions with at least two segments, got none: a single one has no other order",
            hint="Retrieve more segments for each question.",
        )
    built, askers = build_remedies(wrapped, asked, remedies, tags)
    design = AuditDesign(orders, common_slots(asked, slots), repeats, seed, all_orders)
    plans = [design.plan_calls(question, built) for question in asked]
    return Preparation(wrapped, asked, design, built, askers, plans)
