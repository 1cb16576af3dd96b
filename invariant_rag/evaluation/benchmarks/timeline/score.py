"""Score: is the order right, and if not, how far is it from the right one?"""

from __future__ import annotations

import re
from collections.abc import Sequence

from invariant_rag.evaluation.benchmarks.base import Case, Scored

_NUMERAL = re.compile(r"\b[IVXLCDM]+\b")


def location_agreement(places: Sequence[int] | None, count: int) -> float:
    """Return 1 - LooGLE's location mean deviation relative to that of the reversed order; 0 if there is no order.

    >>> location_agreement([0, 1, 2], 3), location_agreement([2, 1, 0], 3), location_agreement(None, 3)
    (1.0, 0.0, 0.0)
    """
    farthest = count * count // 2
    if places is None or not farthest:
        return float(places is not None)
    return 1.0 - sum(abs(place - index) for index, place in enumerate(places)) / farthest


def square_agreement(places: Sequence[int] | None, count: int) -> float:
    """Return 1 - LooGLE's location square deviation relative to that of the reversed order; 0 if there is no order.

    >>> square_agreement([0, 1, 2], 3), square_agreement([1, 0, 2], 3), square_agreement([2, 1, 0], 3)
    (1.0, 0.75, 0.0)
    """
    farthest = count * (count * count - 1) // 3
    if places is None or not farthest:
        return float(places is not None)
    return 1.0 - sum((place - index) ** 2 for index, place in enumerate(places)) / farthest


def swap_agreement(places: Sequence[int] | None, count: int) -> float:
    """Return 1 - LooGLE's swap deviation (swaps that sort the order) over its maximum; 0 if there is no order."""
    if places is None or count < 2:
        return float(places is not None)
    seen: set[int] = set()
    cycles = 0
    for start in range(count):
        cycles += start not in seen
        while start not in seen:
            seen.add(start)
            start = places[start]  # noqa: PLW2901 - follow the cycle
    return 1.0 - (count - cycles) / (count - 1)


def score(case: Case, output: str) -> Scored:
    """Score the order in which the Roman numerals of the question are first mentioned."""
    named = [each for each in dict.fromkeys(_NUMERAL.findall(output)) if each in case.gold]
    whole = len(named) == len(case.gold)
    places = [case.gold.index(each) for each in named] if whole else None
    count = len(case.gold)
    scores = {
        "accuracy": float(tuple(named) == case.gold),
        "location_agreement": location_agreement(places, count),
        "square_agreement": square_agreement(places, count),
        "swap_agreement": swap_agreement(places, count),
    }
    return Scored(",".join(named), scores)
