"""Plain-text requests for models behind an API, whose attention cannot be changed but whose prompt can be sorted.

Two strategies, on which the integrations build. *Canonical*: every set of segments is listed in the order of a content
ordering, so the request does not depend on the order of the segments, and neither does the answer of a deterministic
model. It may still depend on which segment stands where. *Vote* (permutation self-consistency, arXiv 2310.07712): ask
about several orders of the same sets, and keep the answer that most of them give.

A conversation is a list of `Turn`s. An integration converts its messages to turns and the turns of a request back.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from invariant_rag.errors import InvalidChoice, InvalidSegment, UnsupportedCombination
from invariant_rag.orderings import Candidate, Ordering, resolve_ordering
from invariant_rag.segments import Segment, document_rendering


@dataclass(frozen=True)
class Turn:
    """One message of a conversation.

    Attributes:
        role: `user`, `assistant`, `system`, `tool`, or another one.
        parts: Strings, segments, and anything else that a message of a framework holds, such as an image.
    """

    role: str
    parts: tuple[Any, ...]

    @property
    def text(self) -> str:
        """The strings of the turn, without its segments."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def has_segments(self) -> bool:
        """Whether a part is a segment."""
        return any(isinstance(part, Segment) for part in self.parts)


@dataclass(frozen=True)
class PlainRequests:
    """Writes conversations with sets of segments as plain text, so that the order of the segments does not show.

    Attributes:
        ordering: The content ordering of every set: a name or an instance. Rank 0 stands last, nearest to what follows.
        votes: How many requests to write, each with the segments in another order. The first is the canonical one.
        seed: Seed of the other orders.

    Raises:
        InvalidChoice: Fewer than one vote.
        UnknownName: There is no such ordering.
        UnsupportedCombination: The ordering keeps the order given.
    """

    ordering: str | Ordering = "lexical"
    votes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        content_ordering(self.ordering)
        if self.votes < 1:
            raise InvalidChoice(f"votes: expected at least 1, got {self.votes}")

    def of_turns(self, turns: Sequence[Turn], query: str | None = None) -> list[list[Turn]]:
        """Return requests: the turns with every segment as plain text, once per order.

        Segments with nothing but white space between them form a set, also across neighbouring turns of one role. The
        results of tools are sets of their own, as each answers another call.

        Law: listing the segments of a set in another order gives the same requests.

        Args:
            turns: The conversation.
            query: What relevance orderings compare segments with. None: the text of the last `user` turn.

        Returns:
            `votes` requests, or fewer where the sets have no more orders. Each has one turn for each of `turns`, in
            which neighbouring strings are one string.

        Raises:
            InvalidSegment: A segment is given as token ids.
        """
        owned = list(_with_boundaries(turns))
        parts = [part for _, part in owned]
        asked = _last_question(turns) if query is None else query
        requests = []
        for listed in drawn_orders(canonical_parts(parts, self.ordering, asked), self.votes, self.seed):
            kept: list[list[Any]] = [[] for _ in turns]
            for (owner, _), part in zip(owned, listed, strict=True):
                if owner is not None:
                    kept[owner].append(part)
            requests.append([replace(turn, parts=_merged(each)) for turn, each in zip(turns, kept, strict=True)])
        return requests

    def of_text(self, parts: Iterable[str | Segment], query: str | None = None) -> list[str]:
        """Return requests as texts, for a single text with segments; see `of_turns`."""
        return [turn.text for (turn,) in self.of_turns([Turn("user", tuple(parts))], query)]


class _Boundary:
    """Stands between two sets that must not become one."""


def _with_boundaries(turns: Sequence[Turn]) -> Iterator[tuple[int | None, Any]]:
    """Yield every part with the index of its turn, and boundaries, which belong to none."""
    before: str | None = None
    for index, turn in enumerate(turns):
        if turn.role != before or turn.role == "tool":
            yield None, _Boundary()
        for part in turn.parts:
            yield index, part
        before = turn.role


def _last_question(turns: Sequence[Turn]) -> str:
    return next((turn.text.strip() for turn in reversed(turns) if turn.role == "user"), "")


def _merged(parts: Iterable[Any]) -> tuple[Any, ...]:
    """Return parts with segments as text, and neighbouring texts as one."""
    merged: list[Any] = []
    for part in parts:
        text = plain_text(part) if isinstance(part, str | Segment) else None
        if text is None:
            merged.append(part)
        elif merged and isinstance(merged[-1], str):
            merged[-1] += text
        else:
            merged.append(text)
    return tuple(merged)


def content_ordering(name_or_instance: str | Ordering) -> Ordering:
    """Return an ordering that depends on contents alone.

    Raises:
        UnknownName: There is no such ordering.
        UnsupportedCombination: It keeps the order given.
    """
    ordering = resolve_ordering(name_or_instance)
    if not ordering.invariant:
        raise UnsupportedCombination(
            f"expected an ordering by content, got {ordering.name!r}, which keeps the order given",
            hint='Choose one that depends on the text of the segments, such as "lexical".',
        )
    return ordering


def canonical_parts(parts: Sequence[Any], ordering: str | Ordering = "lexical", query: str = "") -> list[Any]:
    """Return the parts with every set in the order of an ordering, rank 0 last: nearest to what follows.

    Law: listing the segments of a set in another order gives the same parts.

    >>> canonical_parts(["Read: ", Segment("a"), Segment("b"), "Which?"]) == canonical_parts(
    ...     ["Read: ", Segment("b"), Segment("a"), "Which?"]
    ... )
    True

    Args:
        parts: Strings, segments, and anything else.
        ordering: A name or an instance. There is no tokenizer: the bytes of a text stand for its token ids.
        query: What relevance orderings compare segments with.

    Raises:
        InvalidSegment: A segment is given as token ids.
        UnsupportedCombination: The ordering keeps the order given.
    """
    chosen = content_ordering(ordering)
    listed = list(parts)
    for places in _sets(parts):
        candidates = [_candidate(parts[place]) for place in places]
        for place, index in zip(places, reversed(chosen.rank(candidates, query)), strict=True):
            listed[place] = candidates[index].segment
    return listed


def drawn_orders(parts: Sequence[Any], votes: int, seed: int) -> list[list[Any]]:
    """Return the parts in several different orders of their sets: first as they are, then in random ones.

    Law: it is a function of `parts`, so for canonical parts of nothing but the contents.

    Args:
        parts: As `canonical_parts` returns them.
        votes: How many orders. Fewer are returned where the sets have no more: one for a single segment.
        seed: Seed of the random orders.
    """
    sets = _sets(parts)
    possible = math.prod(_arrangements([plain_text(parts[place]) for place in each]) for each in sets)
    state = random.Random(seed)
    places = [place for each in sets for place in each]
    orders = {tuple(plain_text(parts[place]) for place in places): list(parts)}
    while len(orders) < min(votes, possible):
        sources = [source for each in sets for source in state.sample(each, len(each))]
        drawn = list(parts)
        for place, source in zip(places, sources, strict=True):
            drawn[place] = parts[source]
        orders.setdefault(tuple(plain_text(parts[source]) for source in sources), drawn)
    return list(orders.values())


@dataclass(frozen=True)
class Vote:
    """The outcome of a vote.

    Attributes:
        winner: Index of the answer that most answers equal; of several such, of the first.
        calls: How many answers there are.
        agreed: How many equal the winner.
    """

    winner: int
    calls: int
    agreed: int

    def as_dict(self) -> dict[str, int]:
        """Return what responses report of a vote: `calls` and `agreed`."""
        return {"calls": self.calls, "agreed": self.agreed}


def elect(answers: Sequence[Hashable]) -> Vote:
    """Count answers.

    >>> elect(["noon", "six", "six", "noon"])
    Vote(winner=0, calls=4, agreed=2)

    Args:
        answers: At least one. Equal values agree.
    """
    counts = Counter(answers)
    winner = max(range(len(answers)), key=lambda index: (counts[answers[index]], -index))
    return Vote(winner, len(answers), counts[answers[winner]])


def answer_key(text: str, tool_calls: Iterable[tuple[str, Mapping[str, Any]]] = ()) -> Hashable:
    """Return what two answers share if they agree: the text without regard to case and white space, and tool calls.

    >>> answer_key(" At  Noon ") == answer_key("at noon")
    True

    Args:
        text: The text of the answer.
        tool_calls: Name and arguments of every tool call.
    """
    calls = [[name, dict(arguments)] for name, arguments in tool_calls]
    return " ".join(text.split()).casefold(), json.dumps(calls, sort_keys=True, default=repr)


def plain_text(part: str | Segment) -> str:
    """Return a part as plain text, for a model that knows no segments."""
    return document_rendering(part) if isinstance(part, Segment) else part


def _sets(parts: Sequence[Any]) -> list[list[int]]:
    """Return the indices of the segments of each set."""
    sets: list[list[int]] = []
    open_set = False
    for place, part in enumerate(parts):
        if isinstance(part, Segment):
            if open_set:
                sets[-1].append(place)
            else:
                sets.append([place])
            open_set = True
        elif not (isinstance(part, str) and not part.strip()):
            open_set = False
    return sets


def _candidate(segment: Segment) -> Candidate:
    if segment.token_ids is not None:
        raise InvalidSegment("expected text: a model behind an API takes no token ids")
    text = document_rendering(segment)
    return Candidate(segment, tuple(text.encode("utf-8", "surrogatepass")), text)


def _arrangements(texts: Sequence[str]) -> int:
    """Return how many orders of these texts differ: equal ones can be swapped."""
    return math.factorial(len(texts)) // math.prod(map(math.factorial, Counter(texts).values()))
