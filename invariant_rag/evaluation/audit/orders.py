"""Orders in which an audit lists the segments of a question: permutations, gold slots, salted canonical orders.

An order is a tuple of indices into the segments as given. Position 0 comes first in the prompt.
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
"""Up to this many segments are listed in all orders; more, in a sample of orders."""

TOP = 5
"""So many of the segments that are listed first are permuted for the agreement over all orders (120 for five)."""

_SALTS = 1000


def all_orders(count: int) -> list[Order]:
    """Return every order of `count` segments, the given one first."""
    return list(itertools.permutations(range(count)))


def input_orders(count: int, sample: int, seed: str) -> list[Order]:
    """Return all orders of up to 4 segments, and `sample` different ones of more.

    The given order comes first; the others of a sample are random.

    >>> input_orders(2, 10, "")
    [(0, 1), (1, 0)]
    """
    if count <= ALL_UP_TO:
        return all_orders(count)
    source = random.Random(seed)
    orders = {tuple(range(count)): None}
    while len(orders) < min(sample, math.factorial(count)):
        orders[tuple(source.sample(range(count), count))] = None
    return list(orders)


def count_gold_positions(count: int, gold: Sequence[int]) -> int:
    """Return at how many positions the gold segments, kept together, can stand among `count`; 0 if none is gold."""
    return count - len(gold) + 1 if gold else 0


def slot_starts(positions: int, slots: int) -> list[int]:
    """Return `slots` of the positions, evenly spread from the first to the last.

    >>> slot_starts(10, 4)
    [0, 3, 6, 9]
    """
    return [round(index * (positions - 1) / (slots - 1)) for index in range(slots)]


def move_gold(count: int, gold: Sequence[int], start: int) -> Order:
    """Return the given order with the gold segments moved together to `start`.

    >>> move_gold(4, [2], 0)
    (2, 0, 1, 3)
    """
    others = [index for index in range(count) if index not in gold]
    return (*others[:start], *gold, *others[start:])


def salted_order(segments: Sequence[Segment], salt: str) -> Order:
    """Return the segments sorted by a hash of salt and content: the canonical order of this salt.

    It does not depend on how the segments are listed; equal segments are interchangeable.
    """
    keys = [(salted_hash(segment, salt), segment.canonical_key) for segment in segments]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))


def salted_hash(segment: Segment, salt: str) -> str:
    """Return SHA-256 of salt and content, in hexadecimal."""
    return hashlib.sha256(f"{salt}\0{segment.content_hash}".encode(errors="surrogatepass")).hexdigest()


def find_salt(segments: Sequence[Segment], gold: Sequence[int], start: int, seed: str) -> str:
    """Return a salt whose canonical order puts the gold segments, on average, where `move_gold(..., start)` puts them.

    It is the first of the nearest among 1000 salts; for a single gold segment it almost always meets the slot exactly.
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
    """Return `count` evenly spread rotations of an order, at most one per segment; the order itself comes first.

    >>> rotations((2, 0, 1), 9)
    [(2, 0, 1), (0, 1, 2), (1, 2, 0)]
    """
    wanted = max(1, min(count, len(order)))
    starts = [len(order) * index // wanted for index in range(wanted)]
    return [order[start:] + order[:start] for start in starts]
