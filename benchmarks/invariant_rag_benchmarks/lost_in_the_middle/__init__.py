"""Lost in the Middle: open-domain questions over 10, 20 or 30 documents, the gold one at any slot."""

from invariant_rag_benchmarks.base import Benchmark
from invariant_rag_benchmarks.lost_in_the_middle.load import Settings, load
from invariant_rag_benchmarks.lost_in_the_middle.score import score

BENCHMARK = Benchmark(
    name="lost-in-the-middle",
    about="Questions over 10, 20 or 30 documents, the gold one at any slot.",
    paper="Liu et al. 2023, arXiv 2307.03172",
    variants="gold slot from 0, or order of the documents",
    settings=Settings,
    load=load,
    score=score,
    metric="best_subspan_em",
    max_new_tokens=100,
)
