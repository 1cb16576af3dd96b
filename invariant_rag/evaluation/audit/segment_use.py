"""Does the system use the segments that it is given? A chain that retrieves for itself ignores them and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from invariant_rag.errors import AuditFailed
from invariant_rag.evaluation.audit.answer_store import AnswerStore
from invariant_rag.evaluation.audit.call_plan import Call, CallPlan
from invariant_rag.evaluation.audit.questions import Question

MAX_QUESTIONS = 3
"""Number of questions that are asked again with other texts."""


@dataclass(frozen=True)
class SegmentUseCheck:
    """Calls about the first questions, with their segments and with the text of every segment replaced.

    Attributes:
        original: Calls with the segments in the given order; the audit makes these anyway.
        replaced: The same calls with other texts.
    """

    original: tuple[Call, ...]
    replaced: tuple[Call, ...]

    @classmethod
    def of(cls, plans: Sequence[CallPlan]) -> SegmentUseCheck:
        """Return the calls of the check, from the plans of the unchanged system, one per question."""
        original = tuple(plan.orders[0][0] for plan in plans[:MAX_QUESTIONS])
        return cls(original, tuple(Call(_with_other_texts(call.question), call.spec) for call in original))

    def verify(self, store: AnswerStore) -> None:
        """Refuse a system whose answers depend on the question and not on the segments.

        Equal answers to all questions prove nothing: "I don't know" may be right for both texts. Neither do calls that
        were not answered.

        Raises:
            AuditFailed: The system does not use the segments it is given.
        """
        if any(call.key not in store.answers for call in (*self.original, *self.replaced)):
            return
        before, after = ([store.answers[call.key].text for call in calls] for calls in (self.original, self.replaced))
        if len(set(before)) > 1 and before == after:
            raise AuditFailed(
                "the system does not read the segments it is given: with other texts in them it answers the same",
                hint="Of a chain that retrieves, give the combine chain; or say with to_input= what it is called with.",
            )


def _with_other_texts(question: Question) -> Question:
    segments = (
        replace(each, text=f"Page {number} is left blank.", title=each.title and f"Page {number}", token_ids=None)
        for number, each in enumerate(question.segments, start=1)
    )
    return replace(question, segments=tuple(segments))
