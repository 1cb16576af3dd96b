"""MMLU: questions of 57 subjects with four options, over the options' 24 orders."""

from invariant_rag_benchmarks.base import Benchmark
from invariant_rag_benchmarks.mmlu.load import Settings, load
from invariant_rag_benchmarks.mmlu.score import score

BENCHMARK = Benchmark(
    name="mmlu",
    about="Multiple choice in 57 subjects, over the 24 orders of the four options.",
    paper="Hendrycks et al. 2021, arXiv 2009.03300; orders as in RoToR, arXiv 2502.08662",
    variants="order of the options: positions in the file",
    settings=Settings,
    load=load,
    score=score,
    metric="accuracy",
)
