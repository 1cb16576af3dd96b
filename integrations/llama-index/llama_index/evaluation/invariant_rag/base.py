"""InvariantPairwiseEvaluator: which of two answers is better, asked once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.evaluation import EvaluationResult, PairwiseComparisonEvaluator
from llama_index.core.evaluation.pairwise import DEFAULT_SYSTEM_TEMPLATE, EvaluationSource, _default_parser_function
from llama_index.core.llms import LLM, ChatMessage, MessageRole
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate
from llama_index.core.settings import Settings

from invariant_rag.errors import UnsupportedCombination
from invariant_rag.prompts import mark
from invariant_rag.segments import Segment
from llama_index.llms.invariant_rag import InvariantLLM
from llama_index.llms.invariant_rag.markers import strip_markers

Parser = Callable[[str], tuple[bool | None, float | None, str | None]]

_USER_TEMPLATE = (
    "[User Question]\n{query}\n\n[The Start of Reference]\n{reference}\n[The End of Reference]\n\n"
    "[The Answers]\n{answer_1}{answer_2}\n[Your Verdict]\n"
)
DEFAULT_EVAL_TEMPLATE = ChatPromptTemplate(
    message_templates=[
        ChatMessage(role=MessageRole.SYSTEM, content=DEFAULT_SYSTEM_TEMPLATE),
        ChatMessage(role=MessageRole.USER, content=_USER_TEMPLATE),
    ]
)


class InvariantPairwiseEvaluator(PairwiseComparisonEvaluator):
    """Says whether `response` is better than `second_response`, in one call where LlamaIndex makes two.

    The two answers are a set of segments, and which one is called A is decided by their contents. So swapping them
    gives the model the same input, bit for bit, and consensus needs no second opinion. Two equal answers are a tie.

    In a result, `score` and `passing` speak of `response`: 1.0 if it is better, 0.0 if `second_response` is, 0.5 for
    a tie. `pairwise_source` says whose letter is whose in the feedback: `original` where `response` is A, `flipped`
    where it is B.

    Args:
        llm: The judge. None: `Settings.llm`.
        eval_template: A template with `{query}`, `{reference}`, `{answer_1}` and `{answer_2}`; the answers bring their
            own headings. Text between the two makes each a set of its own: then they are still swap-proof, but the
            model sees one before the other.
        parser_function: Reads a verdict: passing, score and feedback as `PairwiseComparisonEvaluator` has them.
        enforce_consensus: Kept for compatibility. There is consensus either way, by construction.

    Raises:
        UnsupportedCombination: The judge is no `InvariantLLM`.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        eval_template: BasePromptTemplate | str | None = None,
        parser_function: Parser = _default_parser_function,
        enforce_consensus: bool = True,
    ) -> None:
        judge = llm or Settings.llm
        if not isinstance(judge, InvariantLLM):
            raise UnsupportedCombination(
                f"expected an InvariantLLM as judge, got {type(judge).__name__}: one call is not enough for it",
                hint="Use llm=InvariantLLM(...), or LlamaIndex's PairwiseComparisonEvaluator, which asks twice.",
            )
        super().__init__(judge, eval_template or DEFAULT_EVAL_TEMPLATE, parser_function, enforce_consensus)

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
        """Compare two answers; `contexts` are not read.

        Raises:
            ValueError: The query or an answer is missing.
        """
        if query is None or response is None or second_response is None:
            raise ValueError("expected query, response and second_response, got None for at least one of them")
        await asyncio.sleep(sleep_time_in_seconds)
        if response == second_response:
            return EvaluationResult(
                query=query, response="", score=0.5, feedback="", pairwise_source=EvaluationSource.NEITHER
            )
        first_is_a = response < second_response
        result = await self._get_eval_result(
            query,
            _labelled(response, "A" if first_is_a else "B"),
            _labelled(second_response, "B" if first_is_a else "A"),
            reference,
        )
        if result.invalid_result or first_is_a:
            return result
        return result.model_copy(
            update={
                "pairwise_source": EvaluationSource.FLIPPED,
                "passing": None if result.passing is None else not result.passing,
                "score": None if result.score is None else 1 - result.score,
            }
        )


def _labelled(answer: str, letter: str) -> str:
    """Write an answer as a marked segment under its letter."""
    heading, end = f"[The Start of Assistant {letter}'s Answer]", f"[The End of Assistant {letter}'s Answer]"
    return mark(Segment(f"{heading}\n{strip_markers(answer)}\n{end}"))
