"""Multiple choice: the options are the segments, in several orders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from invariant_rag.errors import InvalidChoice

from invariant_rag_benchmarks.base import Case, Scored

LETTERS = "ABCDEFGHIJ"


def parse_option_orders(described: str, count: int) -> list[tuple[int, ...]]:
    """Parse the `orders` setting: return orders of `count` options, as tuples of indices into the original options.

    Args:
        described: `all` (lexicographic: the first is the original order, the last the reversed one), `ends` (these
            two), `rotations`, or comma-separated numbers of orders within `all`.
        count: Number of options.

    Raises:
        InvalidChoice: There is no such order.

    >>> parse_option_orders("ends", 3)
    [(0, 1, 2), (2, 1, 0)]
    """
    if described == "rotations":
        return [tuple((start + index) % count for index in range(count)) for start in range(count)]
    every = list(permutations(range(count)))
    if described == "all":
        return every
    if described == "ends":
        return [every[0], every[-1]]
    words = described.split(",")
    if not all(word.strip().isdecimal() and int(word) < len(every) for word in words):
        raise InvalidChoice(
            f"orders: expected all, ends, rotations, or numbers from 0 to {len(every) - 1}, got {described!r}"
        )
    return [every[int(word)] for word in words]


def choice_case(
    name: str, prefix: str, options: Sequence[str], gold: int, order: Sequence[int], query: str, group: str = ""
) -> Case:
    """Return the case with the options in this order, lettered A, B...; the output is the likeliest of ` A`, ` B`..."""
    return Case(
        question=name,
        variant="".join(map(str, order)),
        prefix=prefix,
        segments=tuple(f"{letter}. {options[index]}\n" for letter, index in zip(LETTERS, order, strict=False)),
        suffix="Answer:",
        gold=(str(gold),),
        query=query,
        chat=False,
        candidates=tuple(f" {letter}" for letter in LETTERS[: len(options)]),
        group=group,
    )


def score_choice(case: Case, output: str) -> Scored:
    """Score 1 if the letter stands for the gold option. The answer is the option's index in the original options."""
    answer = case.variant[case.candidates.index(output)]
    return Scored(answer, {"accuracy": float(answer == case.gold[0])})
