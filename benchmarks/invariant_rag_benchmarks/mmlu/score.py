"""Score: the option of the likeliest of ` A`, ` B`, ` C`, ` D`."""

from invariant_rag_benchmarks.choices import score_choice as score

__all__ = ["score"]
