"""Gold slots: the position of the gold segment among the segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from invariant_rag.errors import InvalidChoice

T = TypeVar("T")


def parse_slots(described: str, count: int, default: Sequence[int]) -> list[int]:
    """Parse the `slots` setting.

    Args:
        described: Empty for the default, `all`, or comma-separated slots from 0 on.
        count: Number of segments.
        default: The slots that an empty setting means.

    Raises:
        InvalidChoice: There is no such slot.

    >>> parse_slots("0,4", 5, [])
    [0, 4]
    """
    if described == "all":
        return list(range(count))
    words = described.split(",") if described else list(map(str, default))
    if not all(word.strip().isdecimal() and int(word) < count for word in words):
        raise InvalidChoice(f"slots: expected numbers from 0 to {count - 1}, or all, got {described!r}")
    return [int(word) for word in words]


def every_fifth(count: int) -> list[int]:
    """Return the slots 0, 4, 9, 14..., as in Lost in the Middle."""
    return [0, *range(4, count, 5)]


def quarters(count: int) -> list[int]:
    """Return the slots at 0, 25, 50, 75 and 100 per cent of the context, rounded down.

    Those of 140 pairs are the ones that the scripts of Lost in the Middle and of positional hidden states pass.

    >>> quarters(140)
    [0, 34, 69, 104, 139]
    """
    return sorted({quarter * (count - 1) // 4 for quarter in range(5)})


def insert_gold(slot: int, gold: T, others: Sequence[T]) -> list[T]:
    """Return the other segments in their order, with the gold one inserted at its slot."""
    return [*others[:slot], gold, *others[slot:]]
