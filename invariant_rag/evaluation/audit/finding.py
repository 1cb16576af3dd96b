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
    """

    kind: Kind
    p: float
    questions: int
    needed: int
    noise: Estimate | None

    @classmethod
    def of(cls, system: RemedyMeasures, effects: Effects, questions: int) -> Finding:
        """Find what the order does.

        Args:
            system: The measures of the system as it is.
            effects: What was tested.
            questions: Number of questions that the measures are about.
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
        return cls(kind, order.p, questions, needed, noise)

    @property
    def answer(self) -> str:
        """The answer to "Is that more than noise?", with the verdict."""
        return f"{_ANSWERS[self.kind]} {self.verdict}"

    @property
    def asked(self) -> str:
        """How many questions were asked, with the verb of a sentence about them."""
        return f"{counted(self.questions, 'question')} {'is' if self.questions == 1 else 'are'}"

    @property
    def verdict(self) -> str:
        """Whether the order matters, in a sentence."""
        p = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.3f}"
        above = f"{p}; it would count from {ORDER_LEVEL} down"
        too_few = f"{self.asked} too few to tell: about {self.needed:,} would do"
        if self.kind is Kind.MATTERS:
            return f"The order of the documents matters: chance alone hardly changes as much ({p})."
        if self.kind is Kind.OWN_RULE:
            return (
                "The order in which documents are given does not matter, but hashes before the documents do: the "
                "system seems to order them by a rule of its own, and that order matters."
            )
        if self.kind is Kind.UNKNOWN and self.noise is not None:
            return f"Answers change even when nothing is moved; whether the order adds to that ({above}), {too_few}."
        if self.kind is Kind.UNKNOWN:
            return f"No effect of the order was found ({above}), but {too_few}."
        if self.kind is Kind.NOISE:
            return f"Answers change even when nothing is moved; the order adds nothing that counts ({above})."
        return (
            f"The order of the documents makes no difference that counts ({above}), and "
            f"{self.asked} enough to see one of 10 points."
        )


def single_slot(system: RemedyMeasures) -> str:
    """Return sentences about a system that reads one slot (almost) alone; "" about any other, and about judges."""
    ranked = sorted(range(len(system.slots)), key=lambda slot: -system.slots[slot].value)
    if len(ranked) < 2 or "position_consistency" in system.measures:
        return ""
    best, others = system.slots[ranked[0]], [system.slots[slot] for slot in ranked[1:]]
    if best.low <= STANDS_OUT * max(each.high for each in others):
        return ""
    ends = {0: "the first slot", len(ranked) - 1: "the last slot"}
    place = ends.get(ranked[0], f"slot {ranked[0] + 1} of {len(ranked)}")
    today = system.measures.get("today")
    missed = "" if today is None or today.high >= best.low else " Put the best document there: today it rarely is."
    return (
        f"The system reads one slot (almost) alone: with the right document in {place}, {best.value:.1%} of the "
        f"answers are right, in any other at most {max(each.value for each in others):.1%}. So everything rides on the "
        f"order in which your retriever lists.{missed}"
    )
