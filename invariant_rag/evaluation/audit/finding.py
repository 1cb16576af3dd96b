"""What an audit finds about the order: one finding, which verdict, advice and report share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from invariant_rag.evaluation.audit.effects import NEGLIGIBLE, ORDER_LEVEL, Effects
from invariant_rag.evaluation.audit.measures import RemedyMeasures
from invariant_rag.evaluation.statistics import Estimate, zero_share_upper_bound
from invariant_rag.shown import counted

MAX_UNSEEN_FLIPS = 0.05
"""Upper bound of the flip rate up to which no flip means that order does not matter."""

ENOUGH = 59
"""So many questions without a flip bound the flip rate by that."""

STANDS_OUT = 2
"""A slot stands out where answers are surely so many times as often right as with any other slot."""


class Kind(Enum):
    """What the order does."""

    MATTERS = "matters"
    OWN_RULE = "the system orders by a rule of its own"
    NOISE = "answers change as much when nothing is moved"
    NOTHING = "nothing"
    UNKNOWN = "too few questions"


_ANSWERS = {
    Kind.MATTERS: "Yes.",
    Kind.OWN_RULE: "Yes, that of an order of its own.",
    Kind.NOISE: "No.",
    Kind.NOTHING: "No.",
    Kind.UNKNOWN: "That cannot be told yet.",
}


@dataclass(frozen=True)
class Finding:
    """What an audit finds about the order.

    Attributes:
        kind: What the order does.
        p: The p-value of the order.
        questions: Number of questions that were asked.
        needed: How many would do to see an effect of 10 points, and to rule out flips.
        noise: How likely two calls in the same order are to have different outcomes, if that is more than negligible.
        failed: Share of the calls that failed, if those were many; else 0.
    """

    kind: Kind
    p: float
    questions: int
    needed: int
    noise: Estimate | None
    failed: float = 0.0

    @classmethod
    def of(cls, system: RemedyMeasures, effects: Effects, questions: int, failed: float = 0.0) -> Finding:
        """Find what the order does.

        Args:
            system: The measures of the system as it is.
            effects: What was tested.
            questions: Number of questions that the measures are about.
            failed: Share of the calls that failed, if those were many.
        """
        order, found = effects.order, system.measures
        unseen = found["flip_rate"].value == 0 and zero_share_upper_bound(questions) > MAX_UNSEEN_FLIPS
        needed = max(order.needed, ENOUGH if unseen else 0)
        noise = found.get("noise")
        noise = noise if noise is not None and noise.low > NEGLIGIBLE else None
        if order.has_own_rule:
            kind = Kind.OWN_RULE
        elif order.is_real:
            kind = Kind.MATTERS
        elif questions < needed:
            kind = Kind.UNKNOWN
        else:
            kind = Kind.NOTHING if noise is None else Kind.NOISE
        return cls(kind, order.p, questions, needed, noise, failed)

    @property
    def answer(self) -> str:
        """The answer to "Is that more than noise?", with the verdict."""
        return f"{_ANSWERS[self.kind]} {self.verdict}"

    @property
    def asked(self) -> str:
        """How many questions were asked, with the verb of a sentence about them."""
        return f"{counted(self.questions, 'question')} {'is' if self.questions == 1 else 'are'}"

    @property
    def more(self) -> str:
        """How many questions to use, if they were too few."""
        return f"use about {rounded_up(self.needed):,}"

    @property
    def verdict(self) -> str:
        """Whether the order matters, in a sentence; after another one where many calls failed."""
        if not self.failed:
            return self._verdict
        return (
            f"{self.failed:.0%} of the calls failed; whether the order makes them fail was not tested. {self._verdict}"
        )

    @property
    def _verdict(self) -> str:
        p = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.3f}"
        above = f"{p}; below {ORDER_LEVEL} would count"
        if self.kind is Kind.MATTERS:
            return f"The order of the documents matters: it changes answers more than chance explains ({p})."
        if self.kind is Kind.OWN_RULE:
            return (
                "The order in which documents are given does not matter, but hashes before the documents do: the "
                "system seems to order them by a rule of its own, and that order matters."
            )
        if self.kind is Kind.UNKNOWN and self.noise is not None:
            return (
                "Answers change even when the same order is asked twice. Whether the order adds to that cannot be told "
                f"from {counted(self.questions, 'question')} ({above}): {self.more}."
            )
        if self.kind is Kind.UNKNOWN:
            return f"No effect of the order was found ({above}), but {self.asked} too few to tell: {self.more}."
        if self.kind is Kind.NOISE:
            return (
                f"Answers change even when the same order is asked twice; the order adds nothing that counts ({above})."
            )
        return (
            f"The order of the documents makes no difference that counts ({above}), and "
            f"{self.asked} enough to see one of 10 points."
        )


def rounded_up(count: int) -> int:
    """Return a count with two digits that count, and no less: an estimate is no more exact than that.

    >>> rounded_up(1399), rounded_up(102), rounded_up(59)
    (1400, 110, 59)
    """
    step = int("1" + "0" * (len(str(count)) - 2))
    return -(-count // step) * step


@dataclass(frozen=True)
class SingleSlot:
    """The one slot that a system reads (almost) alone.

    Attributes:
        index: The slot, from 0 on.
        slots: How many slots were compared.
        right: Accuracy with the right document in it.
        elsewhere: The best accuracy with that document in any other slot.
        missed: Whether surely fewer answers are right today, so that today's order rarely puts that document there.
    """

    index: int
    slots: int
    right: float
    elsewhere: float
    missed: bool

    @property
    def place(self) -> str:
        """The slot in words."""
        ends = {0: "the first slot", self.slots - 1: "the last slot"}
        return ends.get(self.index, f"slot {self.index + 1} of {self.slots}")

    @property
    def advice(self) -> str:
        """What to do, in a sentence."""
        where = {0: "comes first", self.slots - 1: "comes last"}.get(self.index, f"comes into {self.place}")
        alone = "almost alone" if self.elsewhere else "alone"
        return f"Rerank so that the best document {where}: the system answers from {self.place} {alone}."

    @property
    def description(self) -> str:
        """What was measured, in sentences."""
        elsewhere = f"at most {self.elsewhere:.1%}" if self.elsewhere else "none"
        today = " Today it rarely is there." if self.missed else ""
        return (
            f"The system reads one slot (almost) alone: with the right document in {self.place}, {self.right:.1%} of "
            f"the answers are right, in any other {elsewhere}. So everything rides on the order in which your "
            f"retriever lists.{today}"
        )


def single_slot(system: RemedyMeasures) -> SingleSlot | None:
    """Return the slot that a system reads (almost) alone; None for any other system, and for judges."""
    ranked = sorted(range(len(system.slots)), key=lambda slot: -system.slots[slot].value)
    if len(ranked) < 2 or "position_consistency" in system.measures:
        return None
    best, others = system.slots[ranked[0]], [system.slots[slot] for slot in ranked[1:]]
    if best.low <= STANDS_OUT * max(each.high for each in others):
        return None
    today = system.measures.get("today")
    missed = today is not None and today.high < best.low
    return SingleSlot(ranked[0], len(ranked), best.value, max(each.value for each in others), missed)
