"""Turns: the messages of a conversation, as texts, segments and sets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from invariant_rag.segments import Segment, SegmentSet


@dataclass(frozen=True)
class Turn:
    """One message of a conversation: strings, segments, sets, and what else a framework puts there, such as images."""

    role: str
    parts: tuple[Any, ...]

    @property
    def text(self) -> str:
        """The strings of the turn, without its segments."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def sets(self) -> list[SegmentSet]:
        """The sets of the turn."""
        return [part for part in self.parts if isinstance(part, SegmentSet)]

    @property
    def has_segments(self) -> bool:
        """Whether a part is a segment or a set."""
        return any(isinstance(part, Segment | SegmentSet) for part in self.parts)


def merge_texts(parts: Iterable[Any]) -> list[Any]:
    """Join neighbouring texts, and leave out empty ones. Those of a framework's own kind of str stay by themselves."""
    merged: list[Any] = []
    for part in parts:
        if type(part) is str and merged and type(merged[-1]) is str:
            merged[-1] += part
        elif not isinstance(part, str) or part:
            merged.append(part)
    return merged
