"""Cases: an instruction and two outputs, the better one first and second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from invariant_rag.errors import InvalidChoice, InvalidDataset
from invariant_rag.evaluation.benchmarks.base import Case, Selection
from invariant_rag.evaluation.benchmarks.pairs import pair_cases
from invariant_rag.evaluation.benchmarks.sources import Source, entry, read_records

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
    """What can be chosen.

    Attributes:
        subsets: `all`, or names with commas: Natural, Neighbor, GPTInst, GPTOut, Manual.
        explain: Whether the judge explains itself before its verdict, or says only the likelier verdict.
    """

    subsets: str = "all"
    explain: bool = False


def load(source: Source, settings: Settings, selection: Selection) -> list[Case]:
    """Read one file per subset, `<subset>.json`, or one file that the path names, as its name says."""
    if source.path is not None and source.path.is_file():
        names = [source.path.name.partition(".")[0]]
    else:
        names = list(FOLDERS) if settings.subsets == "all" else settings.subsets.split(",")
    if unknown := [name for name in names if name not in FOLDERS]:
        raise InvalidChoice(f"subsets: expected names among {', '.join(FOLDERS)}, got {', '.join(unknown)}")
    records = []
    for name in names:
        path = _file(source, name)
        records += [(name, f"{name} {place}", record) for place, record in enumerate(read_records(path))]
    cases = []
    for _, (group, where, record) in selection.of(records):
        question, label = entry(record, "input", where), entry(record, "label", where)
        if label not in {1, 2}:
            raise InvalidDataset(f"{where}: expected label to be 1 or 2, got {label!r}")
        good, bad = entry(record, f"output_{label}", where), entry(record, f"output_{3 - label}", where)
        cases += pair_cases(where, question, good, bad, group, explain=settings.explain)
    return cases


def _file(source: Source, name: str) -> Path:
    """The subset's file: beside the others, in the repository's own tree, or public."""
    folder = source.path
    for inner in (f"{name}.json", f"{FOLDERS[name]}/dataset.json"):
        if folder is not None and (folder / inner).is_file():
            return source.file_beside(folder / inner)
    return source.file(f"llmbar/{name}.json", f"{PUBLIC}{FOLDERS[name]}/dataset.json")
