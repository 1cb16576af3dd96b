"""Load the cases: questions with four options, in any of the options' 24 orders."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invariant_rag.errors import InvalidChoice, InvalidDataset

from invariant_rag_benchmarks.base import Case, Selection
from invariant_rag_benchmarks.choices import choice_case, parse_option_orders
from invariant_rag_benchmarks.sources import DataSource, get_field, read_examples

SIZES = {"validation": 1531, "test": 14_042}
"""Questions of each split."""
LETTERS = "ABCD"


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
        split: `validation` or `test`.
        orders: Orders of the options: `all`, `ends`, `rotations`, or numbers from 0 to 23, comma-separated.
    """

    split: str = "validation"
    orders: str = "all"


def load(source: DataSource, settings: Settings, selection: Selection) -> list[Case]:
    """Read `mmlu_<split>.json`, the CSV files of the authors (one, or the folder with `val` and `test`), or the hub."""
    if settings.split not in {"validation", "test"}:
        raise InvalidChoice(f"split: expected validation or test, got {settings.split!r}")
    tree = source.folder("test" if settings.split == "test" else "val")
    public = f"hub://cais/mmlu/all/{settings.split}-00000-of-00001.parquet"
    if tree is not None and any(tree.glob("*.csv")):
        paths = sorted(tree.glob("*.csv"))
        examples = [each for path in paths for each in _from_rows(source.file_beside(path))]
    else:
        path = source.file(f"mmlu_{settings.split}.json", public)
        examples = _from_rows(path) if path.suffix == ".csv" else read_examples(path)
    for split, size in SIZES.items():
        if len(examples) == size and split != settings.split:
            raise InvalidDataset(
                f"expected the questions of {settings.split}, got {size}, as many as {split} has",
                hint=f"Choose `--set split={split}`.",
            )
    orders = parse_option_orders(settings.orders, 4)
    cases = []
    for index, example in selection.sample(examples):
        where = f"example {index}"
        options, gold = get_field(example, "choices", where), get_field(example, "answer", where)
        subject, question = get_field(example, "subject", where), get_field(example, "question", where)
        if len(options) != 4 or gold not in range(4):
            raise InvalidDataset(
                f"{where}: expected four choices and the index of one, got {len(options)} and {gold!r}"
            )
        # The prompt of RoToR's own code, its blank lines included.
        topic = subject.replace("_", " ")
        prefix = f"The following are multiple choice questions (with answers) about {topic}.\n\n\n\n{question}\n"
        cases += [choice_case(str(index), prefix, options, gold, order, question, subject) for order in orders]
    return cases


def _from_rows(path: Path) -> list[dict[str, Any]]:
    """Return the questions of a CSV file named `SUBJECT_SPLIT.csv`: question, four options, letter of the right one."""
    subject = re.sub(r"_(dev|val|test)$", "", path.stem)
    found = []
    for number, row in enumerate(read_examples(path), start=1):
        if len(row) != 6 or row[5].strip() not in LETTERS or not row[5].strip():
            raise InvalidDataset(f"{path}, row {number}: expected question, four options, and A, B, C or D, got {row}")
        answer = LETTERS.index(row[5].strip())
        found.append({"question": row[0], "subject": subject, "choices": row[1:5], "answer": answer})
    return found
