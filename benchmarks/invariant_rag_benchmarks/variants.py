"""What differs between the cases of a question: orders of options, and slots of the gold segment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import TypeVar

from invariant_rag.errors import InvalidChoice

T = TypeVar("T")


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
    if described == "ends":
        return [every[0], every[-1]]
    return [every[each] for each in _parse_numbers("orders", described, len(every), "all, ends, rotations, or numbers")]


def parse_slots(described: str, count: int, default: Sequence[int]) -> list[int]:
    """Parse the `slots` setting: empty for the default, `all`, or comma-separated slots of the gold segment, from 0 on.

    Raises:
        InvalidChoice: There is no such slot.

    >>> parse_slots("0,4", 5, [])
    [0, 4]
    """
    return _parse_numbers("slots", described, count, "all, or numbers") if described else list(default)


def _parse_numbers(setting: str, described: str, count: int, expected: str) -> list[int]:
    if described == "all":
        return list(range(count))
    words = [word.strip() for word in described.split(",")]
    if not all(word.isdecimal() and len(word) < 10 and int(word) < count for word in words):
        raise InvalidChoice(f"{setting}: expected {expected} from 0 to {count - 1}, got {described!r}")
    return [int(word) for word in words]


def insert_gold(slot: int, gold: T, others: Sequence[T]) -> list[T]:
    """Return the other segments in their order, with the gold one inserted at its slot."""
    return [*others[:slot], gold, *others[slot:]]
