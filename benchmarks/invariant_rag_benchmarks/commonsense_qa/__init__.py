"""CommonsenseQA: questions with five options, over the orders of the options."""

from invariant_rag_benchmarks.base import Benchmark
from invariant_rag_benchmarks.commonsense_qa.load import Settings, load
from invariant_rag_benchmarks.commonsense_qa.score import score

BENCHMARK = Benchmark(
    name="commonsense-qa",
    about="Multiple choice on common sense, over orders of the five options.",
    paper="Talmor et al. 2019, arXiv 1811.00937; orders as in Set-Based Prompting, arXiv 2406.06581",
    variants="order of the options: positions in the file",
    settings=Settings,
    load=load,
    score=score,
    metric="accuracy",
    max_new_tokens=10,
)
