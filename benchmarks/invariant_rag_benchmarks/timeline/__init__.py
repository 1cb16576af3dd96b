"""LooGLE timeline reorder: order matters here, so invariant methods are expected to lose."""

from invariant_rag_benchmarks.base import Benchmark
from invariant_rag_benchmarks.timeline.load import Settings, load
from invariant_rag_benchmarks.timeline.score import score

BENCHMARK = Benchmark(
    name="timeline",
    about="Put events of a long text into order: a control whose segments are NOT a set.",
    paper="Li et al. 2023, arXiv 2311.04939 (LooGLE)",
    variants="order of the text",
    settings=Settings,
    load=load,
    score=score,
    metric="accuracy",
    max_new_tokens=100,
)
