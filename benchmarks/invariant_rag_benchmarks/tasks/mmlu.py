"""MMLU: questions with four options, in any of the options' 24 orders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from invariant_rag.errors import InvalidDataset
from pydantic import Field, StrictInt

from invariant_rag_benchmarks.base import Benchmark, Case, Example, Scored, Selection, Settings, Text, parse_example
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.variants import choice_case, parse_option_orders, score_choice

SIZES = {"validation": 1531, "test": 14_042}
"""Questions of each split."""


class MMLUSettings(Settings):
    """Settings of the benchmark."""

    split: Literal["validation", "test"] = Field("validation", description="validation or test")
    orders: str = Field("all", description="all (24), ends, rotations, or numbers from 0 to 23")


class _Question(Example):
    question: Text
    subject: Text
    choices: list[Text] = Field(min_length=4, max_length=4)
    answer: StrictInt = Field(ge=0, le=3)


class MMLU(Benchmark[MMLUSettings]):
    """Multiple choice with four options."""

    name = "mmlu"
    about = "Multiple choice in 57 subjects, over the 24 orders of the four options."
    paper = "Hendrycks et al. 2021, arXiv 2009.03300; orders as in RoToR, arXiv 2502.08662"
    variants = "order of the options: positions in the file"
    settings = MMLUSettings

    def read(self, source: DataSource, settings: MMLUSettings, selection: Selection) -> Iterator[Case]:
        """Read `mmlu_<split>.json`, the authors' CSV files (one, or the folder with `val` and `test`), or the hub."""
        tree = source.folder("test" if settings.split == "test" else "val")
        public = f"hub://cais/mmlu/all/{settings.split}-00000-of-00001.parquet"
        if tree is not None and any(tree.glob("*.csv")):
            examples = [each for path in sorted(tree.glob("*.csv")) for each in _from_rows(source.file_beside(path))]
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
        for index, record in selection.sample(examples):
            asked = parse_example(_Question, record, f"example {index}")
            # The prompt of RoToR's own code, its blank lines included.
            topic = asked.subject.replace("_", " ")
            prefix = (
                f"The following are multiple choice questions (with answers) about {topic}.\n\n\n\n{asked.question}\n"
            )
            for order in orders:
                yield choice_case(str(index), prefix, asked.choices, asked.answer, order, asked.question, asked.subject)

    def score(self, case: Case, output: str) -> Scored:
        """Score the letter; see `score_choice`."""
        return score_choice(case, output)


def _from_rows(path: Path) -> list[dict[str, Any]]:
    """Return the questions of a CSV file named `SUBJECT_SPLIT.csv`: question, four options, letter of the right one."""
    subject = re.sub(r"_(dev|val|test)$", "", path.stem)
    found = []
    for number, row in enumerate(read_examples(path), start=1):
        letter = row[5].strip() if len(row) == 6 else ""
        if letter not in {"A", "B", "C", "D"}:
            raise InvalidDataset(f"{path}, row {number}: expected question, four options, and A, B, C or D, got {row}")
        found.append({"question": row[0], "subject": subject, "choices": row[1:5], "answer": "ABCD".index(letter)})
    return found
