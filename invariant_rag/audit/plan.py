"""Plan the calls of an audit: orders of the documents, the placebo, remedies. They follow from questions and seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from invariant_rag.audit.questions import Question
from invariant_rag.audit.screen import AGAIN, ANOTHER, FIRST, OTHER, PLACEBO, REPEATED
from invariant_rag.audit.systems import Ask, System, lm_ask_function
from invariant_rag.checks import check_name
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.methods import METHODS, resolve_method
from invariant_rag.segments import Segment

Order = tuple[int, ...]
"""Indices into the segments as given; that at position 0 comes first in the prompt."""

TODAY = "today"
"""Name of the system as it is, with the documents in the order of today."""

DRAWS = 2
"""Calls, or votes, of each question with a remedy; it is compared with as many distinct draws of today."""

VOTES = 5
"""Most orders that a majority vote asks."""

SLOTS = 5
"""Parts of the prompt, from the first to the last place, of which accuracy is measured."""


@dataclass(frozen=True)
class Call:
    """One call of the system under audit.

    Attributes:
        question: The question.
        index: Its number in the run.
        arm: `today`, or the name of a remedy.
        draw: Column of the screen, or which draw of a remedy.
        order: The order of the documents.
        spaces: Spaces of the placebo.
        vote: Which call of a vote this is.
    """

    question: Question
    index: int
    arm: str
    draw: int
    order: Order
    spaces: int = 0
    vote: int = 0

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The documents as they are given."""
        segments = _spaced(self.question, self.spaces)
        return tuple(segments[place] for place in self.order)

    @property
    def key(self) -> str:
        """What the call is in the run, such as `12 today 3`."""
        return f"{self.index} {self.arm} {self.draw}" + (f" {self.vote}" if self.vote else "")


def asking_order(count: int, seed: int) -> list[int]:
    """Return in which order the questions are asked: a file is often sorted by topic, and an audit may stop early."""
    return random.Random(f"{seed} questions").sample(range(count), count)


def has_orders(question: Question) -> bool:
    """Return whether two orders of the documents differ."""
    return len({each.canonical_key for each in question.segments}) > 1


def screen_calls(question: Question, index: int, place: int, seed: int) -> list[Call]:
    """Return the five calls of the screen about a question.

    Args:
        question: The question.
        index: Its number.
        place: How many questions are asked before it. Of the first `REPEATED`, the second call is a plain repeat; of
            the others a placebo, which no cache can answer.
        seed: Seed of the orders.
    """
    today = _as_given(question)
    one, other = _other_orders(question, f"{seed} {index} {question.text!r}")
    spaces = {AGAIN: 0 if place < REPEATED else 2, PLACEBO: 1}
    orders = {FIRST: today, AGAIN: today, PLACEBO: today, OTHER: one, ANOTHER: other}
    return [Call(question, index, TODAY, each, order, spaces.get(each, 0)) for each, order in orders.items()]


def _spaced(question: Question, spaces: int) -> list[Segment]:
    """Return the documents in the order of today, with more spaces in one of them, if possible one without the answer.

    This changes the prompt, so that no cache and no seed gives the same draw again, and cannot matter to what it says.
    """
    segments = list(question.segments)
    places = [place for place in range(len(segments)) if place not in question.gold] or [len(segments) - 1]
    segment = segments[places[-1]]
    if spaces and segment.token_ids is None:
        text = segment.text
        wider = text.replace(" ", " " * (1 + spaces), 1) if " " in text.strip() else text + "\n" * spaces
        segments[places[-1]] = replace(segment, text=wider)
    return segments


def _other_orders(question: Question, seed: str) -> tuple[Order, Order]:
    """Return two random orders whose documents differ from today's, and from each other if they can."""
    source, found = random.Random(seed), dict[tuple[Any, ...], Order]()
    today = tuple(each.canonical_key for each in question.segments)
    for _ in range(50):
        order = tuple(source.sample(range(len(today)), len(today)))
        content = tuple(today[place] for place in order)
        if content != today:
            found.setdefault(content, order)
        if len(found) == 2:
            break
    orders = list(found.values())
    return orders[0], orders[-1]


def relative_place(question: Question, order: Order) -> float | None:
    """Return where the gold documents are, on average, in an order: 0 first, 1 last; None without one."""
    if not question.gold or len(question.gold) == len(question.segments):
        return None
    return sum(map(order.index, question.gold)) / len(question.gold) / (len(question.segments) - 1)


def slot_of(place: float) -> int:
    """Return in which of the `SLOTS` parts a relative place is.

    >>> slot_of(0.0), slot_of(0.5), slot_of(1.0)
    (0, 2, 4)
    """
    return min(SLOTS - 1, int(place * SLOTS))


def _as_given(question: Question) -> Order:
    return tuple(range(len(question.segments)))


def _sorted_order(question: Question) -> Order:
    """Return the documents by a hash of their content: one order for all listings."""
    keys = [(each.content_hash, each.canonical_key) for each in question.segments]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))


def _rotations(question: Question) -> list[Order]:
    """Return up to `VOTES` evenly spread rotations of the sorted order; that order itself comes first."""
    order = _sorted_order(question)
    wanted = min(VOTES, len(order))
    starts = [len(order) * index // wanted for index in range(wanted)]
    return [order[start:] + order[:start] for start in starts]


@dataclass(frozen=True)
class Remedy:
    """A way to ask the system so that the order matters less, or is better.

    Attributes:
        name: Name in reports.
        ask: Calls the system, or the same model with another method.
        orders: The orders that one answer takes.
        fixes: Whether the order of today changes nothing after it, by construction.
        about: What it does, in a few words.
        votes: Calls for one answer, at most.
    """

    name: str
    ask: Ask
    orders: Callable[[Question], list[Order]]
    fixes: bool
    about: str
    votes: int = 1

    def calls(self, question: Question, index: int) -> list[Call]:
        """Return the calls about a question: one as it is, one with the placebo, like those of today."""
        return [
            Call(question, index, self.name, draw, order, spaces=draw, vote=vote)
            for draw in range(DRAWS)
            for vote, order in enumerate(self.orders(question))
        ]


LISTINGS: dict[str, tuple[Callable[[Question], list[Order]], bool, str]] = {
    "sort": (lambda question: [_sorted_order(question)], True, "documents sorted by a hash of their text"),
    "reverse": (lambda question: [_as_given(question)[::-1]], False, "documents in the reverse of the order of today"),
    "ends-first": (  # 0 2 4 3 1
        lambda question: [_as_given(question)[::2] + _as_given(question)[1::2][::-1]],
        False,
        "the first documents of today at both ends, the others in the middle",
    ),
    "vote": (_rotations, True, f"a majority over up to {VOTES} orders"),
}
"""Remedies for every system: the orders that one answer takes, whether the order of today changes nothing after it, and
what it does."""


def check_remedies(names: Sequence[str] | None, system: System | None = None) -> None:
    """Check the names of remedies, and whether they apply to a system."""
    known = [*LISTINGS, *(name for name, method in METHODS.items() if method.invariant)]
    for name in names or ():
        check_name("remedy", name, known)
        if system is not None and system.lm is None and name not in LISTINGS:
            raise UnsupportedCombination(
                f"{name!r} changes the inside of a model, and this system is not one of ours",
                hint=f"For any system there are {', '.join(LISTINGS)}.",
            )


def build_remedies(names: Sequence[str], system: System) -> list[Remedy]:
    """Return remedies of checked names, each once."""
    found = []
    for name in dict.fromkeys(names):
        if name in LISTINGS:
            found.append(Remedy(name, system.ask, *LISTINGS[name], VOTES if name == "vote" else 1))
        elif system.lm is not None:
            model = getattr(system.lm, "invariant_branch", system.lm).with_method(resolve_method(name))
            ask = lm_ask_function(model, system.message, system.generation)
            about = f"the method {name}, which does not depend on the order"
            found.append(Remedy(name, ask, lambda question: [_as_given(question)], True, about))
    return found


def choose_remedies(system: System, slots: Sequence[float | None], questions: Sequence[Question]) -> list[str]:
    """Return the remedies that are worth their calls: sorting, the best listing by rank, RoToR where there are weights.

    A listing by rank moves the gold documents to other places. What that would give follows from the accuracy of the
    places; the better of `reverse` and `ends-first` is tried if it promises a gain.

    Args:
        system: The system.
        slots: Accuracy in each of the `SLOTS` parts, in random orders; None: unknown.
        questions: The questions that were asked.
    """

    def promised(orders: Callable[[Question], list[Order]]) -> float:
        places = [relative_place(each, orders(each)[0]) for each in questions]
        known = [slots[slot_of(place)] for place in places if place is not None]
        found = [each for each in known if each is not None]
        return sum(found) / len(found) if found else 0.0

    gives = {name: promised(LISTINGS[name][0]) for name in ("reverse", "ends-first")}
    best = max(gives, key=gives.__getitem__)
    names = ["sort", *([best] if gives[best] > promised(lambda each: [_as_given(each)]) else [])]
    return [*names, "rotor"] if system.lm is not None and system.lm.method.name != "rotor" else names
