"""Which keys each token of a prompt attends to, at which positions, and how often: the methods, as their papers say.

Nothing is rotated by a shift here, and nothing is weighed by a logarithm: every key has the position that it has in the
row of the query, and a key that counts n times is there n times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

Importance = Callable[[Sequence[int], Sequence[range]], list[float]]
"""The importance of segments to some tokens, in one head of one layer (PINE)."""


@dataclass(frozen=True)
class Row:
    """What one token attends to."""

    position: float
    keys: list[tuple[int, float]]  # index in memory and position, far to near; a sliding window covers the last of them
    copies: Callable[[int], int] = lambda _: 1  # how often a key counts
    parts: tuple[range, ...] = ()  # keys that have a softmax of their own (APE)


@dataclass(frozen=True)
class World:
    """A prompt as it lies in memory: texts, and a set of segments between any two of them, farthest segment first."""

    texts: list[range]  # generated tokens belong to the last one
    sets: list[list[range]]

    @classmethod
    def of(cls, texts: Sequence[int], sets: Sequence[Sequence[int]]) -> World:
        """Return the prompt whose texts and segments have these lengths."""
        end = 0

        def take(length: int) -> range:
            nonlocal end
            end += length
            return range(end - length, end)

        world = cls([take(texts[0])], [])
        for segments, text in zip(sets, texts[1:], strict=True):
            world.sets.append([take(length) for length in segments])
            world.texts.append(take(text))
        return world

    def place(self, token: int) -> tuple[int, range | None]:
        """Return how many sets are behind a token, and the segment that holds it; None for a token of a text."""
        for number, segments in enumerate(self.sets):
            for segment in segments:
                if token in segment:
                    return number, segment
        return next(number for number, text in enumerate(self.texts) if token in text), None

    def windows(self, numbers: Iterable[int]) -> int:
        """Return the product of the numbers of segments that some sets have, empty segments not counted."""
        return prod(max(1, sum(map(bool, self.sets[number]))) for number in numbers)

    def shared_positions(self, *, right: bool = False) -> list[int]:
        """Return the position of every token, where the segments of a set start alike, or end alike (`right`)."""
        positions: list[int] = []
        start = 0
        for text, segments in zip(self.texts, [*self.sets, []], strict=True):
            positions += range(start, start + len(text))
            start += len(text)
            longest = max(map(len, segments), default=0)
            for segment in segments:
                first = start + (longest - len(segment) if right else 0)
                positions += range(first, first + len(segment))
            start += longest
        return positions

    def alone(self, token: int) -> list[int]:
        """Return the keys of a token where segments attend to the prefix and to themselves."""
        number, own = self.place(token)
        prefix = range(token + 1) if own is None else chain(range(self.texts[number].stop), range(own.start, token + 1))
        return list(prefix)


def _stacked(keys: Sequence[int]) -> Row:
    """Return the row of keys that have the positions 0, 1, 2...; the last is the token itself."""
    return Row(len(keys) - 1, list(zip(keys, range(len(keys)), strict=True)))


def sequential(world: World, token: int, importance: Importance) -> Row:
    """The plain causal model."""
    return _stacked(range(token + 1))


def isolated(world: World, token: int, importance: Importance) -> Row:
    """NIA: segments attend to the prefix and to themselves; positions are those of the plain model."""
    return Row(token, [(key, key) for key in world.alone(token)])


def rotor(world: World, token: int, importance: Importance) -> Row:
    """RoToR: segment i attends to i + 1, ..., n - 1, 0, ..., i, one after the other (arXiv 2502.08662, section 3.2)."""
    number, own = world.place(token)
    if own is None:
        return _stacked(range(token + 1))
    segments = world.sets[number]
    index = segments.index(own)
    ring = chain(*segments[index + 1 :], *segments[:index])
    return _stacked([*range(world.texts[number].stop), *ring, *range(own.start, token + 1)])


def pine(world: World, token: int, importance: Importance, *, nearest_first: bool = False) -> Row:
    """PINE: the others by importance, the most important nearest, and itself nearest of all (arXiv 2407.01100)."""

    def ranked(queries: Sequence[int], segments: Sequence[range]) -> Iterable[int]:
        filled = [segment for segment in segments if segment]
        values = importance(queries, filled)
        order = sorted(range(len(filled)), key=lambda i: -values[i] if nearest_first else values[i])
        return chain(*(filled[i] for i in order))

    number, own = world.place(token)
    row: list[int] = []
    for text, segments in zip(world.texts[:number], world.sets[:number], strict=True):
        row += text
        row += ranked([token], segments) if own is None else chain(*segments)
    if own is None:
        return _stacked([*row, *range(world.texts[number].start, token + 1)])
    others = [segment for segment in world.sets[number] if segment != own]
    return _stacked([*row, *world.texts[number], *ranked(own, others), *range(own.start, token + 1)])


def pine_reverse(world: World, token: int, importance: Importance) -> Row:
    """The ablation with the most important segment farthest."""
    return pine(world, token, importance, nearest_first=True)


def pine_in_place(world: World, token: int, importance: Importance) -> Row:
    """The ablation without new positions: segments attend both ways, at the positions of the plain model."""
    number, own = world.place(token)
    if own is None:
        return sequential(world, token, importance)
    others = chain(*(segment for segment in world.sets[number] if segment != own))
    keys = [*range(world.texts[number].stop), *others, *range(own.start, token + 1)]
    return Row(token, [(key, key) for key in keys])


def set_based(world: World, token: int, importance: Importance) -> Row:
    """Set-Based Prompting: parallel segments at the same positions (arXiv 2406.06581)."""
    positions = world.shared_positions()
    return Row(positions[token], [(key, positions[key]) for key in world.alone(token)])


def parallel_windows(world: World, token: int, importance: Importance) -> Row:
    """PCW: every window has a copy of the prefix, and what follows sees them all (arXiv 2212.10947).

    The first token of the prompt exists once. Before a second set, everything is the prefix of its windows.
    """
    behind, _ = world.place(token)

    def copies(key: int) -> int:
        number, own = world.place(key)
        is_first = key == 0 and len(world.texts[0]) > 0
        return 1 if is_first else world.windows(range(number if own is None else number + 1, behind))

    row = set_based(world, token, importance)
    return Row(row.position, row.keys, copies)


def structured(world: World, token: int, importance: Importance) -> Row:
    """Structured Prompting: groups end alike, and the test input counts once per group (arXiv 2212.06713)."""
    positions = world.shared_positions(right=True)
    keys = [(key, positions[key]) for key in world.alone(token)]
    behind, _ = world.place(token)
    return Row(positions[token], keys, lambda key: world.windows(range(min(behind, world.place(key)[0]))))


def ape(world: World, token: int, importance: Importance) -> Row:
    """APE: the context has a softmax of its own, with a temperature and a scale (arXiv 2502.05431, section 4)."""
    row, (behind, _) = set_based(world, token, importance), world.place(token)
    sets = [world.sets[number] for number in range(behind) if world.windows([number]) > 1]
    return Row(row.position, row.keys, parts=tuple(range(each[0].start, each[-1].stop) for each in sets))


_ALL = sequential, isolated, rotor, pine, pine_reverse, pine_in_place, set_based, parallel_windows, structured, ape
METHODS: dict[str, Callable[[World, int, Importance], Row]] = {each.__name__.replace("_", "-"): each for each in _ALL}
