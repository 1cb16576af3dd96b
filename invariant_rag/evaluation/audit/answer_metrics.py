"""The metrics of an audit: how an answer is compared with the gold answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from invariant_rag.errors import InvalidChoice, InvalidQuestion, UnknownName
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.scoring import RIGHT, Metric
from invariant_rag.evaluation.metrics import best_subspan_em, exact_match, normalise_answer, token_f1
from invariant_rag.shown import shown


@dataclass(frozen=True)
class AnswerMetric:
    """A metric of answers.

    Attributes:
        name: Name in reports.
        score: Compares an answer with the gold answers: from 0 to 1.
        meaning: Which answers are right, in words.
        needs_words: Whether a gold answer of which nothing is left without case, punctuation and articles cannot be
            scored, since every answer contains it.
    """

    name: str
    score: Metric
    meaning: str
    needs_words: bool = False

    def check(self, questions: Sequence[Question]) -> None:
        """Refuse gold answers that cannot be scored.

        Raises:
            InvalidQuestion: There is one.
        """
        for question in questions if self.needs_words else ():
            for answer in question.answers:
                if not normalise_answer(answer):
                    where = question.source or f"question {question.id!r}"
                    raise InvalidQuestion(
                        f"{where}: expected gold answers with words, got {shown(answer)}: all hold it",
                        hint="Leave it away, or choose the metric exact_match.",
                    )


METRICS = {
    each.name: each
    for each in (
        AnswerMetric("best_subspan_em", best_subspan_em, "it contains a gold answer", needs_words=True),
        AnswerMetric("exact_match", exact_match, "it is a gold answer, case, punctuation and articles aside"),
        AnswerMetric(
            "token_f1",
            token_f1,
            f"it shares enough words with a gold answer: accuracy is the mean of token F1, and {RIGHT} is enough",
        ),
    )
}


def resolve_metric(metric: str | Metric) -> AnswerMetric:
    """Return a metric by its name, or from its function.

    Raises:
        UnknownName: There is none of that name.
        InvalidChoice: It is neither a name nor a function.
    """
    if isinstance(metric, str):
        if metric not in METRICS:
            raise UnknownName("metric", metric, METRICS)
        return METRICS[metric]
    if not callable(metric):
        raise InvalidChoice(f"metric: expected a name or a function, got {type(metric).__name__}")
    known = next((each for each in METRICS.values() if each.score is metric), None)
    return known or _own_metric(getattr(metric, "__name__", "a metric of your own"), metric)


def meaning_of(name: str) -> str:
    """Return which answers are right by the metric of a name, in words."""
    return METRICS[name].meaning if name in METRICS else f"{name} gives at least {RIGHT}"


def _own_metric(name: str, metric: Metric) -> AnswerMetric:
    return AnswerMetric(name, metric, meaning_of(name))
