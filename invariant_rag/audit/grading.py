"""From answers to outcomes: right or wrong where gold answers are known, else classes of answers that mean the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.calls import CallResult, Endpoint, call, is_url
from invariant_rag.audit.matching import is_right, normal_tokens
from invariant_rag.audit.statistics import Estimate, wilson_interval
from invariant_rag.audit.systems import loaded
from invariant_rag.errors import AuditFailed, FieldWarning, InvalidChoice, RetrievalError
from invariant_rag.models.embedders import NamedEmbedder
from invariant_rag.shown import clean, counted, shown

if TYPE_CHECKING:
    from invariant_rag.audit.questions import Question

Metric = Callable[[str, Sequence[str]], float]

WRONG, RIGHT, FAILED = 0, 1, 2  # outcomes where gold answers are known; else a class is a number from 3 on, or `FAILED`
SAME_MEANING = 0.9  # similarity of embeddings from which two answers count as the same, where there is no judge
_EMBEDDER = NamedEmbedder()  # it says which answers mean the same, where there is no judge
_TELLING = {"no", "not", "yes", "never", "none", "cannot"}


class Grader:
    """Grades answers, and remembers what it graded.

    A metric compares an answer with the gold answers (right from 0.5 on; None: a match), or a `judge` does and says
    which answers mean the same; without it, embeddings say that (`embeds`). What cannot grade gold answers fails now.
    """

    def __init__(self, questions: Sequence[Question], metric: Metric | None = None, judge: Any = None) -> None:
        self.judge = None if judge is None else AnswerJudge(judge)
        self.embeds = judge is None and not all(each.answers for each in questions)
        self.embeds &= find_spec("sentence_transformers") is not None
        self._metric = metric or is_right
        self._right: dict[tuple[str, str], bool] = {}
        self._meanings: dict[str, list[str]] = {}
        if self.judge is not None:
            self.judge.check(questions)
        elif unjudged := [each for each in questions if each.rubrics]:
            without = sum(not each.answers for each in unjudged)
            count = counted(len(unjudged), "question")
            message = f"{count} with checks that take a judge (llm-rubric, similar...), which are not made"
            message += f": {without:,} of them have no gold answers, so no answer is right or wrong" if without else ""
            hint = "Name a judge: judge= in Python, --judge MODEL or --judge URL on the command line."
            warnings.warn(FieldWarning(message, hint=hint), stacklevel=3)
        for each in [each for each in questions if each.answers][:1]:
            self.classes(each, each.answers[:1])

    def classes(self, question: Question, answers: Sequence[str | None]) -> list[int]:
        """Return the class of each answer; None is a call that failed."""
        return [FAILED if answer is None else self._class(question, answer) for answer in answers]

    def is_scored(self, question: Question) -> bool:
        """Return whether answers of a question are right or wrong."""
        return bool(question.answers or (question.rubrics and self.judge))

    def _class(self, question: Question, answer: str) -> int:
        if self.is_scored(question):
            key = question.id, answer
            if key not in self._right:
                self._right[key] = self._is_right(question, answer)
            return RIGHT if self._right[key] else WRONG
        known = self._meanings.setdefault(question.id, [])  # the first answer of each meaning
        for number, each in enumerate(known):
            if self._same(question, each, answer):
                return 3 + number
        known.append(answer)
        return 2 + len(known)

    def _is_right(self, question: Question, answer: str) -> bool:
        if self.judge is not None:
            return self.judge.is_right(question, answer)
        score = self._metric(answer, question.answers)
        if not isinstance(score, int | float) or not 0 <= score <= 1:
            raise InvalidChoice(f"metric: expected a number from 0 to 1, got {shown(score)}")
        return score >= 0.5

    def _same(self, question: Question, one: str, other: str) -> bool:
        tokens = [normal_tokens(each) for each in (one, other)]
        if tokens[0] == tokens[1]:
            return True
        if self.judge is not None:
            return self.judge.is_same(question, one, other)
        telling = [{each for each in words if each in _TELLING or any(map(str.isdigit, each))} for words in tokens]
        if telling[0] != telling[1] or not self.embeds:  # to an embedding, 1912 is like 1913, and yes like no
            return False
        try:
            return float(_embedding(one) @ _embedding(other)) >= SAME_MEANING
        except RetrievalError:  # no model can be loaded
            self.embeds = False
            return False


@lru_cache(maxsize=10_000)
def _embedding(text: str) -> Any:
    (vector,) = _EMBEDDER.load().encode([clean(text)], normalize_embeddings=True, show_progress_bar=False)
    return vector


PROBES = 20  # verdicts that are known, which the judge is asked for before it is believed
USELESS = 0.3  # share of them that a judge may miss

_RIGHT = """\
Question: {question}
{reference}
Answer to check: {answer}

Does the answer to check give the right answer? Reply with one word: yes or no."""

_SAME = """\
Question: {question}

First answer: {one}

Second answer: {other}

Do both answers say the same in substance, whatever their wording? Reply with one word: yes or no."""


class AnswerJudge:
    """Grades answers by a model.

    Args:
        model: An `InvariantModel` or a `Judge`, which scores yes and no in one pass; an `Endpoint`, or the URL of a
            server with the chat completions of OpenAI; or a function from a prompt to text.

    Attributes:
        calls, pairs, divided: How often the model was asked, two answers were compared in both orders, and the two
            verdicts differed.
        errors: Share of the verdicts that are known which it misses; None without gold answers.
    """

    def __init__(self, model: Any) -> None:
        self.calls = self.pairs = self.divided = 0
        self.errors: Estimate | None = None
        self._says_yes = _yes_function(model)

    def is_right(self, question: Question, answer: str) -> bool:
        """Return whether an answer is right, by the gold answers and rubrics of its question."""
        golds = f"Right answers: {' | '.join(question.answers)}\n" if question.answers else ""
        reference = golds + "".join(f"What a right answer does: {each}\n" for each in question.rubrics)
        return self._ask(_RIGHT.format(question=question.text, reference=reference, answer=answer))

    def is_same(self, question: Question, one: str, other: str) -> bool:
        """Return whether two answers mean the same. Both orders are asked; answers that divide the judge differ."""
        pairs = ((one, other), (other, one))
        verdicts = [self._ask(_SAME.format(question=question.text, one=one, other=other)) for one, other in pairs]
        self.pairs += 1
        self.divided += verdicts[0] != verdicts[1]
        return all(verdicts)

    def check(self, questions: Sequence[Question]) -> None:
        """Measure how often the judge misses verdicts that are known: gold answers, and those of other questions."""
        known = [each for each in questions if each.answers][: PROBES // 2 + 1]
        missed = [not self.is_right(each, each.answers[0]) for each in known]
        pairs = zip(known, known[1:] + known[:1], strict=True)
        foreign = [(each, other.answers[0]) for each, other in pairs if other.answers[0] not in each.answers]
        missed += [self.is_right(each, answer) for each, answer in foreign]
        self.errors = rate = wilson_interval(sum(missed), len(missed)) if missed else None
        if rate is not None and rate.value > USELESS:
            hint = (
                "Known are gold answers, and those of other questions. Name a larger model as --judge, or leave it out."
            )
            raise AuditFailed(f"the judge is wrong on {rate.value:.0%} of the verdicts that are known", hint=hint)

    def as_dict(self) -> dict[str, Any]:
        """Return what it was asked, and how often it erred, as plain data."""
        errors = self.errors and self.errors.as_dict()
        return {"calls": self.calls, "pairs": self.pairs, "divided": self.divided, "errors": errors}

    def _ask(self, prompt: str) -> bool:
        self.calls += 1
        return self._says_yes(prompt)


def _yes_function(model: Any) -> Callable[[str], bool]:
    """Return what answers yes or no to a prompt."""
    if isinstance(endpoint := Endpoint(model) if is_url(model) else model, Endpoint):
        return lambda prompt: _is_yes(call("judge", lambda: endpoint.complete(prompt)))
    if isinstance(model, loaded("invariant_rag.generation.model", "InvariantModel")):
        from invariant_rag.judge import Judge

        model = Judge(model)
    if isinstance(model, loaded("invariant_rag.judge", "Judge")):
        return lambda prompt: bool(model.choose(prompt, ["yes", "no"]).winner == 0)
    if callable(model):
        return lambda prompt: _is_yes(model(prompt))
    raise InvalidChoice(f"judge: expected a model, an Endpoint, a URL or a function, got {shown(model)}")


def _is_yes(reply: Any) -> bool:
    if isinstance(reply, CallResult):
        if reply.text is None:
            raise AuditFailed(f"the judge does not answer: {reply.errors[-1]}")
        reply = reply.text
    if not isinstance(reply, str):
        raise AuditFailed(f"the judge replied with {type(reply).__name__}, expected yes or no as text")
    words = reply.strip().lower().split()
    return bool(words) and words[0].strip(".,!:;*\"'") in {"yes", "true", "correct", "same"}
