"""R-GSM: word problems whose conditions can change places, in several orders."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from math import factorial

from pydantic import Field, StrictFloat, StrictInt

from invariant_rag_benchmarks.base import Benchmark, Case, Example, Scored, Selection, Settings, Text, parse_example
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.errors import InvalidDataset

# The prompt for word problems of openai/simple-evals, which PINE uses for this benchmark (Appendix E.3).
REQUEST = (
    "Solve this math problem. Give the reasoning steps before giving the final answer on the last line by itself in "
    'the format of "Answer:". Do not add anything other than the integer answer after "Answer:".\n\n'
)
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


class RGSMSettings(Settings):
    """Settings of the benchmark."""

    orders: int = Field(6, ge=1, description="most orders of a problem: initial, reversed, then random ones")


class _Problem(Example):
    question: Text
    interchangeable: list[Text]
    answer: Text | StrictFloat | StrictInt


class RGSM(Benchmark[RGSMSettings]):
    """Word problems, their conditions reordered."""

    name = "r-gsm"
    about = "Word problems whose conditions change places."
    paper = "Chen et al. 2024, arXiv 2402.08939; set-up of PINE, arXiv 2407.01100, Appendix E.2"
    variants = "order of the conditions"
    settings = RGSMSettings
    max_new_tokens = 500

    def read(self, source: DataSource, settings: RGSMSettings, selection: Selection) -> Iterator[Case]:
        """Read problems with their interchangeable conditions."""
        for index, record in selection.sample(read_examples(source.file("r_gsm.jsonl", None))):
            problem = parse_example(_Problem, record, f"example {index}")
            premises = problem.interchangeable
            prefix, suffix = _text_around(problem.question, premises, f"example {index}")
            orders = _orders(len(premises), settings.orders, f"{selection.seed} {index}")
            for variant, order in orders.items():
                yield Case(
                    question=str(index),
                    variant=variant,
                    prefix=REQUEST + prefix,
                    segments=tuple(f"{premises[each]} " for each in order),
                    suffix=suffix,
                    gold=(str(problem.answer),),
                    query=problem.question,
                )

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
    found = _NUMBER.findall(tail if mark else "")
    if not found:
        return ""
    number: str = found[-1].replace(",", "").rstrip(".")
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
    """Return the initial order, the reversed one, then random ones, all different.

    They are named by what they are, not by their places: `201` is an order of problems with three conditions alone, so
    that its mean would be compared with that of orders of other problems.
    """
    drawn = random.Random(seed)
    chosen = dict.fromkeys([tuple(range(count)), tuple(reversed(range(count)))])
    while len(chosen) < min(most, factorial(count)):
        chosen[tuple(drawn.sample(range(count), count))] = None
    names = ["initial", "reversed", *(f"random {number}" for number in range(1, most))]
    return dict(zip(names, list(chosen)[:most], strict=False))
