"""Everything that an audit asks about one question, fixed before the first call: a function of content and seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from invariant_rag.evaluation.audit.orders import Order, gold_at, input_orders, room, salt_for, slot_starts
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.remedies import Call, Variant


@dataclass(frozen=True)
class Ask:
    """A call about a question, counted by how often that very call was to be made before."""

    question: Question
    call: Call
    repeat: int = 0

    @cached_property
    def key(self) -> str:
        """SHA-256 of all that the answer may depend on: who is asked, question, segments in order, and repeat."""
        listed = self.call.listed(self.question)
        segments = [(each.content_hash, None if each.score is None else float(each.score)) for each in listed]
        content = [self.call.asker, self.question.text, self.question.pairwise, segments, self.call.salt, self.repeat]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


Answer = tuple[Ask, ...]
"""The asks that make one answer."""


@dataclass(frozen=True)
class Plan:
    """What is asked about one question in one way.

    Attributes:
        orders: One answer per input order, that given first.
        slots: One per gold slot, the other segments as given; none where the question sits out.
        salts: One per salted canonical order; the j-th puts the gold segments into the j-th slot where there is one.
        repeats: The order given, again and again; the first is also the first of `orders`.
    """

    orders: tuple[Answer, ...]
    slots: tuple[Answer, ...]
    salts: tuple[Answer, ...]
    repeats: tuple[Answer, ...]

    @property
    def asks(self) -> list[Ask]:
        """Every ask, each key once."""
        answers = (*self.orders, *self.slots, *self.salts, *self.repeats)
        return list({ask.key: ask for answer in answers for ask in answer}.values())


@dataclass(frozen=True)
class Design:
    """How much is asked.

    Attributes:
        orders: Input orders of a question with more than 4 segments.
        slots: Gold slots, and salted orders; for a question that sits out, salted orders only.
        repeats: How often the order given is asked.
        seed: Seed of orders and salts.
    """

    orders: int
    slots: int
    repeats: int
    seed: int

    def plans(self, question: Question, variants: Sequence[Variant]) -> list[Plan]:
        """Lay down what is asked about a question in each way."""
        count = len(question.segments)
        seed = f"{self.seed}:{question.text}"
        starts = self.starts(question)
        listed = input_orders(count, self.orders, seed)
        moved = [gold_at(count, question.gold, start) for start in starts]
        salts = [salt_for(question.segments, question.gold, start, seed) for start in starts]
        salts = salts or [f"{seed}:{number}" for number in range(self.slots)]
        return [self._plan(question, variant, listed, moved, salts) for variant in variants]

    def _plan(
        self,
        question: Question,
        variant: Variant,
        listed: Sequence[Order],
        moved: Sequence[Order],
        salts: Sequence[str],
    ) -> Plan:
        def answer(order: Order, salt: str | None = None, repeat: int = 0) -> Answer:
            return tuple(Ask(question, call, repeat) for call in variant.calls(question, order, salt))

        given = listed[0]
        # What reads every order alike makes the same call for each: some are made anew, lest chance look like a law.
        again = self.repeats if variant.collapses else 1
        return Plan(
            orders=tuple(answer(order, repeat=index % again) for index, order in enumerate(listed)),
            slots=tuple(map(answer, moved)),
            salts=tuple(answer(given, salt) for salt in salts) if variant.has_salts else (),
            repeats=tuple(answer(given, repeat=repeat) for repeat in range(self.repeats)),
        )

    def starts(self, question: Question) -> list[int]:
        """Return where the gold segments begin in each slot; nothing for a question without room for the slots."""
        places = room(len(question.segments), question.gold)
        return slot_starts(places, self.slots) if places >= self.slots else []


def common_slots(questions: Sequence[Question], most: int) -> int:
    """Return the number of gold slots, 2 to `most`, that makes most of the questions' rooms.

    Questions with room for fewer slots sit out, so that every slot is measured on the same questions. The number
    maximises (questions that take part) x (slots - 1).

    >>> common_slots([], 5)
    5
    """
    rooms = [room(len(each.segments), each.gold) for each in questions]
    worth = {slots: sum(each >= slots for each in rooms) * (slots - 1) for slots in range(2, most + 1)}
    return max(worth, key=lambda slots: (worth[slots], slots))
