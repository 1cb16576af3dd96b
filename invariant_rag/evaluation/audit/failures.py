"""What failed of the calls of an audit, and of their tries: a retry hides a failure, and the report does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from invariant_rag.evaluation.audit.answer_store import StoredAnswer
from invariant_rag.evaluation.audit.call_plan import Call
from invariant_rag.evaluation.audit.runner import FailedCall
from invariant_rag.shown import counted

MOST_ERRORS = 5
"""Different errors that are named."""


@dataclass(frozen=True)
class Failures:
    """What failed of the calls behind the measures.

    Attributes:
        calls: Number of different calls.
        failed: How many of them failed, whatever the retries.
        questions: Number of questions that a failed call is about.
        tries: Number of tries of the calls, retries included.
        failed_tries: How many of them failed, whether or not a retry cured it.
        errors: The most frequent errors of tries, with their counts.
    """

    calls: int
    failed: int = 0
    questions: int = 0
    tries: int = 0
    failed_tries: int = 0
    errors: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(
        cls, calls: Iterable[Call], answers: Mapping[str, StoredAnswer], failed: Mapping[str, FailedCall]
    ) -> Failures:
        """Count the failures of calls, each of which is answered or failed.

        Args:
            calls: The calls behind the measures.
            answers: Stored answers by key.
            failed: Calls that failed, by key.
        """
        by_key = {call.key: call for call in calls}
        lost = [each for key, each in failed.items() if key in by_key and key not in answers]
        cured = [answers[key].errors for key in by_key if key in answers]
        errors = [error for tries in (*cured, *(each.errors for each in lost)) for error in tries]
        return cls(
            calls=len(by_key),
            failed=len(lost),
            questions=len({(each.call.question.id, each.call.question.text) for each in lost}),
            tries=len(cured) + len(errors),
            failed_tries=len(errors),
            errors=tuple(Counter(errors).most_common(MOST_ERRORS)),
        )

    @property
    def share(self) -> float:
        """Share of the calls that failed."""
        return self.failed / self.calls if self.calls else 0.0

    @property
    def share_of_tries(self) -> float:
        """Share of the tries that failed."""
        return self.failed_tries / self.tries if self.tries else 0.0

    def describe(self, questions: int) -> str:
        """Return what failed, of how many questions, and why; "" if no try did."""
        if not self.failed_tries:
            return ""
        most = "; ".join(f"{count:,} x {error}" for error, count in self.errors)
        tries = f"{self.failed_tries:,} of {self.tries:,} tries failed ({self.share_of_tries:.1%})"
        about = (
            f"{counted(self.failed, 'call')} failed ({self.share:.1%}), about {self.questions:,} of "
            f"{counted(questions, 'question')} ({self.questions / questions:.1%}); "
        )
        if self.tries == self.calls:
            return f"{about}each call was tried once: {most}. The next audit asks the failed calls again."
        if not self.failed:
            return f"{tries}, and a retry cured each of them: {most}."
        return f"{about}of the tries, with retries, {tries}: {most}. The next audit asks the failed calls again."
