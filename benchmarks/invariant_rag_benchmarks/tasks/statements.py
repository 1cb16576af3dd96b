"""MMLU, Mintaka and R-GSM: questions over short segments (options, triples, conditions) in several orders."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import permutations
from math import factorial
from typing import Any, Literal

from pydantic import Field, StrictFloat, StrictInt

from invariant_rag_benchmarks import base
from invariant_rag_benchmarks.base import Benchmark, Case, Example, Scored, Selection, TaskSettings, Text
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.errors import InvalidDataset
from invariant_rag_benchmarks.scores import best_subspan_em, exact_match, normalize_answer, token_f1

_MINTAKA = "https://raw.githubusercontent.com/soyoung97/RoToR/main/src/data_wrapper/kgqa_data/"
_PROMPTS = base.declared("tasks/prompts")


class _MMLUSettings(TaskSettings):
    split: Literal["validation", "test"] = Field("validation", description="validation or test")
    orders: str = Field("all", description="all (24), or numbers from 0, the original order, to 23, its reverse")


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

    def read(self, source: DataSource, settings: _MMLUSettings, selection: Selection) -> Iterator[Case]:
        """Read `mmlu_<split>.json`, or the file on the hub."""
        public = f"hub://cais/mmlu/all/{settings.split}-00000-of-00001.parquet"
        examples = read_examples(source.file(f"mmlu_{settings.split}.json", public, split=("validation", "test")))
        every = list(permutations(range(4)))
        orders = [every[number] for number in base.parse_numbers("orders", settings.orders, len(every))]
        for index, example in selection.parse(_FourOptions, examples):
            # The prompt of RoToR's own code, its blank lines included.
            topic = example.subject.replace("_", " ")
            about = f"The following are multiple choice questions (with answers) about {topic}.\n\n\n\n"
            case = Case(
                question=str(index),
                prefix=f"{about}{example.question}\n",
                suffix="Answer:",
                gold=(str(example.answer),),
                query=example.question,
                chat=False,
                candidates=(" A", " B", " C", " D"),
                group=example.subject,
            )
            for order in orders:
                options = [f"{letter}. {example.choices[each]}\n" for letter, each in zip("ABCD", order, strict=True)]
                yield from case.in_orders({"".join(map(str, order)): options})

    def score(self, case: Case, output: str) -> Scored:
        """Score 1 for the letter of the gold option. The answer is the option's index in the original options."""
        answer = case.variant[case.candidates.index(output)]
        return Scored(answer, {"accuracy": float(answer == case.gold[0])})


class _MintakaSettings(TaskSettings):
    triples: int = Field(30, ge=1, description="triples in a prompt; 30 and 50 in the paper")
    template: Literal["original", "swapped"] = Field("original", description="swapped: the wording of Appendix K")
    shuffles: int = Field(3, ge=0, description="shuffled orders after the initial one; their seeds are 0, 1, 2...")


class _Question(Example):
    question: Text
    answers: list[Any]
    knowledges: list[list[list[Any]]]


class Mintaka(Benchmark[_MintakaSettings]):
    """Questions over 30 or 50 retrieved triples, as retrieved and shuffled."""

    name = "mintaka"
    paper = "Sen et al. 2022; set-up of RoToR, arXiv 2502.08662, Appendix C.2"
    variants = "initial order, and shuffles by seed"

    def read(self, source: DataSource, settings: _MintakaSettings, selection: Selection) -> Iterator[Case]:
        """Read the triples that the paper retrieved with MPNet, best first."""
        name = f"mintaka_noshuffle_top{settings.triples}.json"
        path = source.file(name, _MINTAKA + name)
        if (kept := re.search(r"top(\d+)", path.name)) and int(kept[1]) < settings.triples:
            raise InvalidDataset(f"expected a file such as {name!r}, got {path.name!r}")
        for index, example in selection.parse(_Question, read_examples(path)):
            listed = example.knowledges[0][: settings.triples] if example.knowledges else []
            triples = [f"({', '.join(map(str, triple))})\n" for triple in listed] or ["(No information)"]
            shuffled = {
                f"shuffle {seed}": random.Random(f"{seed} {index}").sample(triples, len(triples))
                for seed in range(settings.shuffles)
            }
            yield from Case(
                question=str(index),
                suffix=f"\n\nQuestion: {example.question}, Answer: ",
                gold=tuple(map(str, example.answers)),
                query=example.question,
                system=_PROMPTS["openings"][settings.template] + _PROMPTS["json_only"],
            ).in_orders({"initial": triples, **shuffled})

    def score(self, case: Case, output: str) -> Scored:
        """Score as RoToR does, after Baek et al. (arXiv 2306.04136): containment, exact match and F1."""
        answer = stated_answer(output)
        scores = {
            "accuracy": best_subspan_em(answer, case.gold),
            "exact_match": exact_match(answer, case.gold),
            "f1": token_f1(answer, case.gold),
        }
        return Scored(normalize_answer(answer), scores)


def stated_answer(output: str) -> str:
    """Return the value of "Answer" in the first JSON object, or the first line if there is none.

    >>> stated_answer('{"Answer": ["Rome", "Oslo"]} I hope this helps')
    'Rome, Oslo'
    """
    text = output.strip()
    if "Answer" in text and "{" in text:
        first = text[text.index("{") :].replace("\n", "").split("}")[0] + "}"
        for parse in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, KeyError, TypeError):
                answer = parse(first)["Answer"]
                return ", ".join(map(str, answer)) if isinstance(answer, list) else str(answer)
    return text.split("\n")[0]


_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


class _RGSMSettings(TaskSettings):
    orders: int = Field(6, ge=1, description="most orders of a problem: initial, reversed, then random ones")


class _Problem(Example):
    question: Text
    interchangeable: list[Text]
    answer: Text | StrictFloat | StrictInt


class RGSM(Benchmark[_RGSMSettings]):
    """Word problems whose conditions change places."""

    name = "r-gsm"
    paper = "Chen et al. 2024, arXiv 2402.08939; set-up of PINE, arXiv 2407.01100, Appendix E.2"
    variants = "order of the conditions"
    max_new_tokens = 500

    def read(self, source: DataSource, settings: _RGSMSettings, selection: Selection) -> Iterator[Case]:
        """Read problems with their interchangeable conditions."""
        for index, problem in selection.parse(_Problem, read_examples(source.file("r_gsm.jsonl", None))):
            premises = problem.interchangeable
            prefix, suffix = _text_around(problem.question, premises, f"example {index}")
            orders = _orders(len(premises), settings.orders, f"{selection.seed} {index}")
            yield from Case(
                question=str(index),
                prefix=_PROMPTS["word_problem"] + prefix,
                suffix=suffix,
                gold=(str(problem.answer),),
                query=problem.question,
            ).in_orders({variant: [f"{premises[each]} " for each in order] for variant, order in orders.items()})

    def score(self, case: Case, output: str) -> Scored:
        """Compare the number after the last "Answer:" by value."""
        answer = stated_number(output)
        right = bool(answer) and float(answer) == float(case.gold[0].replace(",", ""))
        return Scored(answer, {"accuracy": float(right)})


def stated_number(output: str) -> str:
    """Return the last number after the last `Answer:`, without commas and trailing zeros; empty if there is none.

    >>> stated_number("3 + 4 = 7. Answer: $1,200.50")
    '1200.5'
    """
    _, mark, tail = output.rpartition("Answer:")
    numbers = _NUMBER.findall(tail if mark else "")
    if not numbers:
        return ""
    number: str = numbers[-1].replace(",", "").rstrip(".")
    return number.rstrip("0").rstrip(".") if "." in number else number


def _text_around(problem: str, premises: list[str], where: str) -> tuple[str, str]:
    """Return the text before and after the premises, which must be consecutive."""
    if not premises:
        raise InvalidDataset(f"{where}: expected interchangeable conditions, got none")
    together = re.search(r"\s*".join(map(re.escape, premises)), problem)
    if together is None:
        raise InvalidDataset(f"{where}: expected the interchangeable conditions to follow each other in the question")
    return problem[: together.start()], problem[together.end() :].lstrip()


def _orders(count: int, most: int, seed: str) -> dict[str, tuple[int, ...]]:
    """Return the initial order, the reversed one, then random ones, all different, by name.

    Their places are no names: `201` is an order of problems with three conditions alone.
    """
    drawn = random.Random(seed)
    chosen = dict.fromkeys([tuple(range(count)), tuple(reversed(range(count)))])
    while len(chosen) < min(most, factorial(count)):
        chosen[tuple(drawn.sample(range(count), count))] = None
    names = ["initial", "reversed", *(f"random {number}" for number in range(1, most))]
    return dict(zip(names, list(chosen)[:most], strict=False))
