"""Score: is an accepted answer a substring of the first line of the output?"""

from __future__ import annotations

from invariant_rag.evaluation.metrics import best_subspan_em, exact_match, normalise_answer

from invariant_rag_benchmarks.base import Case, Scored


def score(case: Case, output: str) -> Scored:
    """Score the first line by `best_subspan_em`, the paper's metric, and by exact match."""
    line = output.strip().split("\n")[0].strip()
    return Scored(
        normalise_answer(line),
        {"best_subspan_em": best_subspan_em(line, case.gold), "exact_match": exact_match(line, case.gold)},
    )
