"""The pairwise evaluator of LangChain, over `invariant_rag.Judge`. Needs the extra `evaluation` (langchain-classic)."""

from __future__ import annotations

from typing import Any

from invariant_rag.errors import ExtraRequired, UnsupportedCombination
from invariant_rag.judge import DEFAULT_CRITERIA, By, Criteria, Judge, check_judge_options

from langchain_invariant_rag.chat_models import ChatInvariant
from langchain_invariant_rag.errors import DISTRIBUTION

try:
    from langchain_classic.evaluation.schema import PairwiseStringEvaluator
except ImportError as error:
    raise ExtraRequired("langchain-classic", "evaluation", distribution=DISTRIBUTION) from error


class InvariantPairwiseEvaluator(PairwiseStringEvaluator):
    """Compare two predictions with a `Judge`: one scoring pass, and swapping the predictions swaps the verdict exactly.

    Args:
        model: The model that judges; None for the embedded model. Its weights are loaded by the first evaluation.
        criteria: As for `Judge`: what makes a prediction good, as a text or as a mapping of names to descriptions.
        by: As for `Judge`: score the `letters` of the predictions, or their `texts`.
        explain: Whether to generate an explanation too, greedily, with at most the model's `max_tokens`.

    Raises:
        InvalidPrompt: The criteria are empty, or neither a text nor a mapping of texts.
        UnknownName: There is no such way of judging.
        UnsupportedCombination: The model is no `ChatInvariant`.
    """

    def __init__(
        self,
        model: ChatInvariant | None = None,
        *,
        criteria: Criteria = DEFAULT_CRITERIA,
        by: By = "letters",
        explain: bool = False,
    ) -> None:
        if not isinstance(model, ChatInvariant | None):
            raise UnsupportedCombination(
                f"expected a ChatInvariant as judge, got {type(model).__name__}",
                hint="Use ChatInvariant(...), or PairwiseStringEvalChain of LangChain, which takes any model.",
            )
        check_judge_options(criteria, by)
        self._model = ChatInvariant() if model is None else model
        self._choices: dict[str, Any] = {"criteria": criteria, "by": by}
        self._explain = explain

    @property
    def judge(self) -> Judge:
        """The judge over the model's `InvariantModel`. Loads the weights on first use."""
        return Judge(self._model.lm, **self._choices)

    def _check_evaluation_args(self, reference: str | None = None, input_: str | None = None) -> None:
        """Accept a question and a reference answer, or neither."""

    def _evaluate_string_pairs(
        self,
        *,
        prediction: str,
        prediction_b: str,
        reference: str | None = None,
        input: str | None = None,  # noqa: A002 - LangChain's name for it
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Compare two predictions: see `Judge.compare`.

        Returns:
            `value`: `A` if `prediction` is better, `B` if `prediction_b` is, None for a tie; `score`: 1, 0 or 0.5;
            `probabilities`: of either being the better one, as in `Verdict`; `reasoning`: these probabilities and, with
            `explain=True`, the explanation.
        """
        options: dict[str, Any] = {"explain": True, "max_new_tokens": self._model.max_tokens} if self._explain else {}
        verdict = self.judge.compare(input, prediction, prediction_b, reference=reference, **options)
        value, score = {0: ("A", 1), 1: ("B", 0), None: (None, 0.5)}[verdict.winner]
        return {
            "reasoning": verdict.describe(["prediction", "prediction_b"]),
            "value": value,
            "score": score,
            "probabilities": verdict.probabilities,
        }
