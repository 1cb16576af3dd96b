"""LangChain's pairwise evaluator, asked once. Needs the extra `evaluation` (langchain-classic)."""

from __future__ import annotations

from typing import Any

from invariant_rag.errors import ExtraRequired

from langchain_invariant_rag.chat_models import ChatInvariant
from langchain_invariant_rag.evaluation import DEFAULT_CRITERIA, InvariantListwiseEvaluator

try:
    from langchain_classic.evaluation.schema import PairwiseStringEvaluator
except ImportError as error:
    raise ExtraRequired("langchain-classic", "evaluation", "langchain-invariant-rag") from error


class InvariantPairwiseEvaluator(PairwiseStringEvaluator):
    """Says which of two predictions is better, and the same if they are swapped: one call instead of two.

    Args:
        model: The judge; the embedded model where None.
        criteria: What makes a prediction good.
    """

    def __init__(self, model: ChatInvariant | None = None, *, criteria: str = DEFAULT_CRITERIA) -> None:
        self._listwise = InvariantListwiseEvaluator(model, criteria=criteria)

    def _check_evaluation_args(self, reference: str | None = None, input_: str | None = None) -> None:
        """Take a question and a right answer, or do without: both help, and neither is needed."""

    def _evaluate_string_pairs(
        self,
        *,
        prediction: str,
        prediction_b: str,
        reference: str | None = None,
        input: str | None = None,  # noqa: A002 - LangChain's name for it
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return `value` (`A`, `B`, or None for a tie), `score` (1, 0 or 0.5), `reasoning` and `probability` of A."""
        judgement = self._listwise.evaluate([prediction, prediction_b], input=input, reference=reference)
        value, score = {0: ("A", 1), 1: ("B", 0), None: (None, 0.5)}[judgement.best]
        first, second = judgement.scores
        return {
            "reasoning": f"A is named as the best with probability {first:.3f}, B with {second:.3f}.",
            "value": value,
            "score": score,
            "probability": first / (first + second),
        }
