"""RewardBench: which of two responses is better? Chat, hard chat, safety, reasoning."""

from invariant_rag_benchmarks.base import Benchmark
from invariant_rag_benchmarks.reward_bench.load import Settings, load
from invariant_rag_benchmarks.reward_bench.score import figures, score

BENCHMARK = Benchmark(
    name="reward-bench",
    about="Which of two responses is better, asked in both orders: 23 subsets in four sections.",
    paper="Lambert et al. 2024, arXiv 2403.13787; set-up of PINE, arXiv 2407.01100",
    variants="position of the chosen response",
    settings=Settings,
    load=load,
    score=score,
    metric="accuracy",
    max_new_tokens=500,
    figures=figures,
)
