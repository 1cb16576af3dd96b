"""InvariantPairwiseEvaluator: `invariant_rag.Judge` with the interface of LlamaIndex's pairwise evaluator."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.evaluation import EvaluationResult, PairwiseComparisonEvaluator
from llama_index.core.evaluation.pairwise import EvaluationSource
from llama_index.core.llms import LLM
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.settings import Settings

from invariant_rag.errors import UnsupportedCombination
from invariant_rag.judge import DEFAULT_CRITERIA, By, Criteria, Judge, check_judge_options
from llama_index.llms.invariant_rag import InvariantLLM


class InvariantPairwiseEvaluator(PairwiseComparisonEvaluator):
    """Compare `response` with `second_response` by a `Judge`; swapping the two swaps the result exactly.

    The verdict is scored, not generated: every result is valid, and consensus needs no second call. `score` and
    `passing` are 1.0 and True if `response` is better, 0.0 and False if the other one is, 0.5 and None for a tie.
    `feedback` (and `response`, as in LlamaIndex) holds both probabilities. For an explanation: `judge.compare`.

    Args:
        llm: The `InvariantLLM` that judges; None for `Settings.llm`. The first evaluation loads its weights.
        enforce_consensus: Without effect.
        criteria: As for `Judge`.
        by: Score the `letters` of the answers, or their `texts`.
        **refused: LlamaIndex's `eval_template` and `parser_function`: the judge writes its prompt, and scores.
    """

    _llm: InvariantLLM

    def __init__(
        self,
        llm: LLM | None = None,
        *,
        enforce_consensus: bool = True,
        criteria: Criteria = DEFAULT_CRITERIA,
        by: By = "letters",
        **refused: Any,
    ) -> None:
        llm = llm or Settings.llm
        if not isinstance(llm, InvariantLLM):
            raise UnsupportedCombination(
                f"expected an InvariantLLM as judge, got {type(llm).__name__}",
                hint="Use llm=InvariantLLM(...), or LlamaIndex's PairwiseComparisonEvaluator, which calls twice.",
            )
        self._update_prompts(refused)
        check_judge_options(criteria, by)
        super().__init__(llm, enforce_consensus=False)
        self._options: dict[str, Any] = {"criteria": criteria, "by": by}

    @property
    def judge(self) -> Judge:
        """The judge over the LLM's `InvariantModel`, which loads the weights."""
        return Judge(self._llm.lm, **self._options)

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if prompts:
            raise UnsupportedCombination(
                f"expected no {', '.join(prompts)}: the judge writes its own prompt and scores its verdict",
                hint="Say what makes an answer good: criteria=... Or use LlamaIndex's PairwiseComparisonEvaluator.",
            )

    async def _get_eval_result(
        self, query: str, response: str, second_response: str, reference: str | None
    ) -> EvaluationResult:
        verdict = await asyncio.to_thread(self.judge.compare, query, response, second_response, reference=reference)
        passing, score = {0: (True, 1.0), 1: (False, 0.0), None: (None, 0.5)}[verdict.winner]
        feedback = verdict.describe(["response", "second_response"])
        result: dict[str, Any] = {"query": query, "response": feedback, "feedback": feedback}
        return EvaluationResult(**result, passing=passing, score=score, pairwise_source=EvaluationSource.ORIGINAL)
