"""LLMBar: which of two outputs follows the instruction? One set as found, four adversarial ones."""

from invariant_rag_benchmarks.base import Benchmark
from invariant_rag_benchmarks.llmbar.load import Settings, load
from invariant_rag_benchmarks.llmbar.score import figures, score

BENCHMARK = Benchmark(
    name="llmbar",
    about="Which of two outputs follows the instruction, asked in both orders: 419 pairs.",
    paper="Zeng et al. 2024, arXiv 2310.07641",
    variants="position of the better output",
    settings=Settings,
    load=load,
    score=score,
    metric="accuracy",
    max_new_tokens=500,
    figures=figures,
)
