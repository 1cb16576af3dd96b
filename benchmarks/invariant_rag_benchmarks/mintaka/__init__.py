"""Mintaka over a knowledge graph: questions over 30 or 50 retrieved triples."""

from invariant_rag_benchmarks.base import Benchmark
from invariant_rag_benchmarks.mintaka.load import Settings, load
from invariant_rag_benchmarks.mintaka.score import score

BENCHMARK = Benchmark(
    name="mintaka",
    about="Questions over 30 or 50 retrieved triples, as retrieved and shuffled.",
    paper="Sen et al. 2022; set-up of RoToR, arXiv 2502.08662, Appendix C.2",
    variants="initial order, and shuffles by seed",
    settings=Settings,
    load=load,
    score=score,
    metric="accuracy",
    max_new_tokens=100,
)
