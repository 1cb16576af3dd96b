"""LongBench: sixteen English tasks over long contexts."""

from invariant_rag_benchmarks.base import Benchmark
from invariant_rag_benchmarks.longbench.load import Settings, load
from invariant_rag_benchmarks.longbench.score import figures, score

BENCHMARK = Benchmark(
    name="longbench",
    about="Sixteen English tasks over long contexts in chunks.",
    paper="Bai et al. 2023, arXiv 2308.14508; groups of arXiv 2406.02536, table 2",
    variants="order of the chunks",
    settings=Settings,
    load=load,
    score=score,
    metric="score",
    max_new_tokens=512,
    figures=figures,
)
