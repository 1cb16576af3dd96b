"""Load the cases: a prompt and two responses, the chosen one first and second."""

from __future__ import annotations

from dataclasses import dataclass

from invariant_rag_benchmarks.base import Case, Selection
from invariant_rag_benchmarks.pairs import pair_cases
from invariant_rag_benchmarks.sources import DataSource, get_field, read_examples

NAME = "filtered-00000-of-00001.parquet"
PUBLIC = f"hub://allenai/reward-bench/data/{NAME}"


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
        explain: Whether the judge explains its verdict first, as the benchmark's judges do; else the output is the
            likelier verdict.
    """

    explain: bool = True


def load(source: DataSource, settings: Settings, selection: Selection) -> list[Case]:
    """Read the filtered split: `prompt`, `chosen`, `rejected`, `subset`."""
    examples = read_examples(source.file(NAME, PUBLIC))
    cases = []
    for index, example in selection.sample(examples):
        where = f"example {index}"
        question, good, bad, subset = (
            get_field(example, name, where) for name in ("prompt", "chosen", "rejected", "subset")
        )
        cases += pair_cases(str(index), question, good, bad, subset, explain=settings.explain)
    return cases
