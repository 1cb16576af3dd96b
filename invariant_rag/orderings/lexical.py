"""Orderings by token ids, which need no model and no query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from invariant_rag.orderings.base import Candidate, Ordering


class Lexical(Ordering):
    """Compare token ids lexicographically; a segment that is a prefix of another comes first.

    The default of RoToR: https://arxiv.org/abs/2502.08662, section 3.2.
    """

    name: ClassVar[str] = "lexical"

    def sort_keys(self, candidates: Sequence[Candidate], query: str) -> list[tuple[int, ...]]:
        """Return the token ids."""
        return [candidate.token_ids for candidate in candidates]


class LexicalReversed(Lexical):
    """The reverse of `lexical`."""

    name: ClassVar[str] = "lexical-reversed"
    descending: ClassVar[bool] = True
