"""Plan the calls of an audit: orders of the documents, and the placebo. They follow from the questions and the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from invariant_rag.audit.questions import Question
from invariant_rag.audit.screen import AGAIN, ANOTHER, FIRST, OTHER, PLACEBO, REPEATED
from invariant_rag.segments import Segment

Order = tuple[int, ...]
"""Indices into the segments as given; that at position 0 comes first in the prompt."""

TODAY = "today"
"""Name of the system as it is, with the documents in the order of today."""

_ATTEMPTS = 50


@dataclass(frozen=True)
class Call:
    """One call of the system under audit.

    Attributes:
        index: Number of the question in the run.
        arm: `today`, or the name of a remedy.
        draw: Column of the screen, or which draw of a remedy.
        order: The order of the documents.
        segments: The documents as they are given.
        vote: Which call of a vote this is.
    """

    index: int
    arm: str
    draw: int
    order: Order
    segments: tuple[Segment, ...]
    vote: int = 0

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
    today = tuple(range(len(question.segments)))
    one, other = _other_orders(question, f"{seed} {index} {question.text!r}")
    plain = question.segments
    again = plain if place < REPEATED else placebo(question, 2)
    calls = {FIRST: (today, plain), AGAIN: (today, again), PLACEBO: (today, placebo(question, 1))}
    calls |= {OTHER: (one, listed(question, one)), ANOTHER: (other, listed(question, other))}
    return [Call(index, TODAY, column, *calls[column]) for column in sorted(calls)]


def listed(question: Question, order: Order) -> tuple[Segment, ...]:
    """Return the documents of a question in an order."""
    return tuple(question.segments[place] for place in order)


def placebo(question: Question, spaces: int) -> tuple[Segment, ...]:
    """Return the documents in the order of today, with more spaces in one of them, if possible one without the answer.

    This changes the prompt, so that no cache and no seed gives the same draw again, and cannot matter to what it says.
    """
    places = [place for place in range(len(question.segments)) if place not in question.gold]
    chosen = places[-1] if places else len(question.segments) - 1
    segments = list(question.segments)
    segment = segments[chosen]
    if segment.token_ids is None:
        text = segment.text
        wider = text.replace(" ", " " * (1 + spaces), 1) if " " in text.strip() else text + "\n" * spaces
        segments[chosen] = replace(segment, text=wider)
    return tuple(segments)


def _other_orders(question: Question, seed: str) -> tuple[Order, Order]:
    """Return two random orders whose documents read differently from today's, and from each other if they can."""
    source, count = random.Random(seed), len(question.segments)
    found: list[Order] = []
    seen = {tuple(each.canonical_key for each in question.segments)}
    for _ in range(_ATTEMPTS):
        order = tuple(source.sample(range(count), count))
        content = tuple(question.segments[place].canonical_key for place in order)
        if content not in seen:
            seen.add(content)
            found.append(order)
        if len(found) == 2:
            break
    return found[0], found[-1]


def relative_places(question: Question, orders: Sequence[Order]) -> list[float | None]:
    """Return where the gold documents stand, on average, in each order: 0 first, 1 last; None without one."""
    if not question.gold or len(question.gold) == len(question.segments):
        return [None] * len(orders)
    last = len(question.segments) - 1
    return [sum(map(order.index, question.gold)) / len(question.gold) / last for order in orders]
