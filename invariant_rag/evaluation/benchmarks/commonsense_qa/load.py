"""Cases: questions with five options, in several orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from invariant_rag.errors import InvalidDataset
from invariant_rag.evaluation.benchmarks.base import Case, Selection
from invariant_rag.evaluation.benchmarks.choices import choice_case, option_orders
from invariant_rag.evaluation.benchmarks.sources import Source, entry, read_records

NAME = "validation-00000-of-00001.parquet"
PUBLIC = f"hub://tau/commonsense_qa/data/{NAME}"


@dataclass(frozen=True)
class Settings:
    """What can be chosen.

    Attributes:
        orders: Orders of the options: `rotations`, `ends`, `all` (120), or numbers from 0 to 119 with commas.
    """

    orders: str = "rotations"


def load(source: Source, settings: Settings, selection: Selection) -> list[Case]:
    """Read the validation split: the hub's format, or the original one with its `stem`."""
    records = read_records(source.file(NAME, PUBLIC))
    cases = []
    for place, record in selection.of(records):
        question, labels, options = _parts(record, f"record {place}")
        letter = entry(record, "answerKey", f"record {place}")
        if letter not in labels:
            raise InvalidDataset(f"record {place}: expected answerKey to be one of {labels}, got {letter!r}")
        for order in option_orders(settings.orders, len(options)):
            prefix = f"Question: {question}\n"
            cases.append(choice_case(str(place), prefix, options, labels.index(letter), order, question))
    return cases


def _parts(record: Any, where: str) -> tuple[str, list[str], list[str]]:
    """Question, labels of the options, and options."""
    question = entry(record, "question", where)
    if isinstance(question, dict):
        options = entry(question, "choices", where)
        return entry(question, "stem", where), [each["label"] for each in options], [each["text"] for each in options]
    choices = entry(record, "choices", where)
    return question, list(entry(choices, "label", where)), list(entry(choices, "text", where))
