"""XQuAD: questions over the five paragraphs of one article, so that every distractor is on the same matter."""

from invariant_rag_benchmarks.base import Benchmark
from invariant_rag_benchmarks.xquad.load import Settings, load
from invariant_rag_benchmarks.xquad.score import score

BENCHMARK = Benchmark(
    name="xquad",
    about="Questions over the five paragraphs of one article, the gold one at any slot.",
    paper="Artetxe et al. 2020, arXiv 1910.11856",
    variants="gold slot, from 0",
    settings=Settings,
    load=load,
    score=score,
    metric="best_subspan_em",
    max_new_tokens=100,
)
