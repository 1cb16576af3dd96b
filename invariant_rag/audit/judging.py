"""A judge of answers: right or wrong, and do two mean the same? Asked in both orders, with its own errors measured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.calling import Patience
from invariant_rag.audit.endpoint import Endpoint
from invariant_rag.audit.statistics import Estimate, wilson_interval
from invariant_rag.audit.systems import Reply, loaded
from invariant_rag.errors import AuditFailed, FieldWarning, InvalidChoice
from invariant_rag.shown import counted, shown

if TYPE_CHECKING:
    from invariant_rag.audit.questions import Question

PROBES = 20
"""Verdicts that are known, which the judge is asked for before it is believed."""

USELESS = 0.3
"""Share of known verdicts that a judge may miss."""

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


@dataclass
class JudgeRecord:
    """What a judge was asked, and how often it erred.

    Attributes:
        calls: How often the model was asked.
        pairs: How often two answers were compared in both orders.
        divided: How often the two verdicts differed.
        errors: Share of the verdicts that are known which it misses; None without gold answers.
    """

    calls: int = 0
    pairs: int = 0
    divided: int = 0
    errors: Estimate | None = None


class AnswerJudge:
    """Grades answers by a model.

    Args:
        model: An `InvariantModel` or a `Judge`, which scores yes and no in one pass; an `Endpoint`, or the URL of a
            server with the chat completions of OpenAI; or a function from a prompt to text.

    Attributes:
        record: What it was asked, and how often it erred.

    Raises:
        InvalidChoice: It is none of these.
    """

    def __init__(self, model: Any) -> None:
        self._says_yes = _yes_function(model)
        self.record = JudgeRecord()

    def is_right(self, question: Question, answer: str) -> bool:
        """Return whether an answer is right, by the gold answers and rubrics of its question."""
        return self._ask(_RIGHT.format(question=question.text, reference=_reference(question), answer=answer))

    def is_same(self, question: Question, one: str, other: str) -> bool:
        """Return whether two answers mean the same. Both orders are asked; answers that divide the judge differ."""
        verdicts = [
            self._ask(_SAME.format(question=question.text, one=first, other=second))
            for first, second in ((one, other), (other, one))
        ]
        self.record.pairs += 1
        self.record.divided += verdicts[0] != verdicts[1]
        return all(verdicts)

    def check(self, questions: Sequence[Question]) -> None:
        """Measure how often the judge misses verdicts that are known: gold answers, and those of other questions.

        Raises:
            AuditFailed: It misses more than `USELESS` of them.
        """
        known = [each for each in questions if each.answers][: PROBES // 2 + 1]
        missed = [not self.is_right(each, each.answers[0]) for each in known]
        pairs = zip(known, known[1:] + known[:1], strict=True)
        foreign = [(each, other.answers[0]) for each, other in pairs if other.answers[0] not in each.answers]
        missed += [self.is_right(each, answer) for each, answer in foreign]
        self.record.errors = found = wilson_interval(sum(missed), len(missed)) if missed else None
        if found is not None and found.value > USELESS:
            raise AuditFailed(
                f"the judge is wrong on {found.value:.0%} of the verdicts that are known (gold answers, and those of "
                "other questions)",
                hint="Name a larger model as --judge, or leave it out: gold answers are then matched as tokens.",
            )

    def _ask(self, prompt: str) -> bool:
        self.record.calls += 1
        return self._says_yes(prompt)


def warn_unjudged(questions: Sequence[Question], judge: AnswerJudge | None) -> None:
    """Warn of checks that take a judge, where there is none."""
    unjudged = [each for each in questions if each.rubrics]
    if judge is None and unjudged:
        without = sum(not each.answers for each in unjudged)
        message = (
            f"{counted(len(unjudged), 'question')} with checks that take a judge (llm-rubric, similar...), which are "
            f"not made: {without:,} of them have no gold answers, so their answers are neither right nor wrong"
        )
        hint = "Name a judge: judge= in Python, --judge MODEL or --judge URL on the command line."
        warnings.warn(FieldWarning(message, hint=hint), stacklevel=3)


def _reference(question: Question) -> str:
    golds = f"Right answers: {' | '.join(question.answers)}\n" if question.answers else ""
    return golds + "".join(f"What a right answer does: {each}\n" for each in question.rubrics)


def _yes_function(model: Any) -> Callable[[str], bool]:
    """Return what answers yes or no to a prompt."""
    if isinstance(model, str) and model.startswith(("http://", "https://")):
        model = Endpoint(model)
    if isinstance(model, Endpoint):
        return lambda prompt: _is_yes(_patiently(lambda: model.complete(prompt)))
    if isinstance(model, loaded("invariant_rag.generation.model", "InvariantModel")):
        from invariant_rag.judge import Judge

        model = Judge(model)
    if isinstance(model, loaded("invariant_rag.judge", "Judge")):
        return lambda prompt: bool(model.choose(prompt, ["yes", "no"]).winner == 0)
    if callable(model):
        return lambda prompt: _is_yes(model(prompt))
    raise InvalidChoice(f"judge: expected a model, an Endpoint, a URL or a function, got {shown(model)}")


def _patiently(ask: Callable[[], Reply]) -> str:
    answer = Patience().call("judge", ask)
    if answer.text is None:
        raise AuditFailed(f"the judge does not answer: {answer.errors[-1]}")
    return answer.text


def _is_yes(said: Any) -> bool:
    if not isinstance(said, str):
        raise AuditFailed(f"the judge replied with {type(said).__name__}, expected yes or no as text")
    words = said.strip().lower().split()
    return bool(words) and words[0].strip(".,!:;*\"'") in {"yes", "true", "correct", "same"}
