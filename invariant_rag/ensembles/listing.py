"""The same prompt with its segments listed in other orders."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.outputs import Generation
from invariant_rag.generation.prepare import PreparedPrompt
from invariant_rag.segments import Prompt, SegmentSet

Orders = Sequence[Sequence[int]]
G = TypeVar("G", bound=Generation)


@dataclass(frozen=True)
class Listing:
    """A prompt whose sets are listed as somebody chose.

    Attributes:
        prompt: The prompt, to be read in the order given.
        orders: For each set, its segments, farthest from the suffix first: indices into the asked prompt's segments.
        base: The asked prompt as its model reads it.
    """

    prompt: Prompt
    orders: Orders
    base: PreparedPrompt

    @property
    def origin(self) -> list[int]:
        """Index of each listed segment in the asked prompt."""
        return [index for order in self.orders for index in order]

    def relisted(self, orders: Orders) -> Listing:
        """Return the same segments in other orders."""
        segments = [segment for each in self.prompt.sets for segment in each]
        known = dict(zip(self.origin, segments, strict=True))
        sets = [SegmentSet(known[index] for index in order) for order in orders]
        return Listing(self.prompt.with_sets(sets), orders, self.base)

    def translated(self, generation: G) -> G:
        """Return a generation from the listed prompt as one from the asked prompt: indices point into that one."""
        origin = self.origin
        return replace(
            generation,
            order=tuple(origin[index] for index in generation.order),
            dropped=self.base.dropped,
            trimmed=self.base.trimmed,
        )


def canonical_listing(model: InvariantModel, prompt: Prompt, new_tokens: int) -> Listing:
    """List the segments as the model's ordering places them; those that do not fit are left out.

    With an ordering that reads contents only, the result is the same for every order in which they were given.

    Args:
        model: The model whose ordering and budget count.
        prompt: The prompt.
        new_tokens: Tokens to leave room for.
    """
    base = model.prepare(prompt, new_tokens=new_tokens)
    stops = list(accumulate(map(len, prompt.sets)))
    starts = [0, *stops]
    orders = [[i for i in base.order if start <= i < stop] for start, stop in zip(starts, stops, strict=False)]
    segments = prompt.segments
    return Listing(prompt.with_sets(SegmentSet(segments[i] for i in order) for order in orders), orders, base)


def rotations(listing: Listing, count: int | None) -> list[Listing]:
    """Return the listing and its rotations, evenly spaced.

    Every set is rotated on its own. All rotations of the largest set are as many as it has segments; more would repeat
    them.

    Args:
        listing: Where to start.
        count: The most to return. None: all.
    """
    every = max(map(len, listing.orders), default=1) or 1
    chosen = every if count is None else min(count, every)
    turns = [[(turn * len(order)) // chosen for order in listing.orders] for turn in range(chosen)]
    return [
        listing.relisted([[*order[at:], *order[:at]] for order, at in zip(listing.orders, each, strict=True)])
        for each in turns
    ]


def random_permutations(listing: Listing, count: int | None, seed: int) -> list[Listing]:
    """Return the listing in random orders, which depend on the listing and the seed alone.

    Args:
        listing: What is permuted.
        count: How many to return. None: as many as the largest set has segments.
        seed: Seed of the permutations.
    """
    every = max(map(len, listing.orders), default=1) or 1
    source = random.Random(seed)
    return [
        listing.relisted([source.sample(order, len(order)) for order in listing.orders])
        for _ in range(every if count is None else count)
    ]
