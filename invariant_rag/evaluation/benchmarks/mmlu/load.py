"""Load the cases: questions with four options, in any of the options' 24 orders."""

from __future__ import annotations

from dataclasses import dataclass

from invariant_rag.errors import InvalidChoice, InvalidDataset
from invariant_rag.evaluation.benchmarks.base import Case, Selection
from invariant_rag.evaluation.benchmarks.choices import choice_case, parse_option_orders
from invariant_rag.evaluation.benchmarks.sources import DataSource, get_field, read_examples


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
    """Read `mmlu_<split>.json`, or the dataset on the hub."""
    if settings.split not in {"validation", "test"}:
        raise InvalidChoice(f"split: expected validation or test, got {settings.split!r}")
    public = f"hub://cais/mmlu/all/{settings.split}-00000-of-00001.parquet"
    examples = read_examples(source.file(f"mmlu_{settings.split}.json", public))
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
