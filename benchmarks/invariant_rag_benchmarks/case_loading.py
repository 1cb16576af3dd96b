"""Load the cases of a benchmark, and refuse records whose values are of other types than the README shows."""

from __future__ import annotations

from typing import Any

from invariant_rag.errors import InvalidDataset, InvariantRAGError
from invariant_rag.shown import shown

from invariant_rag_benchmarks.base import Benchmark, Case, Selection
from invariant_rag_benchmarks.sources import DataSource


def load_cases(benchmark: Benchmark, source: DataSource, settings: Any, selection: Selection) -> list[Case]:
    """Return the cases of the chosen questions.

    Raises:
        InvalidDataset: A record is not in the format of the benchmark's README.
        InvariantRAGError: Any other error of the loader.
    """
    try:
        cases = benchmark.load(source, settings, selection)
    except InvariantRAGError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        # A value of another type fails wherever the loader first uses it.
        raise InvalidDataset(
            f"{_files(source)}: a record of {benchmark.name} has a value of another type than its README shows "
            f"({type(error).__name__}: {error})"
        ) from error
    for case in cases:
        _check_gold(benchmark, case, source)
        texts = (case.question, case.variant, case.prefix, case.suffix, case.query, case.system, case.group)
        parts = (*texts, *case.segments, *case.gold, *case.candidates)
        if wrong := [each for each in parts if not isinstance(each, str)]:
            where = f"{_files(source)}, question {case.question!r}"
            raise InvalidDataset(f"{where}: expected texts, got {type(wrong[0]).__name__} {shown(wrong[0])}")
    return cases


def _check_gold(benchmark: Benchmark, case: Case, source: DataSource) -> None:
    """Score some output, so that a gold answer that cannot be compared with is found before the model is asked."""
    try:
        benchmark.score(case, case.candidates[0] if case.candidates else "Answer: 1")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidDataset(
            f"{_files(source)}, question {shown(case.question)}: the answer {shown(case.gold)} is none that "
            f"{benchmark.name} can compare with ({type(error).__name__}: {error})"
        ) from error


def _files(source: DataSource) -> str:
    return ", ".join(source.digests) or str(source.path)
