"""Score: F1 of the words, the best over the accepted answers (LongBench's `qa_f1_score`)."""

from __future__ import annotations

from invariant_rag.evaluation.metrics import normalise_answer, token_f1

from invariant_rag_benchmarks.base import Case, Scored


def score(case: Case, output: str) -> Scored:
    """Score the whole output; LongBench takes the first line for other tasks only."""
    return Scored(normalise_answer(output), {"f1": token_f1(output, case.gold)})
