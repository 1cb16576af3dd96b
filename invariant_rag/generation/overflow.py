"""Overflow strategies: how a prompt is fitted into the context window, independently of the input order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from invariant_rag.checks import check_name, check_number
from invariant_rag.errors import ContextOverflow

Overflow: TypeAlias = Literal["error", "drop_last", "trim_segments"]


@dataclass(frozen=True)
class TokenLimits:
    """Token limits of a prompt, and the strategy for prompts that exceed them.

    Attributes:
        context_window: Maximum number of tokens of prompt and answer together. None: no limit.
        max_segment_tokens: Maximum number of tokens of one segment. None: no limit.
        overflow: `error` raises; `drop_last` drops segments that do not fit even alone, then the segments of the lowest
            rank until the prompt fits; `trim_segments` truncates the longest segments at the end, all to the same
            length, until the prompt fits.
    """

    context_window: int | None = None
    max_segment_tokens: int | None = None
    overflow: Overflow = "error"

    def __post_init__(self) -> None:
        check_name("overflow", self.overflow, get_args(Overflow))
        if self.max_segment_tokens is not None:
            check_number("max_segment_tokens", self.max_segment_tokens, 1)

    def fit(self, texts: int, ranked: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Return the number of tokens to keep of each segment; 0 drops a segment that is not empty.

        Args:
            texts: Number of tokens of the texts.
            ranked: For each set, the lengths of its segments in rank order (rank 0 first).
            new_tokens: Tokens to reserve for the answer.

        Returns:
            The new lengths, in the same shape as `ranked`.

        Raises:
            ContextOverflow: The prompt is too long, and the strategy is `error` or the texts alone do not fit.
        """
        sets = [list(lengths) for lengths in ranked]
        if self.max_segment_tokens is not None:
            sets = [[self._limit_segment(length) for length in lengths] for lengths in sets]
        available = None if self.context_window is None else self.context_window - texts - new_tokens
        if available is None or _total(sets) <= available:
            return sets
        if self.overflow == "error" or available < 0:
            raise ContextOverflow(
                f"expected at most {self.context_window} tokens, the model's context window; got "
                f"{texts + _total(sets)} in the prompt ({texts} of text, {_total(sets)} in {sum(map(len, sets))} "
                f"segments) and {new_tokens} to generate"
            )
        if self.overflow == "trim_segments":
            return _trim_longest(sets, available)
        return _drop_last([[length if length <= available else 0 for length in lengths] for lengths in sets], available)

    def _limit_segment(self, length: int) -> int:
        """Apply `max_segment_tokens` to the length of one segment."""
        limit = self.max_segment_tokens
        if limit is None or length <= limit:
            return length
        if self.overflow == "error":
            raise ContextOverflow(f"expected at most max_segment_tokens={limit} tokens in a segment, got {length}")
        return limit if self.overflow == "trim_segments" else 0


def _total(sets: Sequence[Sequence[int]]) -> int:
    return sum(map(sum, sets))


def _drop_last(sets: list[list[int]], available: int) -> list[list[int]]:
    """Drop the lowest-ranked segment of the set with the most tokens, until the rest fits."""
    while _total(sets) > available:
        longest = max(sets, key=sum)
        last = max(index for index, length in enumerate(longest) if length)
        longest[last] = 0
    return sets


def _trim_longest(sets: list[list[int]], available: int) -> list[list[int]]:
    """Truncate all segments to the largest common length at which they fit."""
    low, high = 0, max(map(max, filter(None, sets)))
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(min(length, middle) for lengths in sets for length in lengths) <= available
        low, high = (middle, high) if fits else (low, middle - 1)
    return [[min(length, low) for length in lengths] for lengths in sets]
