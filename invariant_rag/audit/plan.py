"""Plan an audit: its choices, the orders of the documents, the placebo, remedies. All follow from a seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from invariant_rag import checks
from invariant_rag.audit.questions import Question
from invariant_rag.audit.sequential_test import AGAIN, ANOTHER, FIRST, OTHER, PLACEBO, REPEATED
from invariant_rag.audit.systems import Ask, System, lm_ask_function
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.methods import METHODS, resolve_method
from invariant_rag.segments import Segment

Order = tuple[int, ...]  # indices into the segments as given; that at position 0 comes first in the prompt
TODAY = "today"  # name of the system as it is, with the documents in the order of today
DRAWS = 2  # calls, or votes, of each question with a remedy; it is compared with as many distinct draws of today
VOTES = 5  # most orders that a majority vote asks
SLOTS = 5  # parts of the prompt, from the first to the last place, of which accuracy is measured


@dataclass(frozen=True)
class AuditCall:
    """One call about a question: `draw` is a column of the screen, or which draw of a remedy (`arm`, else `today`)."""

    question: Question
    index: int
    arm: str
    draw: int
    order: Order
    spaces: int = 0
    vote: int = 0

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The documents in this order. One, without the answer if possible, has more spaces: past any cache."""
        segments, gold = list(self.question.segments), self.question.gold
        place = max((place for place in range(len(segments)) if place not in gold), default=len(segments) - 1)
        if self.spaces and segments[place].token_ids is None:
            text = segments[place].text
            wider = text.replace(" ", " " * (1 + self.spaces), 1) if " " in text.strip() else text + "\n" * self.spaces
            segments[place] = replace(segments[place], text=wider)
        return tuple(segments[place] for place in self.order)

    @property
    def key(self) -> str:
        """What the call is in the run, such as `12 today 3`."""
        return f"{self.index} {self.arm} {self.draw}" + (f" {self.vote}" if self.vote else "")

    def blanked(self) -> AuditCall:
        """Return the call with other texts in its documents: does the system read them?"""
        blank = tuple(Segment(f"Page {page} is left blank.") for page in self.order)
        return replace(self, question=replace(self.question, segments=blank), arm="other texts")


def has_orders(question: Question) -> bool:
    """Return whether two orders of the documents differ."""
    return len({each.canonical_key for each in question.segments}) > 1


def screen_calls(question: Question, index: int, place: int, seed: int) -> list[AuditCall]:
    """Return the five calls of the screen about a question, which `place` others are asked before."""
    today = _as_given(question)
    one, other = _other_orders(question, f"{seed} {index} {question.text!r}")
    spaces = {AGAIN: 0 if place < REPEATED else 2, PLACEBO: 1}
    orders = {FIRST: today, AGAIN: today, PLACEBO: today, OTHER: one, ANOTHER: other}
    return [AuditCall(question, index, TODAY, each, order, spaces.get(each, 0)) for each, order in orders.items()]


def _other_orders(question: Question, seed: str) -> tuple[Order, Order]:
    """Return two random orders whose documents differ from today's, and from each other if they can."""
    source, today = random.Random(seed), tuple(each.canonical_key for each in question.segments)
    found: dict[tuple[Any, ...], Order] = {today: ()}
    for _ in range(50):
        order = tuple(source.sample(range(len(today)), len(today)))
        found.setdefault(tuple(today[place] for place in order), order)
    one, other = (list(found.values())[1:] * 2)[:2]
    return one, other


def slot_of(question: Question, order: Order) -> int | None:
    """Return in which of the `SLOTS` parts the gold documents are, on average, in an order; None without one."""
    if not question.gold or len(question.gold) == len(question.segments):
        return None
    place = sum(map(order.index, question.gold)) / len(question.gold) / (len(question.segments) - 1)
    return min(SLOTS - 1, int(place * SLOTS))


def _as_given(question: Question) -> Order:
    return tuple(range(len(question.segments)))


def _rotations(question: Question, most: int = VOTES) -> list[Order]:
    """Return evenly spread rotations of the documents; the first one is sorted by a hash of their content."""
    keys = [(each.content_hash, each.canonical_key) for each in question.segments]
    order = tuple(sorted(range(len(keys)), key=keys.__getitem__))
    wanted = min(most, len(order))
    return [order[start:] + order[:start] for start in (len(order) * index // wanted for index in range(wanted))]


class Remedy(NamedTuple):
    """A way to ask so that the order matters less: the orders of one answer, whether today's then changes nothing."""

    about: str
    fixes: bool
    orders: Callable[[Question], list[Order]]
    votes: int = 1

    def calls(self, name: str, question: Question, index: int) -> list[AuditCall]:
        """Return the calls about a question: one as it is, one with the placebo, like those of today."""
        draws = product(range(DRAWS), enumerate(self.orders(question)))
        return [AuditCall(question, index, name, draw, order, spaces=draw, vote=vote) for draw, (vote, order) in draws]


LISTINGS = {  # remedies for every system
    "sort": Remedy("documents sorted by a hash of their text", True, lambda asked: _rotations(asked, 1)),
    "reverse": Remedy("documents in the reverse of the order of today", False, lambda asked: [_as_given(asked)[::-1]]),
    "ends-first": Remedy(
        "the first documents of today at both ends, the others in the middle",
        False,
        lambda asked: [_as_given(asked)[::2] + _as_given(asked)[1::2][::-1]],  # 0 2 4 3 1
    ),
    "vote": Remedy(f"a majority over up to {VOTES} orders", True, _rotations, VOTES),
}


def most_calls(names: Iterable[str]) -> int:
    """Return how many calls a question takes with remedies, at most."""
    return sum(DRAWS * (LISTINGS[name].votes if name in LISTINGS else 1) for name in names)


def build_remedies(names: Iterable[str], system: System) -> dict[str, tuple[Remedy, Ask]]:
    """Return remedies, each with what asks the system, or its model with another method; refuse what does not apply."""
    found: dict[str, tuple[Remedy, Ask]] = {}
    for name in names:
        if name in LISTINGS:
            found[name] = LISTINGS[name], system.ask
        elif system.lm is None:
            message = f"{name!r} changes the inside of a model, and this system is not one of ours"
            raise UnsupportedCombination(message, hint=f"For any system there are {', '.join(LISTINGS)}.")
        else:
            model = getattr(system.lm, "invariant_branch", system.lm).with_method(resolve_method(name))
            about = f"the method {name}, which does not depend on the order"
            remedy = Remedy(about, True, lambda question: [_as_given(question)])
            found[name] = remedy, lm_ask_function(model, system.message, system.generation)
    return found


def choose_remedies(system: System, slots: Sequence[float | None], questions: Sequence[Question]) -> list[str]:
    """Return the remedies that are worth their calls: sorting, RoToR where there are weights, and a listing by rank.

    That moves the gold documents, and the accuracy of the places (`slots`) says what it would give.
    """

    def promised(orders: Callable[[Question], list[Order]]) -> float:
        places = [slot_of(each, orders(each)[0]) for each in questions]
        found = [slots[place] or 0.0 for place in places if place is not None and slots[place] is not None]
        return sum(found) / len(found) if found else 0.0

    gives = {name: promised(LISTINGS[name].orders) for name in ("reverse", "ends-first")}
    best = max(gives, key=gives.__getitem__)
    names = ["sort", *([best] if gives[best] > promised(lambda each: [_as_given(each)]) else [])]
    return [*names, "rotor"] if system.lm is not None and system.lm.method.name != "rotor" else names


def _choice(default: Any, about: str, **bounds: Any) -> Any:
    return field(default=default, metadata={"about": about, **bounds})


@dataclass(frozen=True)
class AuditChoices:
    """How an audit is made.

    Attributes:
        remedies: What to compare with today: `sort`, `reverse`, `ends-first`, `vote`, and for an `InvariantModel` the
            names of invariant methods. None: those that are worth their calls, if the order matters; (): none.
        metric: A function `(answer, gold answers) -> number from 0 to 1`: an answer is right from 0.5 on. None: if it
            gives a gold answer as whole tokens; see `invariant_rag.audit.matching.is_right`.
        judge: Grades instead of the metric, and says which answers mean the same: a model, an `Endpoint`, a URL, or a
            function from a prompt to text; see `invariant_rag.audit.grading.AnswerJudge`.
        margin: Net sensitivity below which the order does not matter.
        k: Segments to retrieve, where a retriever is asked.
        seed, workers, retries: Seed of the orders; threads that make calls; tries of a failed call after the first.
        fields: Names of your fields by ours, such as `{"question": "frage"}`.
        generation: Keywords of `InvariantModel.generate`, for our models.
    """

    remedies: tuple[str, ...] | None = _choice(
        None, "sort, reverse, ends-first, vote or a method. Repeatable.", option="--remedy", shown="a few if it matters"
    )
    metric: Any = None
    judge: Any = _choice(  # noqa: RUF009 - a field, as dataclasses.field makes one
        None, "Grade by this model or the server at this URL.", shown="none", metavar="MODEL|URL"
    )
    margin: float = _choice(0.05, "Net sensitivity below which the order does not matter.")
    k: int = _choice(10, "Segments to retrieve.", min=1)
    seed: int = _choice(0, "Seed of the orders.", min=0)
    workers: int = _choice(1, "Threads that make calls.", min=1, max=checks.MOST_CALLS)
    retries: int = _choice(3, "Further tries of a failed call, with growing pauses.", min=0, max=checks.MOST_CALLS)
    fields: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"about": "A field of yours: question=frage. Repeatable.", "option": "--field", "shown": "none"},
    )
    generation: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if "min" in each.metadata:
                checks.check_number(each.name, getattr(self, each.name), each.metadata["min"], each.metadata.get("max"))
        if self.remedies is not None:
            object.__setattr__(self, "remedies", tuple(checks.check_items("remedies", self.remedies, str)))
            known = [*LISTINGS, *(name for name, method in METHODS.items() if method.invariant)]
            for name in self.remedies:
                checks.check_name("remedy", name, known)
        if self.metric is not None:
            checks.check_function("metric", self.metric)
        if not 0 < checks.check_real("margin", self.margin) < 1:
            raise InvalidChoice(f"margin: expected a share between 0 and 1, got {self.margin}")
        for name in ("fields", "generation"):
            checks.check_kind(name, getattr(self, name), Mapping)  # type: ignore[type-abstract]

    def changed(self, changes: Mapping[str, Any]) -> AuditChoices:
        """Return these choices with some changed."""
        known = [each.name for each in dataclasses.fields(self)]
        hint = f"Choices are {', '.join(known)}; keywords of a model go into generation={{...}}."
        for name in changes.keys() - known:
            raise InvalidChoice(f"audit takes no {name!r}", hint=hint)
        return replace(self, **changes)
