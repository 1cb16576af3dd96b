"""Cases: a prompt and two responses, the chosen one first and second."""

from __future__ import annotations

from dataclasses import dataclass

from invariant_rag.evaluation.benchmarks.base import Case, Selection
from invariant_rag.evaluation.benchmarks.pairs import pair_cases
from invariant_rag.evaluation.benchmarks.sources import Source, entry, read_records

NAME = "filtered-00000-of-00001.parquet"
PUBLIC = f"hub://allenai/reward-bench/data/{NAME}"


@dataclass(frozen=True)
class Settings:
    """What can be chosen.

    Attributes:
        explain: Whether the judge explains itself before its verdict, as the benchmark's judges do, or says only the
            likelier verdict.
    """

    explain: bool = True


def load(source: Source, settings: Settings, selection: Selection) -> list[Case]:
    """Read the filtered split: `prompt`, `chosen`, `rejected`, `subset`."""
    records = read_records(source.file(NAME, PUBLIC))
    cases = []
    for place, record in selection.of(records):
        where = f"record {place}"
        question, good, bad, subset = (
            entry(record, name, where) for name in ("prompt", "chosen", "rejected", "subset")
        )
        cases += pair_cases(str(place), question, good, bad, subset, explain=settings.explain)
    return cases
