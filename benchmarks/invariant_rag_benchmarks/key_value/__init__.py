"""Key-value retrieval: find the value of a key among 75, 140 or 300 random pairs."""

from invariant_rag_benchmarks.base import Benchmark
from invariant_rag_benchmarks.key_value.load import Settings, load
from invariant_rag_benchmarks.key_value.score import score

BENCHMARK = Benchmark(
    name="key-value",
    about="Find the value of a key among 75, 140 or 300 random pairs.",
    paper="Liu et al. 2023, arXiv 2307.03172",
    variants="slot of the asked pair, from 0",
    settings=Settings,
    load=load,
    score=score,
    metric="accuracy",
    max_new_tokens=100,
)
