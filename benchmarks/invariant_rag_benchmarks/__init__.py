"""Benchmarks over segment orders, published tables measured again, and what order invariance costs."""

from __future__ import annotations

from typing import Any

from invariant_rag.errors import UnknownName

from invariant_rag_benchmarks.base import Benchmark, Case, Record, Scored, Selection
from invariant_rag_benchmarks.tasks.commonsense_qa import CommonsenseQA
from invariant_rag_benchmarks.tasks.judging import LLMBar, RewardBench
from invariant_rag_benchmarks.tasks.key_value import KeyValue
from invariant_rag_benchmarks.tasks.longbench import LongBench, TwoWiki
from invariant_rag_benchmarks.tasks.lost_in_the_middle import LostInTheMiddle
from invariant_rag_benchmarks.tasks.mintaka import Mintaka
from invariant_rag_benchmarks.tasks.mmlu import MMLU
from invariant_rag_benchmarks.tasks.r_gsm import RGSM
from invariant_rag_benchmarks.tasks.timeline import Timeline
from invariant_rag_benchmarks.tasks.xquad import XQuAD

_ALL: tuple[Benchmark[Any], ...] = (
    LostInTheMiddle(),
    KeyValue(),
    MMLU(),
    CommonsenseQA(),
    Mintaka(),
    RewardBench(),
    LLMBar(),
    TwoWiki(),
    XQuAD(),
    RGSM(),
    Timeline(),
    LongBench(),
)
BENCHMARKS: dict[str, Benchmark[Any]] = {each.name: each for each in _ALL}
"""Every benchmark by its name."""

__all__ = ["BENCHMARKS", "Benchmark", "Case", "Record", "Scored", "Selection", "resolve_benchmark"]


def resolve_benchmark(name: str) -> Benchmark[Any]:
    """Return the benchmark of that name.

    Raises:
        UnknownName: There is none; the message lists them.
    """
    if name not in BENCHMARKS:
        raise UnknownName("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name]
