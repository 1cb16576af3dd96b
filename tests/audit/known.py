"""Systems of known behaviour, and questions for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from invariant_rag.segments import Segment

Function = Callable[[str, Sequence[Segment]], Any]


def records(count: int = 24, size: int = 4) -> list[dict[str, Any]]:
    """Questions of which one segment, not always the same, holds the answer; no two segments are equal."""
    found = []
    for number in range(count):
        segments = [f"Nothing {number} {place}." for place in range(size)]
        segments[number % size] = f"Number {number} is right{number}."
        fields = {"question": f"What is number {number}?", "segments": segments, "answers": [f"right{number}"]}
        found.append({"id": f"q{number}", **fields})
    return found


def first(question: str, segments: Sequence[Segment]) -> str:
    return segments[0].text


def last(question: str, segments: Sequence[Segment]) -> str:
    return segments[-1].text


def symmetric(question: str, segments: Sequence[Segment]) -> str:
    """Answer from the right segment, wherever it is."""
    return next(segment.text for segment in segments if "right" in segment.text)


def noisy(system: Function, share: float, *, cached: bool = False, seed: int = 0) -> Function:
    """Return a system that answers "wrong" by chance; behind a cache, equal calls get equal answers."""
    source, cache = random.Random(seed), dict[Any, str]()

    def answer(question: str, segments: Sequence[Segment]) -> str:
        key = (question, tuple(each.text for each in segments)) if cached else len(cache)
        return cache.setdefault(key, "wrong" if source.random() < share else system(question, segments))

    return answer


def where_first(fail: Callable[[], Any], system: Function) -> Function:
    """Return a system that fails where the right segment comes first."""
    return lambda question, segments: fail() if "right" in segments[0].text else system(question, segments)


def listening(system: Function, calls: list[Any]) -> Function:
    """Return a system whose calls are kept, with their documents."""

    def answer(question: str, segments: Sequence[Segment]) -> Any:
        calls.append((question, *(each.text for each in segments)))
        return system(question, segments)

    return answer
