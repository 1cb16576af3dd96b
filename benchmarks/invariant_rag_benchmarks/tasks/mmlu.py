"""MMLU: questions with four options, in any of the options' 24 orders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, StrictInt

from invariant_rag_benchmarks.base import Benchmark, Case, Example, Scored, Selection, Settings, Text, parse_example
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.variants import choice_case, parse_option_orders, score_choice


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
        """Read `mmlu_<split>.json`, or the file on the hub."""
        public = f"hub://cais/mmlu/all/{settings.split}-00000-of-00001.parquet"
        examples = read_examples(source.file(f"mmlu_{settings.split}.json", public))
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
