"""Overflow strategies: how a prompt is fitted into the context window, independently of the input order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias

from invariant_rag.errors import ContextOverflow

Overflow: TypeAlias = Literal["error", "drop_last", "trim_segments"]


def fit_segments(
    ranked: Sequence[Sequence[int]],
    overflow: Overflow,
    *,
    window: int | None = None,
    max_segment_tokens: int | None = None,
    text_tokens: int = 0,
    new_tokens: int = 0,
    shares_positions: bool = False,
) -> list[list[int]]:
    """Return the number of tokens to keep of each segment, in the shape of `ranked`; 0 drops a segment.

    Args:
        ranked: For each set, the lengths of its segments in rank order (rank 0 first).
        overflow: `error` raises. `drop_last` drops segments that do not fit even alone, then the segments of the lowest
            rank until the prompt fits. `trim_segments` truncates the longest segments, all to the same length.
        window: Maximum number of positions of prompt and answer together. None: no limit.
        max_segment_tokens: Maximum number of tokens of one segment. None: no limit.
        text_tokens: Number of tokens of the texts.
        new_tokens: Tokens to reserve for the answer.
        shares_positions: Whether a set takes as many positions as its longest segment, not as all of them. Then only
            the longest of a set count: of them, `drop_last` drops that of the lowest rank.

    Raises:
        ContextOverflow: The prompt is too long, and the strategy is `error` or the texts alone do not fit.
    """
    sets = [list(lengths) for lengths in ranked]
    limit = max_segment_tokens
    if limit is not None and (longest := max(map(_longest, sets), default=0)) > limit:
        if overflow == "error":
            raise ContextOverflow(f"expected at most max_segment_tokens={limit} tokens in a segment, got {longest}")
        shortened = limit if overflow == "trim_segments" else 0
        sets = [[length if length <= limit else shortened for length in lengths] for lengths in sets]
    positions = _longest if shares_positions else sum
    total = sum(map(positions, sets))
    if window is None or total <= window - text_tokens - new_tokens:
        return sets
    available = window - text_tokens - new_tokens
    if overflow == "error" or available < 0:
        counted = "the longest of " * shares_positions + f"{sum(map(len, sets))} segments"
        raise ContextOverflow(
            f"expected at most {window} tokens, the model's context window; got {text_tokens + total} in "
            f"the prompt ({text_tokens} of text, {total} in {counted}) and {new_tokens} to generate"
        )
    if overflow == "trim_segments":
        return _trim_longest(sets, available, positions)
    return _drop_last(
        [[each if each <= available else 0 for each in lengths] for lengths in sets], available, positions
    )


def _longest(lengths: Iterable[int]) -> int:
    return max(lengths, default=0)


def _drop_last(sets: list[list[int]], available: int, positions: Callable[[Iterable[int]], int]) -> list[list[int]]:
    """Drop the lowest-ranked segment that counts, of the set that takes the most positions, until all fit."""
    while sum(map(positions, sets)) > available:
        largest = max(sets, key=positions)
        at_least = 1 if positions is sum else positions(largest)
        largest[max(index for index, length in enumerate(largest) if length >= at_least)] = 0
    return sets


def _trim_longest(sets: list[list[int]], available: int, positions: Callable[[Iterable[int]], int]) -> list[list[int]]:
    """Truncate all segments to the largest common length at which they fit."""
    low, high = 0, max(map(_longest, sets))
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(positions(min(length, middle) for length in lengths) for lengths in sets) <= available
        low, high = (middle, high) if fits else (low, middle - 1)
    return [[min(length, low) for length in lengths] for lengths in sets]
