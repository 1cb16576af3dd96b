"""Benchmarks over segment orders: one folder each, with a README.md, a load.py and a score.py."""

from __future__ import annotations

from invariant_rag.errors import UnknownName

from invariant_rag_benchmarks import (
    commonsense_qa,
    key_value,
    llmbar,
    longbench,
    lost_in_the_middle,
    mintaka,
    mmlu,
    r_gsm,
    reward_bench,
    timeline,
    two_wiki,
    xquad,
)
from invariant_rag_benchmarks.base import Benchmark, Case, Record, Scored, Selection

BENCHMARKS: dict[str, Benchmark] = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (
        lost_in_the_middle,
        key_value,
        mmlu,
        commonsense_qa,
        mintaka,
        reward_bench,
        llmbar,
        two_wiki,
        xquad,
        r_gsm,
        timeline,
        longbench,
    )
}

__all__ = ["BENCHMARKS", "Benchmark", "Case", "Record", "Scored", "Selection", "resolve_benchmark"]


def resolve_benchmark(name: str) -> Benchmark:
    """Return the benchmark of that name.

    Raises:
        UnknownName: There is none; the message lists them.
    """
    if name not in BENCHMARKS:
        raise UnknownName("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name]
