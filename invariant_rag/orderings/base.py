"""Base class of orderings: a subclass computes a sort key per segment, the base class sorts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any, ClassVar

from invariant_rag.read_only import ReadOnly
from invariant_rag.segments import Segment


@dataclass(frozen=True)
class Candidate:
    """A rendered and tokenized segment: the input of an ordering.

    Attributes:
        segment: The segment, with its metadata and score.
        token_ids: Token ids of the rendered segment, before any truncation.
        text: The rendered text; None for a segment of token ids if there is no tokenizer to decode them.
    """

    segment: Segment
    token_ids: tuple[int, ...]
    text: str | None

    @property
    def tie_breaker(self) -> tuple[Any, ...]:
        """Secondary sort key: the segment's content, token ids and text. Only exact duplicates have equal ones."""
        return (*self.segment.canonical_key, self.token_ids, self.text or "")


class Ordering(ReadOnly):
    """A rule that ranks segments. A subclass implements `sort_keys`. Its attributes are read-only once it is built.

    Attributes:
        name: Name in the registry.
        invariant: Whether the ranking depends on the contents alone, not on the input order.
        descending: Whether the largest key has rank 0.
    """

    name: ClassVar[str]
    invariant: ClassVar[bool] = True
    descending: ClassVar[bool] = False

    def check_installed(self) -> None:
        """Raise `ExtraRequired` if a package is not installed that it needs, before expensive work: here, none."""

    @abstractmethod
    def sort_keys(self, candidates: Sequence[Candidate], query: str) -> Sequence[Any]:
        """Return one sort key per candidate, in input order.

        It may depend on the query and on the multiset of candidates, not on their order (unless `invariant` is False).
        """

    def rank(self, candidates: Sequence[Candidate], query: str) -> list[int]:
        """Return the indices of `candidates` by rank. Rank 0 is placed next to the suffix.

        Law: if `invariant`, every permutation of the candidates gives the same sequence of contents.
        """
        keys = self.sort_keys(candidates, query)
        ranks = sorted(range(len(candidates)), key=keys.__getitem__, reverse=self.descending)
        ordered = list(map(keys.__getitem__, ranks))
        if not any(map(eq, ordered, ordered[1:])):
            return ranks
        unique = [(key, candidate.tie_breaker) for key, candidate in zip(keys, candidates, strict=True)]
        return sorted(ranks, key=unique.__getitem__, reverse=self.descending)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
