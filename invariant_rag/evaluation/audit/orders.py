"""In which orders the segments of a question are listed: permutations, gold slots, salted canonical orders.

An order is a tuple of indices into the segments as given. Position 0 is read first.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Sequence

from invariant_rag.segments import Segment

Order = tuple[int, ...]

ALL_UP_TO = 4
"""So many segments are listed in all their orders; more, in a sample."""

_SALTS = 1000


def input_orders(count: int, sample: int, seed: str) -> list[Order]:
    """Return orders of `count` segments: all of them up to 4 segments, else `sample` different ones.

    The order given comes first, the others are random.

    >>> input_orders(2, 10, "")
    [(0, 1), (1, 0)]
    """
    if count <= ALL_UP_TO:
        return list(itertools.permutations(range(count)))
    source = random.Random(seed)
    orders = {tuple(range(count)): None}
    while len(orders) < min(sample, math.factorial(count)):
        orders[tuple(source.sample(range(count), count))] = None
    return list(orders)


def room(count: int, gold: Sequence[int]) -> int:
    """Return at how many places the gold segments, kept together, can stand among `count`; 0 where none is gold."""
    return count - len(gold) + 1 if gold else 0


def slot_starts(places: int, slots: int) -> list[int]:
    """Return `slots` of the places, evenly spread, with the first and the last.

    >>> slot_starts(10, 4)
    [0, 3, 6, 9]
    """
    return [round(index * (places - 1) / (slots - 1)) for index in range(slots)]


def gold_at(count: int, gold: Sequence[int], start: int) -> Order:
    """Return the order given, with the gold segments moved together to `start`.

    >>> gold_at(4, [2], 0)
    (2, 0, 1, 3)
    """
    others = [index for index in range(count) if index not in gold]
    return (*others[:start], *gold, *others[start:])


def salted_order(segments: Sequence[Segment], salt: str) -> Order:
    """Return the segments sorted by a hash of salt and content: a canonical order, which the salt chooses.

    The order of the contents does not depend on how the segments are listed; equal segments are interchangeable.
    """
    keys = [(salted_hash(segment, salt), segment.canonical_key) for segment in segments]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))


def salted_hash(segment: Segment, salt: str) -> str:
    """Return SHA-256 of salt and content, in hexadecimal."""
    return hashlib.sha256(f"{salt}\0{segment.content_hash}".encode()).hexdigest()


def salt_for(segments: Sequence[Segment], gold: Sequence[int], start: int, seed: str) -> str:
    """Return a salt whose canonical order puts the gold segments, on average, where `gold_at(..., start)` puts them.

    Of the first 1000 salts it is the one that comes nearest, and the first of those; with one gold segment the slot is
    met exactly, but for long odds.
    """
    target = start + (len(gold) - 1) / 2
    best, nearest = f"{seed}:0", math.inf
    for number in range(_SALTS):
        salt = f"{seed}:{number}"
        order = salted_order(segments, salt)
        distance = abs(sum(map(order.index, gold)) / len(gold) - target)
        if distance < nearest:
            best, nearest = salt, distance
        if distance < 0.5:
            break
    return best


def rotations(order: Order, count: int) -> list[Order]:
    """Return `count` evenly spread rotations of an order, itself first; at most as many as it has segments.

    >>> rotations((2, 0, 1), 9)
    [(2, 0, 1), (0, 1, 2), (1, 2, 0)]
    """
    wanted = max(1, min(count, len(order)))
    starts = [len(order) * index // wanted for index in range(wanted)]
    return [order[start:] + order[:start] for start in starts]
