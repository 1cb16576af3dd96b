"""Plain-text requests for models behind an API, whose attention cannot be changed but whose prompt can be sorted.

Two strategies, on which the integrations build. *Canonical*: every set of segments is listed in the order of a content
ordering, so the request does not depend on the order of the segments, and neither does the answer of a deterministic
model. *Vote* (permutation self-consistency, arXiv 2310.07712): send several orders of the same sets, and return the
answer that most of them give. An integration converts its messages to `Turn`s, and the turns of a request back.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from invariant_rag.checks import check_number
from invariant_rag.citation_labels import Labels, labels_of
from invariant_rag.errors import InvalidSegment, UnsupportedCombination
from invariant_rag.orderings import Candidate, Ordering, resolve_ordering
from invariant_rag.prompts import Turn, recognize
from invariant_rag.prompts.turns import merge_texts
from invariant_rag.segments import Segment, SegmentSet, document_rendering, is_invariant, plain_rendering

T = TypeVar("T")

STRATEGIES = frozenset({"canonical", "vote"})
"""Names of the two strategies."""


@dataclass(frozen=True)
class PlainRequest:
    """A conversation as plain text, for a model that knows no segments."""

    turns: tuple[Turn, ...]  # in which strings and other parts are left
    sets: tuple[SegmentSet, ...]  # that were written, each in the order in which its segments are listed
    labels: Labels  # of documents in the request -> index of the segment among those of all sets, as given

    @property
    def text(self) -> str:
        """The text of a conversation of one turn."""
        return self.turns[0].text

    def ledger(self, method: str, *, recognized: bool = True) -> dict[str, Any]:
        """Return what was sent by a strategy, as `generation.outputs.ledger` has it; `recognized` as there."""
        return {
            "sets": [len(each) for each in self.sets if each],
            "order": [segment.content_hash for each in self.sets for segment in each],
            "dropped": [],
            "trimmed": [],
            "cached_tokens": 0,
            "method": method,
            "invariant": is_invariant(map(len, self.sets), recognized=recognized),
        }


@dataclass(frozen=True)
class PlainRequests:
    """Writes conversations with sets of segments as plain text, so that the order of the segments does not show."""

    ordering: str | Ordering = "lexical"  # by content, of every set; rank 0 stands last, nearest to what follows
    votes: int | None = None  # how many requests to write, each in another order; None: the canonical one alone
    seed: int = 0  # of the other orders

    def __post_init__(self) -> None:
        content_ordering(self.ordering)
        if self.votes is not None:
            check_number("votes", self.votes, 1)
        check_number("seed", self.seed)

    def of_turns(self, turns: Sequence[Turn], query: str | None = None) -> list[PlainRequest]:
        """Return requests: the turns with every segment as plain text, once per order.

        Law: listing the segments of a set in another order gives the same requests, but for their `labels`. There are
        fewer than `votes` where the sets have no more orders. `query` is what relevance orderings compare segments
        with: by default the text of the last `user` turn.
        """
        turns = recognize(turns).turns
        sets = [part for turn in turns for part in turn.parts if isinstance(part, SegmentSet)]
        if query is None:
            query = next((turn.text.strip() for turn in reversed(turns) if turn.role == "user"), "")
        ordering = content_ordering(self.ordering)
        canonical = [canonical_order(each, ordering, query) for each in sets]
        return [_written(turns, sets, orders) for orders in drawn_orders(sets, canonical, self.votes or 1, self.seed)]

    def of_text(self, parts: Iterable[str | Segment | SegmentSet], query: str | None = None) -> list[PlainRequest]:
        """Return requests for a single text with segments; see `of_turns`."""
        return self.of_turns([Turn("user", tuple(parts))], query)


def request_as_given(turns: Sequence[Turn]) -> PlainRequest:
    """Return a conversation as plain text with its segments in the order given, as if nothing knew of sets."""
    turns = recognize(turns).turns
    sets = [part for turn in turns for part in turn.parts if isinstance(part, SegmentSet)]
    return _written(turns, sets, [range(len(each)) for each in sets])


def _written(turns: Sequence[Turn], sets: Sequence[SegmentSet], orders: Sequence[Sequence[int]]) -> PlainRequest:
    """Return turns with the segments of each set in an order."""
    listed = [each.permuted(order) for each, order in zip(sets, orders, strict=True)]
    texts = iter(map(set_text, listed))
    parts = [[next(texts) if isinstance(part, SegmentSet) else part for part in turn.parts] for turn in turns]
    written = [replace(turn, parts=tuple(merge_texts(each))) for turn, each in zip(turns, parts, strict=True)]
    labels = labels_of(zip(sets, orders, strict=True))
    return PlainRequest(tuple(written), tuple(listed), labels)


def content_ordering(name_or_instance: str | Ordering) -> Ordering:
    """Return an ordering that depends on contents alone; raise UnsupportedCombination for one that does not."""
    ordering = resolve_ordering(name_or_instance)
    if not ordering.invariant:
        raise UnsupportedCombination(
            f"expected an ordering by content, got {ordering.name!r}, which keeps the order given",
            hint='Choose one that depends on the text of the segments, such as "lexical".',
        )
    ordering.check_installed()
    return ordering


def canonical_order(segments: SegmentSet, ordering: Ordering, query: str = "") -> list[int]:
    """Return the indices of segments in the order of an ordering, rank 0 last: nearest to what follows.

    Law: listing the segments in another order gives the same sequence of contents. There is no tokenizer: the bytes of
    a text stand for its token ids.
    """
    if any(segment.token_ids is not None for segment in segments):
        raise InvalidSegment("expected text: a model behind an API takes no token ids")
    texts = list(map(document_rendering if segments.slots is None else plain_rendering, segments))
    candidates = [
        Candidate(segment, tuple(text.encode("utf-8", "surrogatepass")), text)
        for segment, text in zip(segments, texts, strict=True)
    ]
    return ordering.rank(candidates, query)[::-1]


def drawn_orders(
    sets: Sequence[SegmentSet], canonical: Sequence[Sequence[int]], votes: int, seed: int
) -> list[list[list[int]]]:
    """Return different orders of sets, as indices into each: the canonical one, then random ones, if there are so many.

    Law: the contents in these orders are a function of the contents of the sets.
    """
    swaps = math.prod(math.factorial(count) for each in sets for count in Counter(each).values())  # of equal segments
    possible = math.prod(math.factorial(len(each)) for each in sets) // swaps
    state = random.Random(seed)

    def contents(orders: Sequence[Sequence[int]]) -> tuple[Any, ...]:
        return tuple(segments[i].canonical_key for segments, order in zip(sets, orders, strict=True) for i in order)

    orders = {contents(canonical): [list(order) for order in canonical]}
    while len(orders) < min(votes, possible):
        drawn = [state.sample(list(order), len(order)) for order in canonical]
        orders.setdefault(contents(drawn), drawn)
    return list(orders.values())


def set_text(segments: SegmentSet) -> str:
    """Return a set as plain text, in the order in which it is listed: in its slots, or as one `Document: ...` each."""
    if segments.slots is None:
        return "".join(map(document_rendering, segments))
    return "".join(slot.render(segment) for slot, segment in zip(segments.slots, segments, strict=True))


@dataclass(frozen=True)
class Vote:
    """The outcome of a vote: how many calls were made, and how many agreed with the winner."""

    winner: int  # index of the answer that most answers equal; of several such, of the first
    calls: int
    agreed: int

    def as_dict(self) -> dict[str, int]:
        """Return what responses report of a vote: `calls` and `agreed`."""
        return {"calls": self.calls, "agreed": self.agreed}


def elect(answers: Sequence[Hashable]) -> Vote:
    """Count answers, at least one; equal values agree."""
    counts = Counter(answers)
    winner = max(range(len(answers)), key=lambda index: (counts[answers[index]], -index))
    return Vote(winner, len(answers), counts[answers[winner]])


def answer_key(text: str, tool_calls: Iterable[tuple[str, Mapping[str, Any]]] = ()) -> Hashable:
    """Return what answers share if they agree: the text but for case and white space, names and arguments of calls."""
    calls = [[name, dict(arguments)] for name, arguments in tool_calls]
    return " ".join(text.split()).casefold(), json.dumps(calls, sort_keys=True, default=repr)


def object_key(value: Any) -> str:
    """Return an object of any kind as JSON: equal objects alike. Those of pydantic count by their fields."""
    plain = lambda other: other.model_dump(mode="json") if hasattr(other, "model_dump") else repr(other)  # noqa: E731
    return json.dumps(value, default=plain, sort_keys=True)


def ask_all(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Ask a model about several orders at the same time, in threads that have this context; return the answers."""
    if len(calls) == 1:
        return [calls[0]()]
    with ThreadPoolExecutor(len(calls), thread_name_prefix="invariant-rag-vote") as pool:
        futures = [pool.submit(copy_context().run, call) for call in calls]
        return [each.result() for each in futures]
