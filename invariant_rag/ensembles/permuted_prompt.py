"""Prompts with permuted segments: rotations and random permutations of a base order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

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
        prompt: The permuted prompt, for a model with the ordering `given`.
        orders: For each set, its segments, farthest from the suffix first: indices into the segments of the input
            prompt.
        base: The input prompt as its model prepares it.
    """

    prompt: Prompt
    orders: Orders
    base: PreparedPrompt

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
        segments = [segment for each in self.prompt.sets for segment in each]
        by_index = dict(zip(self.order, segments, strict=True))
        sets = [
            in_slots([by_index[index] for index in order], each)
            for order, each in zip(orders, self.prompt.sets, strict=True)
        ]
        return PermutedPrompt(self.prompt.with_sets(sets), orders, self.base)

    def to_input_indices(self, generation: Generation) -> Generation:
        """Return a generation for the permuted prompt with segment indices of the input prompt."""
        order = self.order
        return replace(
            generation,
            order=tuple(order[index] for index in generation.order),
            dropped=self.base.dropped,
            trimmed=self.base.trimmed,
        )


def in_canonical_order(lm: InvariantModel, prompt: Prompt, new_tokens: int) -> PermutedPrompt:
    """Sort the segments by the model's ordering, without those that do not fit the context window.

    With an ordering by content, the result is the same for every input order.

    Args:
        lm: The model, with its ordering and token limits.
        prompt: The input prompt.
        new_tokens: Tokens to reserve for the answer.
    """
    base = lm.prepare(prompt, new_tokens=new_tokens)
    stops = list(accumulate(map(len, prompt.sets)))
    starts = [0, *stops]
    orders = [[i for i in base.order if start <= i < stop] for start, stop in zip(starts, stops, strict=False)]
    segments = prompt.segments
    sets = [in_slots([segments[i] for i in order], each) for order, each in zip(orders, prompt.sets, strict=True)]
    return PermutedPrompt(prompt.with_sets(sets), orders, base)


def in_slots(segments: Sequence[Segment], places: SegmentSet) -> SegmentSet:
    """Return segments as a set, in the first slots of another one."""
    return SegmentSet(segments, slots=None if places.slots is None else places.slots[: len(segments)])


def rotations(base: PermutedPrompt, count: int | None) -> list[PermutedPrompt]:
    """Return evenly spaced rotations of a prompt's segments, starting with the prompt itself.

    Every set is rotated on its own. The largest set has as many distinct rotations as segments.

    Args:
        base: The prompt to rotate.
        count: Maximum number of rotations. None: as many as the largest set has segments.
    """
    count = base.largest_set if count is None else min(count, base.largest_set)
    return [
        base.with_orders([_rotated(order, number * len(order) // count) for order in base.orders])
        for number in range(count)
    ]


def _rotated(order: Sequence[int], by: int) -> list[int]:
    return [*order[by:], *order[:by]]


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
