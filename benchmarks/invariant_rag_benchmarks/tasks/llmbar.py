"""LLMBar: which of two outputs follows the instruction? One set as found, four adversarial ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from invariant_rag.errors import InvalidChoice, InvalidDataset
from pydantic import Field

from invariant_rag_benchmarks.base import (
    Benchmark,
    Case,
    Example,
    Record,
    Scored,
    Selection,
    Settings,
    Text,
    parse_example,
)
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.tasks.reward_bench import judge_figures, pair_cases, score_verdict

PUBLIC = "https://raw.githubusercontent.com/princeton-nlp/LLMBar/main/Dataset/LLMBar/"
FOLDERS = {
    "Natural": "Natural",
    "Neighbor": "Adversarial/Neighbor",
    "GPTInst": "Adversarial/GPTInst",
    "GPTOut": "Adversarial/GPTOut",
    "Manual": "Adversarial/Manual",
}


class LLMBarSettings(Settings):
    """Settings of the benchmark."""

    subsets: str = Field("all", description=f"names with commas: {', '.join(FOLDERS)}")
    explain: bool = Field(False, description="whether the judge explains itself first, or says the likelier verdict")


class _Pair(Example):
    input: Text
    output_1: Text
    output_2: Text
    label: Literal[1, 2]


class LLMBar(Benchmark[LLMBarSettings]):
    """Pairs of outputs, the better one first and second."""

    name = "llmbar"
    about = "Which of two outputs follows the instruction, asked in both orders: 419 pairs."
    paper = "Zeng et al. 2024, arXiv 2310.07641"
    variants = "position of the better output"
    settings = LLMBarSettings
    max_new_tokens = 500

    def read(self, source: DataSource, settings: LLMBarSettings, selection: Selection) -> Iterator[Case]:
        """Read one file per subset, `<subset>.json`, or the one file at the path, which is named after its subset."""
        names = list(FOLDERS) if settings.subsets == "all" else settings.subsets.split(",")
        if source.path is not None and source.path.is_file():
            names = [source.path.name.partition(".")[0]]
            if settings.subsets not in {"all", *names}:
                raise InvalidDataset(f"expected a file of {settings.subsets}, got {source.path.name!r}, of {names[0]}")
        if unknown := [name for name in names if name not in FOLDERS]:
            raise InvalidChoice(f"subsets: expected names among {', '.join(FOLDERS)}, got {', '.join(unknown)}")
        records = [
            (name, f"{name} {index}", record)
            for name in names
            for index, record in enumerate(read_examples(_file(source, name)))
        ]
        for _, (group, where, record) in selection.sample(records):
            pair = parse_example(_Pair, record, where)
            good, bad = (pair.output_1, pair.output_2)[:: 1 if pair.label == 1 else -1]
            yield from pair_cases(where, pair.input, good, bad, group, explain=settings.explain)

    def score(self, case: Case, output: str) -> Scored:
        """Score the verdict; see `score_verdict`."""
        return score_verdict(case, output)

    def figures(self, records: Iterable[Record]) -> dict[str, float]:
        """Return consistency and preference over the two orders; see `judge_figures`."""
        return judge_figures(records)


def _file(source: DataSource, name: str) -> Path:
    """Return the file of a subset: in the folder, in the tree of LLMBar's repository, or downloaded."""
    folder = source.path
    for inner in (f"{name}.json", f"{FOLDERS[name]}/dataset.json"):
        if folder is not None and (folder / inner).is_file():
            return source.file_beside(folder / inner)
    return source.file(f"llmbar/{name}.json", f"{PUBLIC}{FOLDERS[name]}/dataset.json")
