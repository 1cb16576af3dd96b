"""Score: the option of the likeliest of ` A` to ` E`."""

from invariant_rag.evaluation.benchmarks.choices import score_choice as score

__all__ = ["score"]
