"""Score: is an accepted answer a substring of the first line of the output?"""

from invariant_rag_benchmarks.lost_in_the_middle.score import score

__all__ = ["score"]
