"""Gold slots: where among the segments the one that holds the answer is put."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from invariant_rag.errors import InvalidChoice

T = TypeVar("T")


def chosen_slots(described: str, count: int, default: Sequence[int]) -> list[int]:
    """Return slots of `count` segments.

    Args:
        described: Empty for the default, `all`, or slots with commas between them, from 0 on.
        count: Number of segments.
        default: What an empty description means.

    Raises:
        InvalidChoice: There is no such slot.

    >>> chosen_slots("0,4", 5, [])
    [0, 4]
    """
    if described == "all":
        return list(range(count))
    words = described.split(",") if described else list(map(str, default))
    if not all(word.strip().isdecimal() and int(word) < count for word in words):
        raise InvalidChoice(f"slots: expected numbers from 0 to {count - 1}, or all, got {described!r}")
    return [int(word) for word in words]


def every_fifth(count: int) -> list[int]:
    """Return slot 0, 4, 9, 14...: what Lost in the Middle measures."""
    return [0, *range(4, count, 5)]


def quarters(count: int) -> list[int]:
    """Return the slots at 0, 25, 50, 75 and 100 per cent."""
    return sorted({round(quarter * (count - 1) / 4) for quarter in range(5)})


def with_gold_at(slot: int, gold: T, others: Sequence[T]) -> list[T]:
    """Return the others in their order, with the gold one in its slot."""
    return [*others[:slot], gold, *others[slot:]]
