"""Score: is the order right, and if not, how far is it from the right one?"""

from __future__ import annotations

import re
from collections.abc import Sequence

from invariant_rag_benchmarks.base import Case, Scored
from invariant_rag_benchmarks.timeline.numerals import read_numbers, value_of

_ROMAN = re.compile(r"\b[IVXLCDM]+\b")
_ARABIC = re.compile(r"\b\d+\b")
_MARKED = re.compile(r"(?:^|[\n,;>(])[ \t]*(\d+)(?=[.):,;> \t]*(?:[\n,;>]|\Z)|[.):])")
"""An Arabic numeral as a name: before a sign, or in a list of nothing else. Events have dates and counts, too."""


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


def named_events(output: str, gold: Sequence[str]) -> list[str]:
    """Return the numerals of the question in the order in which an output first names them.

    The file has Arabic numerals, the authors' code Roman ones. An Arabic one is read where it stands as a name, before
    a sign (`2.`, `2)`) or in a list (`2, 1, 3`); if those leave a numeral out, wherever it stands. Where the numerals
    of the question are not used as names, those of another kind are: Roman ones, Arabic ones, or words.

    >>> named_events("2) Opened on 1 May 1965, 1) opened in 1966 with 3 others, 3) closed.", ["1", "2", "3"])
    ['2', '1', '3']
    >>> named_events("II, I, III", ["1", "2", "3"]), named_events("2, 1, 3", ["I", "II", "III"])
    (['2', '1', '3'], ['II', 'I', 'III'])
    """
    roman = any(_ROMAN.fullmatch(each) for each in gold)
    marked = _first_named(_MARKED.findall(output), gold)
    named = marked
    if roman or len(marked) < len(gold):
        named = _first_named((_ROMAN if roman else _ARABIC).findall(output), gold)
    return named if marked or len(named) == len(gold) else _named_otherwise(output, gold) or named


def _named_otherwise(output: str, gold: Sequence[str]) -> list[str]:
    """Return what an output names in numerals of another kind; empty if it is not plain which, or in which order."""
    events = {value_of(each): each for each in gold}
    numbers = [each for each in events if each is not None]
    return [events[each] for each in read_numbers(output, numbers)] if len(numbers) == len(gold) else []


def _first_named(numerals: Sequence[str], gold: Sequence[str]) -> list[str]:
    return [each for each in dict.fromkeys(numerals) if each in gold]


def score(case: Case, output: str) -> Scored:
    """Score the order in which the numerals of the question are first mentioned."""
    named = named_events(output, case.gold)
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
