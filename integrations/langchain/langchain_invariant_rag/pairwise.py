"""The pairwise evaluator of LangChain, over `invariant_rag.Judge`. Needs the extra `evaluation` (langchain-classic)."""

from __future__ import annotations

from typing import Any

from invariant_rag.errors import ExtraRequired
from invariant_rag.judge import DEFAULT_CRITERIA, By, CapCal, Criteria, Judge

from langchain_invariant_rag.chat_models import ChatInvariant
from langchain_invariant_rag.errors import DISTRIBUTION
from langchain_invariant_rag.evaluation import InvariantListwiseEvaluator

try:
    from langchain_classic.evaluation.schema import PairwiseStringEvaluator
except ImportError as error:
    raise ExtraRequired("langchain-classic", "evaluation", distribution=DISTRIBUTION) from error


class InvariantPairwiseEvaluator(PairwiseStringEvaluator):
    """Compare two predictions with a `Judge`: one scoring pass, and swapping the predictions swaps the verdict exactly.

    A second call with the predictions swapped, the usual remedy for position bias, would score the same input again.

    Args:
        model: As for `InvariantListwiseEvaluator`, and so are the others.
        criteria: What makes a prediction good, as a text or as a mapping of names to descriptions.
        by: Score the `letters` of the predictions, or their `texts`.
        calibration: `CapCal()` subtracts the model's preference for some letters, for a second scoring pass.
        explain: Whether to generate an explanation too.
    """

    def __init__(
        self,
        model: ChatInvariant | None = None,
        *,
        criteria: Criteria = DEFAULT_CRITERIA,
        by: By = "letters",
        calibration: CapCal | None = None,
        explain: bool = False,
    ) -> None:
        self._listwise = InvariantListwiseEvaluator(
            model, criteria=criteria, by=by, calibration=calibration, explain=explain
        )

    @property
    def judge(self) -> Judge:
        """The judge over the model's `InvariantModel`. Loads the weights on first use."""
        return self._listwise.judge

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
        verdict = self._listwise.evaluate([prediction, prediction_b], input=input, reference=reference)
        value, score = {0: ("A", 1), 1: ("B", 0), None: (None, 0.5)}[verdict.winner]
        return {
            "reasoning": verdict.describe(["prediction", "prediction_b"]),
            "value": value,
            "score": score,
            "probabilities": verdict.probabilities,
        }
