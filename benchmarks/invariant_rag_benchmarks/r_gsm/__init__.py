"""R-GSM: word problems whose conditions can change places."""

from invariant_rag_benchmarks.base import Benchmark
from invariant_rag_benchmarks.r_gsm.load import Settings, load
from invariant_rag_benchmarks.r_gsm.score import score

BENCHMARK = Benchmark(
    name="r-gsm",
    about="Word problems whose conditions change places.",
    paper="Chen et al. 2024, arXiv 2402.08939; set-up of PINE, arXiv 2407.01100, Appendix E.2",
    variants="order of the conditions",
    settings=Settings,
    load=load,
    score=score,
    metric="accuracy",
    max_new_tokens=500,
)
