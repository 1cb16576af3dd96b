"""The input order, as in a plain RAG pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from invariant_rag.orderings.base import Candidate, Ordering


class Given(Ordering):
    """Keep the input order: the first segment is farthest from the suffix. Not invariant."""

    name: ClassVar[str] = "given"
    invariant: ClassVar[bool] = False
    descending: ClassVar[bool] = True

    def sort_keys(self, candidates: Sequence[Candidate], query: str) -> range:
        """Return the input index of each candidate. The last candidate has rank 0."""
        return range(len(candidates))
