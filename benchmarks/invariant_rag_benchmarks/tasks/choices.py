"""MMLU and CommonsenseQA: questions with four or five options, over the orders of the options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, StrictInt

from invariant_rag_benchmarks.base import Benchmark, Case, Example, Scored, Selection, Settings, Text
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.errors import InvalidDataset
from invariant_rag_benchmarks.variants import parse_option_orders

_COMMON_SENSE = "validation-00000-of-00001.parquet"
_LETTERS = "ABCDEFGHIJ"


def choice_case(
    name: str, prefix: str, options: Sequence[str], gold: int, order: Sequence[int], query: str, group: str = ""
) -> Case:
    """Return the case with the options in this order, lettered A, B...; the output is the likeliest of ` A`, ` B`..."""
    return Case(
        question=name,
        variant="".join(map(str, order)),
        prefix=prefix,
        segments=tuple(f"{letter}. {options[index]}\n" for letter, index in zip(_LETTERS, order, strict=False)),
        suffix="Answer:",
        gold=(str(gold),),
        query=query,
        chat=False,
        candidates=tuple(f" {letter}" for letter in _LETTERS[: len(options)]),
        group=group,
    )


def score_choice(case: Case, output: str) -> Scored:
    """Score 1 if the letter stands for the gold option. The answer is the option's index in the original options."""
    answer = case.variant[case.candidates.index(output)]
    return Scored(answer, {"accuracy": float(answer == case.gold[0])})


class _MMLUSettings(Settings):
    split: Literal["validation", "test"] = Field("validation", description="validation or test")
    orders: str = Field("all", description="all (24), ends, rotations, or numbers from 0 to 23")


class _FourOptions(Example):
    question: Text
    subject: Text
    choices: list[Text] = Field(min_length=4, max_length=4)
    answer: StrictInt = Field(ge=0, le=3)


class MMLU(Benchmark[_MMLUSettings]):
    """Multiple choice in 57 subjects, over the 24 orders of the four options."""

    name = "mmlu"
    paper = "Hendrycks et al. 2021, arXiv 2009.03300; orders as in RoToR, arXiv 2502.08662"
    variants = "order of the options: positions in the file"
    settings = _MMLUSettings

    def read(self, source: DataSource, settings: _MMLUSettings, selection: Selection) -> Iterator[Case]:
        """Read `mmlu_<split>.json`, or the file on the hub."""
        public = f"hub://cais/mmlu/all/{settings.split}-00000-of-00001.parquet"
        examples = read_examples(source.file(f"mmlu_{settings.split}.json", public))
        orders = parse_option_orders(settings.orders, 4)
        for index, asked in selection.parse(_FourOptions, examples):
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


class _CommonsenseQASettings(Settings):
    format: Literal["letters", "plain", "quoted"] = Field(
        "letters", description="plain and quoted have options without letters, as in Set-Based Prompting"
    )
    orders: str = Field("rotations", description="rotations (5), ends, all (120), or numbers from 0 to 119")


class _Choices(Example):
    label: list[Text]
    text: list[Text]


class _Labelled(Example):
    question: Text
    choices: _Choices
    answerKey: Text  # noqa: N815 - the file's own name


class CommonsenseQA(Benchmark[_CommonsenseQASettings]):
    """Multiple choice on common sense, over orders of the five options."""

    name = "commonsense-qa"
    paper = "Talmor et al. 2019, arXiv 1811.00937; orders as in Set-Based Prompting, arXiv 2406.06581"
    variants = "order of the options: positions in the file"
    settings = _CommonsenseQASettings
    max_new_tokens = 10

    def read(self, source: DataSource, settings: _CommonsenseQASettings, selection: Selection) -> Iterator[Case]:
        """Read the validation split, in the hub's format."""
        path = source.file(_COMMON_SENSE, f"hub://tau/commonsense_qa/data/{_COMMON_SENSE}")
        for index, asked in selection.parse(_Labelled, read_examples(path)):
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
