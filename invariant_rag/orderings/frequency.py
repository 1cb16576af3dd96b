"""Ordering by inverse token frequency within the set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from invariant_rag.orderings.base import Candidate, Ordering


class Frequency(Ordering):
    """Replace each token id by 1 / its count over all segments; compare lexicographically, a prefix first.

    RoToR (https://arxiv.org/abs/2502.08662). The published code pads every segment to the longest one with the first
    token of the prompt, counts that token once more, and treats every token with the same count as padding, which
    counts as 0. So a token that occurs once more than there are padding positions sorts first; among segments of one
    length these are the tokens that occur once. This implementation keeps that rule, because it depends on the set
    alone and the published results use it. It does not keep the fall-back to input order for equal keys.
    """

    name: ClassVar[str] = "frequency"

    def sort_keys(self, candidates: Sequence[Candidate], query: str) -> list[tuple[float, ...]]:
        """Return the inverse counts of the tokens of each candidate."""
        counts = Counter(token for candidate in candidates for token in candidate.token_ids)
        longest = max((len(candidate.token_ids) for candidate in candidates), default=0)
        padding_count = 1 + sum(longest - len(candidate.token_ids) for candidate in candidates)
        inverse = {token: 0.0 if count == padding_count else 1 / count for token, count in counts.items()}
        return [tuple(inverse[token] for token in candidate.token_ids) for candidate in candidates]
