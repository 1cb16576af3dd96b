"""Load the cases: an instruction and two outputs, the better one first and second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from invariant_rag.errors import InvalidChoice, InvalidDataset

from invariant_rag_benchmarks.base import Case, Selection
from invariant_rag_benchmarks.pairs import pair_cases
from invariant_rag_benchmarks.sources import DataSource, get_field, read_examples

PUBLIC = "https://raw.githubusercontent.com/princeton-nlp/LLMBar/main/Dataset/LLMBar/"
FOLDERS = {
    "Natural": "Natural",
    "Neighbor": "Adversarial/Neighbor",
    "GPTInst": "Adversarial/GPTInst",
    "GPTOut": "Adversarial/GPTOut",
    "Manual": "Adversarial/Manual",
}


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
        subsets: `all`, or comma-separated names: Natural, Neighbor, GPTInst, GPTOut, Manual.
        explain: Whether the judge explains its verdict first; else the output is the likelier verdict.
    """

    subsets: str = "all"
    explain: bool = False


def load(source: DataSource, settings: Settings, selection: Selection) -> list[Case]:
    """Read one file per subset, `<subset>.json`, or the one file at the path, which is named after its subset."""
    if source.path is not None and source.path.is_file():
        names = [source.path.name.partition(".")[0]]
        if settings.subsets not in {"all", *names}:
            raise InvalidDataset(f"expected a file of {settings.subsets}, got {source.path.name!r}, of {names[0]}")
    else:
        names = list(FOLDERS) if settings.subsets == "all" else settings.subsets.split(",")
    if unknown := [name for name in names if name not in FOLDERS]:
        raise InvalidChoice(f"subsets: expected names among {', '.join(FOLDERS)}, got {', '.join(unknown)}")
    examples = []
    for name in names:
        path = _file(source, name)
        examples += [(name, f"{name} {index}", example) for index, example in enumerate(read_examples(path))]
    cases = []
    for _, (group, where, example) in selection.sample(examples):
        question, label = get_field(example, "input", where), get_field(example, "label", where)
        if label not in {1, 2}:
            raise InvalidDataset(f"{where}: expected label to be 1 or 2, got {label!r}")
        good, bad = get_field(example, f"output_{label}", where), get_field(example, f"output_{3 - label}", where)
        cases += pair_cases(where, question, good, bad, group, explain=settings.explain)
    return cases


def _file(source: DataSource, name: str) -> Path:
    """Return the file of a subset: in the folder, in the tree of LLMBar's repository, or downloaded."""
    folder = source.path
    for inner in (f"{name}.json", f"{FOLDERS[name]}/dataset.json"):
        if folder is not None and (folder / inner).is_file():
            return source.file_beside(folder / inner)
    return source.file(f"llmbar/{name}.json", f"{PUBLIC}{FOLDERS[name]}/dataset.json")
