"""LongBench 2WikiMultihopQA: multi-hop questions over a long context in chunks."""

from invariant_rag_benchmarks.base import Benchmark
from invariant_rag_benchmarks.two_wiki.load import Settings, load
from invariant_rag_benchmarks.two_wiki.score import score

BENCHMARK = Benchmark(
    name="two-wiki",
    about="Multi-hop questions over a long context in chunks: initial, reversed, centre-flipped.",
    paper="Bai et al. 2024, arXiv 2308.14508 (LongBench-E); chunk orders of RoToR, arXiv 2502.08662, Appendix J",
    variants="order of the chunks",
    settings=Settings,
    load=load,
    score=score,
    metric="f1",
    max_new_tokens=32,
)
