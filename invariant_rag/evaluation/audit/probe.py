"""Does the system read the segments that it is given? One that retrieves others by itself knows no other order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from invariant_rag.errors import AuditFailed
from invariant_rag.evaluation.audit.plan import Ask, Plan
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.runner import AnswerStore

PROBED = 3
"""So many questions are asked with other texts, at most."""


@dataclass(frozen=True)
class Probe:
    """The first questions, asked as they are and with the text of every segment exchanged.

    Attributes:
        given: The questions with their segments in the order given; the audit asks this anyway.
        exchanged: The same with other texts.
    """

    given: tuple[Ask, ...]
    exchanged: tuple[Ask, ...]

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> Probe:
        """Return the probe of a system, from what it is asked as it is: a plan for each question."""
        given = tuple(plan.orders[0][0] for plan in plans[:PROBED])
        return cls(given, tuple(Ask(_exchanged(ask.question), ask.call) for ask in given))

    def check(self, store: AnswerStore) -> None:
        """Refuse a system whose answers depend on the question and not on the texts.

        Equal answers to all questions are no evidence: "I don't know" may be right for both texts. Neither is a call
        without an answer.

        Raises:
            AuditFailed: The system does not read the segments it is given.
        """
        if any(ask.key not in store.records for ask in (*self.given, *self.exchanged)):
            return
        said, otherwise = ([store.records[ask.key].text for ask in asks] for asks in (self.given, self.exchanged))
        if len(set(said)) > 1 and said == otherwise:
            raise AuditFailed(
                "the system does not read the segments it is given: with other texts in them it answers the same",
                hint="Of a chain that retrieves, give the combine chain; or say with to_input= what it is called with.",
            )


def _exchanged(question: Question) -> Question:
    segments = (
        replace(each, text=f"Page {number} is left blank.", title=each.title and f"Page {number}", token_ids=None)
        for number, each in enumerate(question.segments, start=1)
    )
    return replace(question, segments=tuple(segments))
