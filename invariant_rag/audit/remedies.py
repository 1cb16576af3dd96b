"""Remedies against order sensitivity: other listings of the documents, a vote, and methods of an `InvariantModel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from invariant_rag.audit.plan import Call, Order, listed, placebo, relative_places
from invariant_rag.audit.questions import Question
from invariant_rag.audit.systems import Ask, System, lm_ask_function
from invariant_rag.checks import check_name
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.methods import METHODS, resolve_method

DRAWS = 2
"""Calls, or votes, of each question with a remedy; it is compared with as many distinct draws of today."""

VOTES = 5
"""Most orders that a majority vote asks."""

SLOTS = 5
"""Parts of the prompt, from the first to the last place, of which accuracy is measured."""


def ends_first(count: int) -> Order:
    """Return the ranks with the best at both ends, the worst in the middle.

    >>> ends_first(5)
    (0, 2, 4, 3, 1)
    """
    ranks = tuple(range(count))
    return ranks[::2] + ranks[1::2][::-1]


def sorted_order(question: Question) -> Order:
    """Return the documents by a hash of their content: one order for all listings."""
    keys = [(each.content_hash, each.canonical_key) for each in question.segments]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))


def rotated_orders(question: Question) -> list[Order]:
    """Return up to `VOTES` evenly spread rotations of the sorted order; that order itself comes first."""
    order = sorted_order(question)
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
        orders = self.orders(question)
        shown = [question, replace(question, segments=placebo(question, 1))]
        return [
            Call(index, self.name, draw, order, listed(shown[draw], order), vote)
            for draw in range(DRAWS)
            for vote, order in enumerate(orders)
        ]


LISTINGS: dict[str, tuple[Callable[[Question], list[Order]], bool, str]] = {
    "sort": (lambda question: [sorted_order(question)], True, "documents sorted by a hash of their text"),
    "reverse": (
        lambda question: [tuple(range(len(question.segments)))[::-1]],
        False,
        "documents in the reverse of the order of today",
    ),
    "ends-first": (
        lambda question: [ends_first(len(question.segments))],
        False,
        "the first documents of today at both ends, the others in the middle",
    ),
    "vote": (rotated_orders, True, f"a majority over up to {VOTES} orders"),
}
"""Remedies for every system: the orders that one answer takes, whether the order of today changes nothing after it, and
what it does."""


def check_remedies(names: Sequence[str] | None, system: System | None = None) -> None:
    """Check the names of remedies, and whether they apply to a system.

    Raises:
        UnknownName: There is no remedy of that name; the message lists the names.
        UnsupportedCombination: It changes the inside of a model, and the system is not one of ours.
    """
    known = [*LISTINGS, *(name for name, method in METHODS.items() if method.invariant)]
    for name in names or ():
        check_name("remedy", name, known)
        if system is not None and system.lm is None and name not in LISTINGS:
            raise UnsupportedCombination(
                f"{name!r} changes the inside of a model, and this system is not one of ours",
                hint=f"For any system there are {', '.join(LISTINGS)}.",
            )


def build_remedies(names: Sequence[str], system: System) -> list[Remedy]:
    """Return remedies by name, each once.

    Raises:
        UnknownName: There is no remedy of that name.
        UnsupportedCombination: It does not apply to this system.
    """
    check_remedies(names, system)
    found = []
    for name in dict.fromkeys(names):
        if name in LISTINGS:
            found.append(Remedy(name, system.ask, *LISTINGS[name], VOTES if name == "vote" else 1))
        elif system.lm is not None:
            model = getattr(system.lm, "invariant_branch", system.lm).with_method(resolve_method(name))
            ask = lm_ask_function(model, system.message, system.generation)
            about = f"the method {name}, which does not depend on the order"
            found.append(Remedy(name, ask, lambda question: [tuple(range(len(question.segments)))], True, about))
    return found


def choose_remedies(system: System, slots: Sequence[float | None], questions: Sequence[Question]) -> list[str]:
    """Return the remedies that are worth their calls: sorting, the best listing by rank, RoToR where there are weights.

    A listing by rank moves the gold documents from where they stand today to other places. What that would give follows
    from the accuracy of the places; the better of `reverse` and `ends-first` is tried if it promises a gain.

    Args:
        system: The system.
        slots: Accuracy in each of the `SLOTS` parts, in random orders; None: unknown.
        questions: The questions that were asked.
    """
    names = ["sort"]
    gives = {name: _promised(slots, questions, name) for name in ("today", "reverse", "ends-first")}
    best = max(("reverse", "ends-first"), key=gives.__getitem__)
    if gives[best] > gives["today"]:
        names.append(best)
    if system.lm is not None and system.lm.method.name != "rotor":
        names.append("rotor")
    return names


def _promised(slots: Sequence[float | None], questions: Sequence[Question], name: str) -> float:
    """Return the accuracy that a listing promises, from that of the places where it puts the gold documents."""
    found = []
    for question in questions:
        order = tuple(range(len(question.segments))) if name == "today" else LISTINGS[name][0](question)[0]
        (place,) = relative_places(question, [order])
        known = None if place is None else slots[slot_of(place)]
        if known is not None:
            found.append(known)
    return sum(found) / len(found) if found else 0.0


def slot_of(place: float) -> int:
    """Return in which of the `SLOTS` parts a relative place is.

    >>> slot_of(0.0), slot_of(0.5), slot_of(1.0)
    (0, 2, 4)
    """
    return min(SLOTS - 1, int(place * SLOTS))
