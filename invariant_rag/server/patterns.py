"""How large the automaton of a pattern is, and how short its shortest text, without building one.

A pattern of a few characters may need an automaton of millions of states. So its size is computed from the sizes of its
parts, as Glushkov's construction puts them together: a state for each character that is written, and an edge to each
that may come next.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from invariant_rag.errors import InvalidSchema

MOST_GROUPS = 50
"""Of groups within each other."""
MOST_COUNT = 200
"""Of the repetitions of a part."""
MOST_WORK = 2_000
"""Of the edges of the automata of all patterns together, each weighed by how many characters go along it."""

_HINT = "Ask for less, or say it in the prompt."
_NARROW = 0.1
"""Weight of a single character: nearly no token goes on with it, where a class may let all of them pass."""
_TOKEN = re.compile(
    r"(?P<class>\\[wWdDsS]|\[(?:\\.|[^\]\\])*\]?|\.)"
    r"|(?P<open>\((?:\?(?:[:=!]|<[=!]|<\w*>))?)|(?P<close>\))|(?P<alternative>\|)"
    r"|\{(?P<least>\d+)(?P<more>,(?P<most>\d*))?\}\??|(?P<loop>[*+?])\??|(?P<anchor>[\^$])"
    r"|\\(?:u\{[^}]{0,8}\}|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|c[A-Za-z]|.)|.",
    re.DOTALL,
)


@dataclass(frozen=True)
class PatternSize:
    """Size of a pattern, or of a part of one.

    Attributes:
        shortest: Characters of its shortest text.
        first: Weight of the characters that may come first.
        last: Characters that may come last.
        edges: Weight of all pairs of characters that may follow each other.
    """

    shortest: int = 0
    first: float = 0.0
    last: int = 0
    edges: float = 0.0

    @property
    def work(self) -> float:
        """Weight of all edges of its automaton."""
        return self.first + self.edges

    def then(self, other: PatternSize) -> PatternSize:
        """Return the size of this part and another one after it."""
        return PatternSize(
            self.shortest + other.shortest,
            self.first + (0 if self.shortest else other.first),
            other.last + (0 if other.shortest else self.last),
            self.edges + other.edges + self.last * other.first,
        )

    def either(self, other: PatternSize) -> PatternSize:
        """Return the size of this part or another one."""
        return PatternSize(
            min(self.shortest, other.shortest),
            self.first + other.first,
            self.last + other.last,
            self.edges + other.edges,
        )

    def repeated(self, least: int, most: int | None) -> PatternSize:
        """Return the size of this part, some times after each other; None: without an end."""
        looped = (
            self if most is not None else PatternSize(0, self.first, self.last, self.edges + self.last * self.first)
        )
        if not self.last:  # it is empty
            return self
        found = PatternSize() if most is not None else looped
        for place in reversed(range(least if most is None else most)):
            found = self.then(found)
            if place >= least:
                found = PatternSize(0, found.first, found.last, found.edges)
        return found


@lru_cache(maxsize=256)
def pattern_size(pattern: str) -> PatternSize:
    r"""Return the size of a pattern. What is no pattern has some size, too; who compiles it says what is wrong with it.

    >>> pattern_size(r"^\d{3}-\d{4}$").shortest
    8
    >>> pattern_size("([a-z]?){30}").work > 10 * pattern_size("[a-z]{0,30}").work
    True

    Raises:
        InvalidSchema: It counts too far, or its groups are nested too deeply.
    """
    groups = [_Group()]
    for found in _TOKEN.finditer(pattern):
        _follow(found, groups)
        if sum(each.edges for each in groups) > MOST_WORK:
            break
    while len(groups) > 1:
        _close(groups)
    whole = groups[0].whole()
    if whole.work > MOST_WORK:
        raise InvalidSchema(
            f"expected a pattern whose automaton has at most {MOST_WORK:,} edges, got a larger one", hint=_HINT
        )
    return whole


class _Group:
    """What was read of a group: earlier alternatives, this one, and its last part, which may be repeated."""

    def __init__(self) -> None:
        self._others: PatternSize | None = None
        self._before = self._part = PatternSize()

    @property
    def edges(self) -> float:
        return self._before.edges + self._part.edges + (self._others.edges if self._others else 0)

    def add(self, part: PatternSize) -> None:
        self._before, self._part = self._before.then(self._part), part

    def alternate(self) -> None:
        self._others, self._before, self._part = self.whole(), PatternSize(), PatternSize()

    def repeat(self, least: int, most: int | None) -> None:
        self._part = self._part.repeated(least, most)

    def whole(self) -> PatternSize:
        alternative = self._before.then(self._part)
        return alternative if self._others is None else self._others.either(alternative)


def _follow(found: re.Match[str], groups: list[_Group]) -> None:
    """Put what a token of a pattern says into the group that is open."""
    if found["open"]:
        groups.append(_Group())
        if len(groups) > MOST_GROUPS:
            raise InvalidSchema(f"expected a pattern of at most {MOST_GROUPS} groups within each other", hint=_HINT)
    elif found["close"]:
        if len(groups) > 1:
            _close(groups)
    elif found["alternative"]:
        groups[-1].alternate()
    elif found["loop"] or found["least"]:
        groups[-1].repeat(*_counts(found))
    elif found["anchor"] is None:
        groups[-1].add(PatternSize(1, _NARROW if found["class"] is None else 1.0, 1))


def _close(groups: list[_Group]) -> None:
    closed = groups.pop().whole()
    groups[-1].add(closed)


def _counts(found: re.Match[str]) -> tuple[int, int | None]:
    """Return how often a part is repeated, at least and at most; None: without an end.

    Raises:
        InvalidSchema: It counts too far.
    """
    if found["loop"]:
        return (1 if found["loop"] == "+" else 0), (1 if found["loop"] == "?" else None)
    least, most = (int(found[name][:9]) if found[name] else None for name in ("least", "most"))
    if max(least or 0, most or 0) > MOST_COUNT:
        raise InvalidSchema(f"expected a pattern that counts to at most {MOST_COUNT}", hint=_HINT)
    return least or 0, most if found["more"] else least
