"""InvariantPairwiseEvaluator: `invariant_rag.Judge` with the interface of LlamaIndex's pairwise evaluator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.evaluation import EvaluationResult, PairwiseComparisonEvaluator
from llama_index.core.evaluation.pairwise import EvaluationSource
from llama_index.core.llms import LLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.settings import Settings

from invariant_rag.errors import InvalidPrompt, UnsupportedCombination
from invariant_rag.judge import DEFAULT_CRITERIA, By, CapCal, Criteria, Judge, Verdict, check_judge_options
from llama_index.llms.invariant_rag import InvariantLLM

_REFUSED = ("eval_template", "parser_function")

Parser = Callable[[str], tuple[bool | None, float | None, str | None]]


class InvariantPairwiseEvaluator(PairwiseComparisonEvaluator):
    """Compare `response` with `second_response` by a `Judge`; swapping the two swaps the result exactly.

    The verdict is scored, not generated, so every result is valid. Consensus needs no second call with the answers
    swapped, as LlamaIndex makes it: it would score the same input again.

    In a result, `score` and `passing` are those of `response`: 1.0 and True if it is better, 0.0 and False if
    `second_response` is, 0.5 and None for a tie. `feedback` (and `response`, as in LlamaIndex) holds both probabilities
    in full precision and, with `explain=True`, the explanation. `pairwise_source` is always `original`.

    Args:
        llm: The model that judges; None for `Settings.llm`. Its weights are loaded by the first evaluation.
        eval_template: Refused, as is a `parser_function`: with a prompt of its own, the order of the answers could
            change the verdict. Use `criteria` instead.
        parser_function: Refused.
        enforce_consensus: Accepted, since LlamaIndex has it; both values give the same result.
        criteria: As for `Judge`: what makes an answer good, as a text or as a mapping of names to descriptions.
        by: As for `Judge`: score the `letters` of the answers, or their `texts`.
        calibration: As for `Judge`: `CapCal()` subtracts the model's preference for some letters, for a second pass.
        explain: Whether to generate an explanation too, greedily, with at most the LLM's `max_tokens`.

    Raises:
        UnsupportedCombination: The LLM is no `InvariantLLM`, there is a template or a parser, or a calibration with
            `by="texts"`.
        InvalidChoice: The calibration is no `CapCal`.
        InvalidPrompt: The criteria are empty, or neither a text nor a mapping of texts.
        UnknownName: There is no such way of judging.
    """

    _llm: InvariantLLM

    def __init__(
        self,
        llm: LLM | None = None,
        eval_template: BasePromptTemplate | str | None = None,
        parser_function: Parser | None = None,
        enforce_consensus: bool = True,
        *,
        criteria: Criteria = DEFAULT_CRITERIA,
        by: By = "letters",
        calibration: CapCal | None = None,
        explain: bool = False,
    ) -> None:
        llm = llm or Settings.llm
        if not isinstance(llm, InvariantLLM):
            raise UnsupportedCombination(
                f"expected an InvariantLLM as judge, got {type(llm).__name__}",
                hint="Use llm=InvariantLLM(...), or LlamaIndex's PairwiseComparisonEvaluator, which asks twice.",
            )
        for name, value in zip(_REFUSED, (eval_template, parser_function), strict=True):
            if value is not None:
                raise _refusal(name)
        check_judge_options(criteria, by, calibration)
        super().__init__(llm, enforce_consensus=enforce_consensus)
        self._criteria = criteria
        self._by = by
        self._calibration = calibration
        self._explain = explain

    @property
    def judge(self) -> Judge:
        """The judge over the LLM's `InvariantModel`. Loads the weights on first use."""
        return Judge(self._llm.lm, criteria=self._criteria, by=self._by, calibration=self._calibration)

    def _get_prompts(self) -> PromptDictType:
        """Return no prompts: the judge writes its own."""
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        if prompts:
            raise _refusal(", ".join(prompts))

    async def aevaluate(
        self,
        query: str | None = None,
        response: str | None = None,
        contexts: Sequence[str] | None = None,
        second_response: str | None = None,
        reference: str | None = None,
        sleep_time_in_seconds: int = 0,
        **kwargs: Any,
    ) -> EvaluationResult:
        """Compare two answers in a thread, so that the event loop goes on; `contexts` are ignored, as in LlamaIndex.

        Raises:
            InvalidPrompt: The query or an answer is missing.
            ContextOverflow: The answers do not fit into the context window.
            UnsupportedCombination: There is a template or a parser among the keywords.
        """
        for name in _REFUSED:
            if kwargs.get(name) is not None:
                raise _refusal(name)
        given = {"query": query, "response": response, "second_response": second_response}
        if query is None or response is None or second_response is None:
            missing = ", ".join(name for name, text in given.items() if text is None)
            raise InvalidPrompt(
                f"expected query, response and second_response, got None for {missing}", hint="Give all three as text."
            )
        await asyncio.sleep(sleep_time_in_seconds)
        return await self._get_eval_result(query, response, second_response, reference)

    async def _get_eval_result(
        self, query: str, response: str, second_response: str, reference: str | None
    ) -> EvaluationResult:
        """Ask the judge. Every method of LlamaIndex's evaluator comes here for a verdict, never to its template."""
        verdict = await asyncio.to_thread(self._compare, query, response, second_response, reference)
        passing, score = {0: (True, 1.0), 1: (False, 0.0), None: (None, 0.5)}[verdict.winner]
        feedback = verdict.describe(["response", "second_response"])
        return EvaluationResult(
            query=query,
            response=feedback,
            passing=passing,
            score=score,
            feedback=feedback,
            pairwise_source=EvaluationSource.ORIGINAL,
        )

    def _compare(self, query: str, response: str, second_response: str, reference: str | None) -> Verdict:
        options = {"max_new_tokens": self._llm.max_tokens} if self._explain else {}
        return self.judge.compare(
            query, response, second_response, reference=reference, explain=self._explain, **options
        )


def _refusal(name: str) -> UnsupportedCombination:
    return UnsupportedCombination(
        f"expected no {name}: the judge writes its own prompt and scores its verdict",
        hint="Say what makes an answer good with criteria=..., or use LlamaIndex's PairwiseComparisonEvaluator.",
    )
