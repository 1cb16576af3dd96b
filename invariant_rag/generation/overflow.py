"""Overflow strategies: how a prompt is fitted into the context window, independently of the input order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from invariant_rag.checks import check_name, check_number
from invariant_rag.errors import ContextOverflow

Overflow: TypeAlias = Literal["error", "drop_last", "trim_segments"]

Positions: TypeAlias = Callable[[Iterable[int]], int]
"""How many positions a set of segments with these lengths takes."""


@dataclass(frozen=True)
class TokenLimits:
    """Token limits of a prompt, and the strategy for prompts that exceed them.

    Attributes:
        context_window: Maximum number of positions of prompt and answer together. These are their tokens, but the
            segments of a set may share positions. None: no limit.
        max_segment_tokens: Maximum number of tokens of one segment. None: no limit.
        overflow: `error` raises; `drop_last` drops segments that do not fit even alone, then the segments of the lowest
            rank until the prompt fits; `trim_segments` truncates the longest segments at the end, all to the same
            length, until the prompt fits. Where segments share positions, only the longest of a set count: of them,
            `drop_last` drops that of the lowest rank.
    """

    context_window: int | None = None
    max_segment_tokens: int | None = None
    overflow: Overflow = "error"

    def __post_init__(self) -> None:
        check_name("overflow", self.overflow, get_args(Overflow))
        if self.max_segment_tokens is not None:
            check_number("max_segment_tokens", self.max_segment_tokens, 1)

    def fit(
        self, texts: int, ranked: Sequence[Sequence[int]], new_tokens: int, *, shares_positions: bool = False
    ) -> list[list[int]]:
        """Return the number of tokens to keep of each segment; 0 drops a segment that is not empty.

        Args:
            texts: Number of tokens of the texts.
            ranked: For each set, the lengths of its segments in rank order (rank 0 first).
            new_tokens: Tokens to reserve for the answer.
            shares_positions: Whether a set takes as many positions as its longest segment, not as all of them.

        Returns:
            The new lengths, in the same shape as `ranked`.

        Raises:
            ContextOverflow: The prompt is too long, and the strategy is `error` or the texts alone do not fit.
        """
        sets = [list(lengths) for lengths in ranked]
        if self.max_segment_tokens is not None:
            sets = [[self._limit_segment(length) for length in lengths] for lengths in sets]
        available = None if self.context_window is None else self.context_window - texts - new_tokens
        taken: Positions = _longest if shares_positions else sum
        total = sum(map(taken, sets))
        if available is None or total <= available:
            return sets
        if self.overflow == "error" or available < 0:
            counted = "the longest of " * shares_positions + f"{sum(map(len, sets))} segments"
            raise ContextOverflow(
                f"expected at most {self.context_window} tokens, the model's context window; got {texts + total} in "
                f"the prompt ({texts} of text, {total} in {counted}) and {new_tokens} to generate"
            )
        if self.overflow == "trim_segments":
            return _trim_longest(sets, available, taken)
        alone = [[length if length <= available else 0 for length in lengths] for lengths in sets]
        return _drop_last(alone, available, taken)

    def _limit_segment(self, length: int) -> int:
        """Apply `max_segment_tokens` to the length of one segment."""
        limit = self.max_segment_tokens
        if limit is None or length <= limit:
            return length
        if self.overflow == "error":
            raise ContextOverflow(f"expected at most max_segment_tokens={limit} tokens in a segment, got {length}")
        return limit if self.overflow == "trim_segments" else 0


def _longest(lengths: Iterable[int]) -> int:
    return max(lengths, default=0)


def _drop_last(sets: list[list[int]], available: int, taken: Positions) -> list[list[int]]:
    """Drop, of the set that takes the most positions, the lowest-ranked segment of those that count, until all fit."""
    while sum(map(taken, sets)) > available:
        largest = max(sets, key=taken)
        at_least = 1 if taken is sum else taken(largest)
        largest[max(index for index, length in enumerate(largest) if length >= at_least)] = 0
    return sets


def _trim_longest(sets: list[list[int]], available: int, taken: Positions) -> list[list[int]]:
    """Truncate all segments to the largest common length at which they fit."""
    low, high = 0, max(map(max, filter(None, sets)))
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(taken(min(length, middle) for length in lengths) for lengths in sets) <= available
        low, high = (middle, high) if fits else (low, middle - 1)
    return [[min(length, low) for length in lengths] for lengths in sets]
