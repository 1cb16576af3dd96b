"""Prompts with permuted segments: rotations and random permutations of a base order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.outputs import Generation
from invariant_rag.generation.prepare import PreparedPrompt
from invariant_rag.segments import Prompt, Segment, SegmentSet

Orders = Sequence[Sequence[int]]
"""For each set, indices of its segments in physical order."""


@dataclass(frozen=True)
class PermutedPrompt:
    """A prompt whose segments were permuted.

    Attributes:
        source: The input prompt.
        orders: For each set, its segments, farthest from the suffix first: indices into the segments of the input
            prompt. Segments that do not fit the context window are missing.
        base: The input prompt as its model prepares it.
    """

    source: Prompt
    orders: Orders
    base: PreparedPrompt

    @cached_property
    def prompt(self) -> Prompt:
        """The permuted prompt, for a model with the ordering `given`."""
        segments, sets = self.source.segments, self.source.sets
        orders = zip(self.orders, sets, strict=True)
        return self.source.with_sets(in_slots([segments[index] for index in order], each) for order, each in orders)

    @property
    def order(self) -> list[int]:
        """Index in the input prompt of each segment of the permuted prompt."""
        return [index for order in self.orders for index in order]

    @property
    def largest_set(self) -> int:
        """Number of segments of the largest set, at least 1."""
        return max(map(len, self.orders), default=1) or 1

    def with_orders(self, orders: Orders) -> PermutedPrompt:
        """Return the same segments in other orders."""
        return PermutedPrompt(self.source, orders, self.base)

    def to_input_indices(self, generation: Generation) -> Generation:
        """Return a generation for the permuted prompt with segment indices of the input prompt."""
        order = tuple(self.order[index] for index in generation.order)
        return replace(generation, order=order, dropped=self.base.dropped, trimmed=self.base.trimmed)


def in_canonical_order(lm: InvariantModel, prompt: Prompt, new_tokens: int) -> PermutedPrompt:
    """Sort the segments by the model's ordering, without those that do not fit the context window.

    With an ordering by content, the result is the same for every input order.

    Args:
        lm: The model, with its ordering and token limits.
        prompt: The input prompt.
        new_tokens: Tokens to reserve for the answer.
    """
    base = lm.prepare(prompt, new_tokens=new_tokens)
    stops = list(accumulate(map(len, prompt.sets), initial=0))
    orders = [[i for i in base.order if start <= i < stop] for start, stop in pairwise(stops)]
    return PermutedPrompt(prompt, orders, base)


def in_slots(segments: Sequence[Segment], places: SegmentSet) -> SegmentSet:
    """Return segments as a set, in the first slots of another one."""
    return SegmentSet(segments, slots=None if places.slots is None else places.slots[: len(segments)])


def rotations(base: PermutedPrompt, count: int | None) -> list[PermutedPrompt]:
    """Return evenly spaced rotations of a prompt's segments, each set on its own, starting with the prompt itself.

    Args:
        base: The prompt to rotate.
        count: Maximum number of rotations. None: as many as the largest set has segments.
    """
    count = base.largest_set if count is None else min(count, base.largest_set)
    starts = [[number * len(order) // count for order in base.orders] for number in range(count)]
    return [
        base.with_orders([[*order[by:], *order[:by]] for order, by in zip(base.orders, each, strict=True)])
        for each in starts
    ]


def random_permutations(base: PermutedPrompt, count: int | None, seed: int) -> list[PermutedPrompt]:
    """Return random permutations of a prompt's segments, which depend on the prompt and the seed only.

    Args:
        base: The prompt to permute.
        count: Number of permutations. None: as many as the largest set has segments.
        seed: Seed of the permutations.
    """
    random_state = random.Random(seed)
    return [
        base.with_orders([random_state.sample(order, len(order)) for order in base.orders])
        for _ in range(base.largest_set if count is None else count)
    ]
