"""The listwise evaluator: `invariant_rag.Judge` with the arguments of LangChain's evaluators."""

from __future__ import annotations

from collections.abc import Sequence

from invariant_rag.errors import UnsupportedCombination
from invariant_rag.judge import DEFAULT_CRITERIA, By, CapCal, Criteria, Judge, Verdict, check_judge_options

from langchain_invariant_rag.chat_models import ChatInvariant


class InvariantListwiseEvaluator:
    """Rank predictions with a `Judge`: one scoring pass, and the same verdict for every order of the predictions.

    Args:
        model: The model that judges; None for the embedded model. Its weights are loaded by the first evaluation.
        criteria: As for `Judge`: what makes a prediction good, as a text or as a mapping of names to descriptions.
        by: As for `Judge`: score the `letters` of the predictions, or their `texts`.
        calibration: As for `Judge`: `CapCal()` subtracts the model's preference for some letters, for a second pass.
        explain: Whether to generate an explanation too, greedily, with at most the model's `max_tokens`.

    Raises:
        InvalidPrompt: The criteria are empty, or neither a text nor a mapping of texts.
        UnknownName: There is no such way of judging.
        InvalidChoice: The calibration is no `CapCal`.
        UnsupportedCombination: The model is no `ChatInvariant`, or there is a calibration with `by="texts"`.
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
        if not isinstance(model, ChatInvariant | None):
            raise UnsupportedCombination(
                f"expected a ChatInvariant as judge, got {type(model).__name__}",
                hint="Use ChatInvariant(...), or PairwiseStringEvalChain of LangChain, which takes any model.",
            )
        check_judge_options(criteria, by, calibration)
        self.model = ChatInvariant() if model is None else model
        self.criteria = criteria
        self.by = by
        self.calibration = calibration
        self.explain = explain

    @property
    def judge(self) -> Judge:
        """The judge over the model's `InvariantModel`. Loads the weights on first use."""
        return Judge(self.model.lm, criteria=self.criteria, by=self.by, calibration=self.calibration)

    def evaluate(
        self,
        predictions: Sequence[str],
        *,
        input: str | None = None,  # noqa: A002 - LangChain's name for it
        reference: str | None = None,
    ) -> Verdict:
        """Rank predictions: see `Judge.rank`.

        Args:
            predictions: The predictions to compare; at least one, and at most 26 different ones with `by="letters"`.
            input: The question that they answer.
            reference: A right answer.

        Raises:
            InvalidPrompt: There are no predictions, or too many.
            ContextOverflow: The predictions do not fit into the context window.
        """
        options = {"max_new_tokens": self.model.max_tokens} if self.explain else {}
        return self.judge.rank(input, predictions, reference=reference, explain=self.explain, **options)
