"""Plan the calls of an audit about one question. They follow from its content and the seed, and from no answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from invariant_rag.evaluation.audit.orders import (
    TOP,
    Order,
    all_orders,
    count_gold_positions,
    find_salt,
    input_orders,
    move_gold,
    slot_starts,
)
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.remedies import CallSpec, Remedy


@dataclass(frozen=True)
class Call:
    """One call of the system under audit about one question.

    Attributes:
        question: The question.
        spec: Who is called, and how the segments are listed.
        repeat: How many equal calls come before this one. Repeats measure how random the answers are.
    """

    question: Question
    spec: CallSpec
    repeat: int = 0

    @cached_property
    def key(self) -> str:
        """SHA-256 of everything that the answer may depend on: who is called, question, segments in order, repeat."""
        listed = self.spec.listed(self.question)
        segments = [(each.content_hash, None if each.score is None else float(each.score)) for each in listed]
        content = [self.spec.asker, self.question.text, self.question.pairwise, segments, self.spec.salt, self.repeat]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


CallGroup = tuple[Call, ...]
"""The calls whose majority vote is one answer; a single call for every remedy but `vote`."""


@dataclass(frozen=True)
class CallPlan:
    """All calls about one question with one remedy.

    Attributes:
        orders: One group per input order, the given order first.
        slots: One group per gold slot, the other segments as given; empty for questions that are left out.
        salts: One group per salted order; the j-th puts the gold segments into the j-th slot if there is one.
        repeats: The given order, repeatedly; the first is also the first of `orders`.
        top: One group per order of the first five segments alone; empty unless the design has them.
    """

    orders: tuple[CallGroup, ...]
    slots: tuple[CallGroup, ...]
    salts: tuple[CallGroup, ...]
    repeats: tuple[CallGroup, ...]
    top: tuple[CallGroup, ...] = ()

    @property
    def calls(self) -> list[Call]:
        """Every call, each key once."""
        groups = (*self.orders, *self.slots, *self.salts, *self.repeats, *self.top)
        return list({call.key: call for group in groups for call in group}.values())


@dataclass(frozen=True)
class AuditDesign:
    """How many calls are made about each question.

    Attributes:
        orders: Input orders of a question with more than 4 segments.
        slots: Gold slots, and salted orders; questions without room for the slots have salted orders only.
        repeats: How often the given order is asked.
        seed: Seed of orders and salts.
        all_orders: Whether the first five segments of each question are asked in all of their orders.
    """

    orders: int
    slots: int
    repeats: int
    seed: int
    all_orders: bool = False

    def plan_calls(self, question: Question, remedies: Sequence[Remedy]) -> list[CallPlan]:
        """Return the calls about a question, one plan per remedy."""
        seed = f"{self.seed}:{question.text}"
        starts = self.gold_starts(question)
        listed = input_orders(len(question.segments), self.orders, seed)
        moved = [move_gold(len(question.segments), question.gold, start) for start in starts]
        salts = [find_salt(question.segments, question.gold, start, seed) for start in starts]
        salts = salts or [f"{seed}:{number}" for number in range(self.slots)]
        top = _first_segments(question, TOP) if self.all_orders and len(question.segments) > 1 else None
        return [self._plan(question, remedy, listed, moved, salts, top) for remedy in remedies]

    def _plan(
        self,
        question: Question,
        remedy: Remedy,
        listed: Sequence[Order],
        moved: Sequence[Order],
        salts: Sequence[str],
        top: Question | None,
    ) -> CallPlan:
        def group(order: Order, salt: str | None = None, repeat: int = 0, asked: Question = question) -> CallGroup:
            return tuple(Call(asked, spec, repeat) for spec in remedy.call_specs(asked, order, salt))

        given = listed[0]
        # A remedy that fixes the order makes equal calls for all input orders. Some of them are repeated all the same:
        # answers of a random system would otherwise seem stable.
        distinct = self.repeats if remedy.fixes_order else 1
        permuted = [] if top is None else [(order, top) for order in all_orders(len(top.segments))]
        return CallPlan(
            orders=tuple(group(order, repeat=index % distinct) for index, order in enumerate(listed)),
            slots=tuple(map(group, moved)),
            salts=tuple(group(given, salt) for salt in salts) if remedy.can_salt else (),
            repeats=tuple(group(given, repeat=repeat) for repeat in range(self.repeats)),
            top=tuple(group(order, repeat=i % distinct, asked=asked) for i, (order, asked) in enumerate(permuted)),
        )

    def gold_starts(self, question: Question) -> list[int]:
        """Return where the gold segments begin in each slot; empty for a question without room for the slots."""
        positions = count_gold_positions(len(question.segments), question.gold)
        return slot_starts(positions, self.slots) if positions >= self.slots else []


def _first_segments(question: Question, most: int) -> Question:
    """Return the question with at most so many of its segments, those that are listed first."""
    gold = tuple(index for index in question.gold if index < most)
    return replace(question, segments=question.segments[:most], gold=gold)


def common_slots(questions: Sequence[Question], most: int) -> int:
    """Return the number of gold slots, from 2 to `most`, that uses the questions best.

    Questions with room for fewer slots are left out, so that every slot is measured on the same questions. The number
    maximises (questions that are used) x (slots - 1).

    >>> common_slots([], 5)
    5
    """
    positions = [count_gold_positions(len(each.segments), each.gold) for each in questions]
    worth = {slots: sum(each >= slots for each in positions) * (slots - 1) for slots in range(2, most + 1)}
    return max(worth, key=lambda slots: (worth[slots], slots))
