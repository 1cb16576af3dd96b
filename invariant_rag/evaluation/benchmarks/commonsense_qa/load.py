"""Load the cases: questions with five options, in several orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from invariant_rag.errors import InvalidDataset
from invariant_rag.evaluation.benchmarks.base import Case, Selection
from invariant_rag.evaluation.benchmarks.choices import choice_case, parse_option_orders
from invariant_rag.evaluation.benchmarks.sources import DataSource, get_field, read_examples

NAME = "validation-00000-of-00001.parquet"
PUBLIC = f"hub://tau/commonsense_qa/data/{NAME}"


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
        orders: Orders of the options: `rotations`, `ends`, `all` (120), or numbers from 0 to 119, comma-separated.
    """

    orders: str = "rotations"


def load(source: DataSource, settings: Settings, selection: Selection) -> list[Case]:
    """Read the validation split: the hub's format, or the original one with its `stem`."""
    examples = read_examples(source.file(NAME, PUBLIC))
    cases = []
    for index, example in selection.sample(examples):
        question, labels, options = _parse(example, f"example {index}")
        letter = get_field(example, "answerKey", f"example {index}")
        if letter not in labels:
            raise InvalidDataset(f"example {index}: expected answerKey to be one of {labels}, got {letter!r}")
        for order in parse_option_orders(settings.orders, len(options)):
            prefix = f"Question: {question}\n"
            cases.append(choice_case(str(index), prefix, options, labels.index(letter), order, question))
    return cases


def _parse(example: Any, where: str) -> tuple[str, list[str], list[str]]:
    """Return question, labels of the options, and options."""
    question = get_field(example, "question", where)
    if isinstance(question, dict):
        options = get_field(question, "choices", where)
        return (
            get_field(question, "stem", where),
            [each["label"] for each in options],
            [each["text"] for each in options],
        )
    choices = get_field(example, "choices", where)
    return question, list(get_field(choices, "label", where)), list(get_field(choices, "text", where))
