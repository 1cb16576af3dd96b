"""Load the cases: a word problem with conditions that can change places, in several orders."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import permutations

from invariant_rag.errors import InvalidDataset

from invariant_rag_benchmarks.base import Case, Selection
from invariant_rag_benchmarks.sources import DataSource, get_field, read_examples

NAME = "r_gsm.jsonl"
# The prompt for word problems of openai/simple-evals, which PINE uses for this benchmark (Appendix E.3).
REQUEST = (
    "Solve this math problem. Give the reasoning steps before giving the final answer on the last line by itself in "
    'the format of "Answer:". Do not add anything other than the integer answer after "Answer:".\n\n'
)


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
        orders: The most orders of a problem: the initial one, the reversed one, then random ones.
    """

    orders: int = 6


def load(source: DataSource, settings: Settings, selection: Selection) -> list[Case]:
    """Read problems with their interchangeable conditions, in the format of the README."""
    examples = read_examples(source.file(NAME, None))
    cases = []
    for index, example in selection.sample(examples):
        where = f"example {index}"
        problem, premises = get_field(example, "question", where), get_field(example, "interchangeable", where)
        prefix, suffix = _text_around(problem, premises, where)
        cases += [
            Case(
                question=str(index),
                variant=variant,
                prefix=REQUEST + prefix,
                segments=tuple(f"{premises[each]} " for each in order),
                suffix=suffix,
                gold=(str(get_field(example, "answer", where)),),
                query=problem,
            )
            for variant, order in _orders(len(premises), settings.orders, f"{selection.seed} {index}").items()
        ]
    return cases


def _text_around(problem: str, premises: list[str], where: str) -> tuple[str, str]:
    """Return the text before and after the premises, which must be consecutive."""
    if not premises:
        raise InvalidDataset(f"{where}: expected interchangeable conditions, got none")
    start = problem.find(premises[0])
    rest = problem[max(start, 0) :]
    for premise in premises:
        rest = rest.lstrip()
        if start < 0 or not rest.startswith(premise):
            raise InvalidDataset(
                f"{where}: expected the interchangeable conditions to follow each other in the question"
            )
        rest = rest.removeprefix(premise)
    return problem[:start], rest.lstrip()


def _orders(count: int, most: int, seed: str) -> dict[str, tuple[int, ...]]:
    """Return the initial order, the reversed one, then random ones, all different, by what they are.

    Named so, and not by their places: `201` is an order of problems with three conditions alone, so that its mean would
    be compared with that of orders of other problems.
    """
    chosen = list(dict.fromkeys([tuple(range(count)), tuple(reversed(range(count)))]))
    drawn = random.Random(seed)
    if count <= 6:
        others = [order for order in permutations(range(count)) if order not in chosen]
        drawn.shuffle(others)
        chosen += others
    while count > 6 and len(chosen) < most:
        if (order := tuple(drawn.sample(range(count), count))) not in chosen:
            chosen.append(order)
    names = ["initial", "reversed", *(f"random {number}" for number in range(1, most))]
    return dict(zip(names, chosen[:most], strict=False))
