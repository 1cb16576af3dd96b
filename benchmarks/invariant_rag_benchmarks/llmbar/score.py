"""Score: the verdict; figures: consistency and preference over the two orders."""

from invariant_rag_benchmarks.pairs import judge_figures as figures
from invariant_rag_benchmarks.pairs import score_verdict as score

__all__ = ["figures", "score"]
