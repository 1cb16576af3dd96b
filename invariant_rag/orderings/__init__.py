"""Orderings: rules that rank segments. Rank 0 is placed next to the suffix."""

from __future__ import annotations

from invariant_rag.checks import check_name
from invariant_rag.orderings.base import Candidate, Ordering
from invariant_rag.orderings.monot5 import MonoT5
from invariant_rag.orderings.relevance import CrossEncoder, Embedding, Relevance
from invariant_rag.orderings.simple import Frequency, Given, Lexical, LexicalReversed, Score

ORDERINGS: dict[str, type[Ordering]] = {
    ordering.name: ordering
    for ordering in (Lexical, LexicalReversed, Frequency, MonoT5, CrossEncoder, Embedding, Score, Given)
}

__all__ = [
    "ORDERINGS",
    "Candidate",
    "CrossEncoder",
    "Embedding",
    "Frequency",
    "Given",
    "Lexical",
    "LexicalReversed",
    "MonoT5",
    "Ordering",
    "Relevance",
    "Score",
    "resolve_ordering",
]


def resolve_ordering(name_or_instance: str | Ordering | None, default: str | None = None) -> Ordering:
    """Look up an ordering by its registry name; an instance is returned unchanged, and None selects `default`.

    >>> resolve_ordering("lexical")
    Lexical()

    Raises:
        UnknownName: There is no such ordering; the message lists the names.
    """
    if isinstance(name_or_instance, Ordering):
        return name_or_instance
    chosen = default if name_or_instance is None else name_or_instance
    return ORDERINGS[check_name("ordering", chosen, ORDERINGS)]()
