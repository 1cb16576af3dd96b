"""From answers to outcomes: right or wrong where gold answers are known, else classes of answers that mean the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.matching import is_right
from invariant_rag.audit.metrics import exact_match, token_f1
from invariant_rag.audit.tokens import normal_tokens
from invariant_rag.checks import check_name
from invariant_rag.errors import InvalidChoice, RetrievalError
from invariant_rag.shown import clean, shown

if TYPE_CHECKING:
    from invariant_rag.audit.judging import AnswerJudge
    from invariant_rag.audit.questions import Question

Metric = Callable[[str, Sequence[str]], float]

WRONG, RIGHT, FAILED = 0, 1, 2
"""Outcomes where gold answers are known; otherwise a class is a number from 3 on, or `FAILED`."""

METRICS: dict[str, tuple[Metric, str]] = {
    "match": (lambda answer, golds: float(is_right(answer, golds)), "it gives a gold answer, as whole tokens"),
    "exact_match": (exact_match, "it is a gold answer, but for case, punctuation and articles"),
    "token_f1": (token_f1, "the F1 of its words with a gold answer is at least 0.5"),
}

SAME_MEANING = 0.9
"""Cosine similarity of embeddings from which two answers count as the same, where there is no judge."""

_TELLING = {"no", "not", "yes", "never", "none", "cannot"}

LONG_GOLD = 12
"""Words of a gold answer that no answer is likely to repeat."""


def resolve_metric(metric: Any) -> tuple[Metric, str]:
    """Return a metric, and when an answer is right by it.

    Raises:
        UnknownName: There is no metric of that name.
        InvalidChoice: It is neither a name nor a function.
    """
    if isinstance(metric, str):
        check_name("metric", metric, METRICS)
        return METRICS[metric]
    if not callable(metric):
        raise InvalidChoice(f"metric: expected {', '.join(METRICS)} or a function, got {shown(metric)}")
    return metric, f"{getattr(metric, '__name__', 'the metric')} gives it at least 0.5"


@dataclass
class Grader:
    """Grades answers, and remembers what it graded.

    Args:
        metric: Compares an answer with the gold answers, where there is no judge.
        judge: Says whether answers are right, and whether two mean the same. None: none is asked.
        embedder: Compares answers without gold answers, where there is no judge. None: equal tokens are the same.
    """

    metric: Metric
    judge: AnswerJudge | None = None
    embedder: AnswerEmbedder | None = None

    def __post_init__(self) -> None:
        self._right: dict[tuple[str, str], bool] = {}
        self._meanings: dict[str, list[str]] = {}

    def classes(self, question: Question, answers: Sequence[str | None]) -> list[int]:
        """Return the class of each answer of a question; None is a call that failed."""
        return [FAILED if answer is None else self._class(question, answer) for answer in answers]

    def is_scored(self, question: Question) -> bool:
        """Return whether answers of a question are right or wrong."""
        return bool(question.answers or (question.rubrics and self.judge))

    def _class(self, question: Question, answer: str) -> int:
        if self.is_scored(question):
            return RIGHT if self._is_right(question, answer) else WRONG
        return 3 + self._meaning(question, answer)

    def _is_right(self, question: Question, answer: str) -> bool:
        key = question.id, answer
        if key not in self._right:
            if self.judge is not None:
                self._right[key] = self.judge.is_right(question, answer)
            else:
                score = self.metric(answer, question.answers)
                if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
                    raise InvalidChoice(f"metric: expected a number from 0 to 1, got {shown(score)}")
                self._right[key] = score >= 0.5
        return self._right[key]

    def _meaning(self, question: Question, answer: str) -> int:
        """Return the number of the first answer to a question that means the same."""
        known = self._meanings.setdefault(question.id, [])
        for number, each in enumerate(known):
            if self._same(question, each, answer):
                return number
        known.append(answer)
        return len(known) - 1

    def _same(self, question: Question, one: str, other: str) -> bool:
        tokens = [normal_tokens(each) for each in (one, other)]
        if tokens[0] == tokens[1]:
            return True
        if self.judge is not None:
            return self.judge.is_same(question, one, other)
        telling = [{each for each in words if each in _TELLING or any(map(str.isdigit, each))} for words in tokens]
        if telling[0] != telling[1]:  # to an embedding, 1912 and 1913 are alike, and so are yes and no
            return False
        return self.embedder is not None and self.embedder.similarity(one, other) >= SAME_MEANING


class AnswerEmbedder:
    """The similarity of two answers by the default embedding model, which is loaded when two answers differ in words.

    Attributes:
        works: Whether the model is there; without it, answers in other words are different answers.
    """

    def __init__(self) -> None:
        self.works = find_spec("sentence_transformers") is not None
        self._model: Any = None
        self._vectors: dict[str, Any] = {}

    def similarity(self, one: str, other: str) -> float:
        """Return the cosine similarity of two answers; 0 without a model."""
        if self.works and self._model is None:
            from invariant_rag.models.embedders import load_embedder

            try:
                self._model = load_embedder()
            except RetrievalError:
                self.works = False
        return float(self._vector(one) @ self._vector(other)) if self.works else 0.0

    def _vector(self, text: str) -> Any:
        if text not in self._vectors:
            texts = [clean(text)]
            (self._vectors[text],) = self._model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
        return self._vectors[text]
