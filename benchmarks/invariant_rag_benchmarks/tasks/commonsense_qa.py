"""CommonsenseQA: questions with five options, over the orders of the options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from invariant_rag_benchmarks.base import Benchmark, Case, Example, Scored, Selection, Settings, Text, parse_example
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.errors import InvalidDataset
from invariant_rag_benchmarks.variants import choice_case, parse_option_orders, score_choice

NAME = "validation-00000-of-00001.parquet"
PUBLIC = f"hub://tau/commonsense_qa/data/{NAME}"


class CommonsenseQASettings(Settings):
    """Settings of the benchmark."""

    format: Literal["letters", "plain", "quoted"] = Field(
        "letters", description="plain and quoted have options without letters, as in Set-Based Prompting"
    )
    orders: str = Field("rotations", description="rotations (5), ends, all (120), or numbers from 0 to 119")


class _Choices(Example):
    label: list[Text]
    text: list[Text]


class _Question(Example):
    question: Text
    choices: _Choices
    answerKey: Text  # noqa: N815 - the file's own name

    @model_validator(mode="before")
    @classmethod
    def _of_the_original_release(cls, record: Any) -> Any:
        """Take the form with a stem, whose options have a label and a text each, apart."""
        if not isinstance(record, dict) or not isinstance(record.get("question"), dict):
            return record
        options = record["question"].get("choices")
        if not isinstance(options, list) or not all(isinstance(each, dict) for each in options):
            raise ValueError("expected a question with choices")
        choices = {name: [each.get(name) for each in options] for name in ("label", "text")}
        return {**record, "question": record["question"].get("stem"), "choices": choices}


class CommonsenseQA(Benchmark[CommonsenseQASettings]):
    """Multiple choice with five options."""

    name = "commonsense-qa"
    about = "Multiple choice on common sense, over orders of the five options."
    paper = "Talmor et al. 2019, arXiv 1811.00937; orders as in Set-Based Prompting, arXiv 2406.06581"
    variants = "order of the options: positions in the file"
    settings = CommonsenseQASettings
    max_new_tokens = 10

    def read(self, source: DataSource, settings: CommonsenseQASettings, selection: Selection) -> Iterator[Case]:
        """Read the validation split: the hub's format, or the original one with its `stem`."""
        for index, record in selection.sample(read_examples(source.file(NAME, PUBLIC))):
            asked = parse_example(_Question, record, f"example {index}")
            labels, options = asked.choices.label, asked.choices.text
            if asked.answerKey not in labels or len(labels) != len(options):
                raise InvalidDataset(f"example {index}: expected answerKey among {labels}, got {asked.answerKey!r}")
            gold = labels.index(asked.answerKey)
            for order in parse_option_orders(settings.orders, len(options)):
                prefix = f"Question: {asked.question}\n"
                lettered = choice_case(str(index), prefix, options, gold, order, asked.question)
                yield lettered if settings.format == "letters" else _unlettered(lettered, options, settings.format)

    def score(self, case: Case, output: str) -> Scored:
        """Score 1 for the right letter, or, without letters, if the output has the right option and no other one.

        The latter is `eval_accuracy` in `evalCSQA.py` of Set-Based Prompting: letter by letter, case included.
        """
        if case.candidates:
            return score_choice(case, output)
        named = [option for option in case.gold if option in output]
        return Scored(" | ".join(sorted(named)), {"accuracy": float(named == [case.gold[0]])})


def _unlettered(case: Case, options: Sequence[str], shown: str) -> Case:
    """Return a lettered case with its options as bare segments. Its gold is the right option, then the others."""
    texts, gold = [f"\n- {options[int(index)]}" for index in case.variant], int(case.gold[0])
    quoted = ['"' + text.replace('"', "'") + '" ' for text in texts]
    return replace(
        case,
        prefix=f"{case.query}\n",
        segments=tuple(texts if shown == "plain" else quoted),
        suffix=" Answer: " if shown == "plain" else "Answer: ",
        gold=(options[gold], *options[:gold], *options[gold + 1 :]),
        candidates=(),
    )
