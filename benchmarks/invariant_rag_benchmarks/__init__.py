"""Benchmarks over segment orders, published tables measured again, and what order invariance costs."""

from __future__ import annotations

from typing import Any

from invariant_rag.checks import check_name

from invariant_rag_benchmarks.base import Benchmark, Case, Record, Scored, Selection
from invariant_rag_benchmarks.tasks import chunks, documents, judging, statements

BENCHMARKS: dict[str, Benchmark[Any]] = {
    each.name: each
    for each in (
        documents.LostInTheMiddle(),
        documents.KeyValue(),
        statements.MMLU(),
        statements.Mintaka(),
        judging.RewardBench(),
        judging.LLMBar(),
        chunks.TwoWiki(),
        documents.XQuAD(),
        statements.RGSM(),
        chunks.Timeline(),
        chunks.LongBench(),
    )
}
"""Every benchmark by its name."""

__all__ = ["BENCHMARKS", "Benchmark", "Case", "Record", "Scored", "Selection", "resolve_benchmark"]


def resolve_benchmark(name: str) -> Benchmark[Any]:
    """Return the benchmark of that name; an `UnknownName` lists those there are."""
    return BENCHMARKS[check_name("benchmark", name, BENCHMARKS)]
