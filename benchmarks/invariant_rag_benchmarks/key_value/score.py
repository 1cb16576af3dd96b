"""Score: does the output contain the value?"""

from __future__ import annotations

from invariant_rag_benchmarks.base import Case, Scored


def score(case: Case, output: str) -> Scored:
    """Return accuracy as in Lost in the Middle: the value is a substring of the output, ignoring case."""
    said = output.strip().lower()
    right = case.gold[0].lower() in said
    return Scored(case.gold[0].lower() if right else said, {"accuracy": float(right)})
