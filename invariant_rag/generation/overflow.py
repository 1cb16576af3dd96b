"""Making a prompt fit: explicit choices that depend on contents only, never on the order given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from invariant_rag.errors import ContextOverflow, UnknownName

Overflow: TypeAlias = Literal["error", "drop_last", "trim_segments"]


@dataclass(frozen=True)
class TokenLimits:
    """How many tokens there are, and what to do when they are not enough.

    Attributes:
        context_window: Tokens that prompt and answer may have together. None: no limit.
        max_segment_tokens: Tokens that one segment may have. None: no limit.
        overflow: `error` raises; `drop_last` leaves out segments that would not even fit alone, then the last ones of
            the ordering, until the prompt fits; `trim_segments` cuts the ends off the longest segments, all to the same
            length, until it fits.
    """

    context_window: int | None = None
    max_segment_tokens: int | None = None
    overflow: Overflow = "error"

    def __post_init__(self) -> None:
        if self.overflow not in get_args(Overflow):
            raise UnknownName("overflow", self.overflow, get_args(Overflow))
        if self.max_segment_tokens is not None and self.max_segment_tokens < 1:
            raise ContextOverflow(f"max_segment_tokens: expected at least 1, got {self.max_segment_tokens}")

    def fit(self, texts: int, ranked: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """Decide how many tokens of each segment to keep; 0 drops a segment, unless it was empty.

        Args:
            texts: Tokens of the texts.
            ranked: For each set, the lengths of its segments in rank order (rank 0 first).
            new_tokens: Tokens to leave room for.

        Returns:
            Lengths to keep, in the same shape.

        Raises:
            ContextOverflow: It does not fit, and either nothing may be cut or nothing is left to cut.
        """
        kept = [list(lengths) for lengths in ranked]
        if self.max_segment_tokens is not None:
            kept = [[self._limited(length) for length in lengths] for lengths in kept]
        room = None if self.context_window is None else self.context_window - texts - new_tokens
        if room is None or _total(kept) <= room:
            return kept
        if self.overflow == "error" or room < 0:
            raise ContextOverflow(
                f"expected at most {self.context_window} tokens, the model's context window; got "
                f"{texts + _total(kept)} in the prompt ({texts} of text, {_total(kept)} in {sum(map(len, kept))} "
                f"segments) and {new_tokens} to generate"
            )
        if self.overflow == "trim_segments":
            return _trimmed(kept, room)
        return _dropped([[length if length <= room else 0 for length in lengths] for lengths in kept], room)

    def _limited(self, length: int) -> int:
        limit = self.max_segment_tokens
        if limit is None or length <= limit:
            return length
        if self.overflow == "error":
            raise ContextOverflow(f"expected at most max_segment_tokens={limit} tokens in a segment, got {length}")
        return limit if self.overflow == "trim_segments" else 0


def _total(kept: Sequence[Sequence[int]]) -> int:
    return sum(map(sum, kept))


def _dropped(kept: list[list[int]], room: int) -> list[list[int]]:
    """Drop the last segment of whichever set has the most tokens, until the rest fits."""
    while _total(kept) > room:
        fullest = max(kept, key=sum)
        last = max(index for index, length in enumerate(fullest) if length)
        fullest[last] = 0
    return kept


def _trimmed(kept: list[list[int]], room: int) -> list[list[int]]:
    """Cut every segment to the largest common length at which they fit."""
    low, high = 0, max(map(max, filter(None, kept)))
    while low < high:
        middle = (low + high + 1) // 2
        fits = sum(min(length, middle) for lengths in kept for length in lengths) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return [[min(length, low) for length in lengths] for lengths in kept]
