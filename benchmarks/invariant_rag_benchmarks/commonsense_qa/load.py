"""Load the cases: questions with five options, in several orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from invariant_rag.errors import InvalidDataset, UnknownName

from invariant_rag_benchmarks.base import Case, Selection
from invariant_rag_benchmarks.choices import choice_case, parse_option_orders
from invariant_rag_benchmarks.sources import DataSource, get_field, read_examples

NAME = "validation-00000-of-00001.parquet"
FORMATS = ("letters", "plain", "quoted")
PUBLIC = f"hub://tau/commonsense_qa/data/{NAME}"


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
        format: `letters`: options A to E, of which the likeliest letter is the answer. `plain` and `quoted`: options
            without letters as in Set-Based Prompting (`data/csqa_split` and `data/csqa_quoted` of
            reidmcy/set-based-prompting), and the answer is generated.
        orders: Orders of the options: `rotations`, `ends`, `all` (120), or numbers from 0 to 119, comma-separated.
    """

    format: str = "letters"
    orders: str = "rotations"


def load(source: DataSource, settings: Settings, selection: Selection) -> list[Case]:
    """Read the validation split: the hub's format, or the original one with its `stem`."""
    if settings.format not in FORMATS:
        raise UnknownName("format of commonsense-qa", settings.format, FORMATS)
    examples = read_examples(source.file(NAME, PUBLIC))
    cases = []
    for index, example in selection.sample(examples):
        question, labels, options = _parse(example, f"example {index}")
        letter = get_field(example, "answerKey", f"example {index}")
        if letter not in labels:
            raise InvalidDataset(f"example {index}: expected answerKey to be one of {labels}, got {letter!r}")
        for order in parse_option_orders(settings.orders, len(options)):
            gold = labels.index(letter)
            if settings.format == "letters":
                cases.append(choice_case(str(index), f"Question: {question}\n", options, gold, order, question))
            else:
                cases.append(
                    _unlettered(str(index), question, options, gold, order, quoted=settings.format == "quoted")
                )
    return cases


def _unlettered(
    name: str, question: str, options: Sequence[str], gold: int, order: Sequence[int], *, quoted: bool
) -> Case:
    """Return the case with options as bare segments. Its gold is the right option, then the others."""
    texts = [f"\n- {options[index]}" for index in order]
    if quoted:
        texts = ['"' + text.replace('"', "'") + '" ' for text in texts]
    return Case(
        question=name,
        variant="".join(map(str, order)),
        prefix=f"{question}\n",
        segments=tuple(texts),
        suffix="Answer: " if quoted else " Answer: ",
        gold=(options[gold], *(option for index, option in enumerate(options) if index != gold)),
        query=question,
        chat=False,
    )


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
