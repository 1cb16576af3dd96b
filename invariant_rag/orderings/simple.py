"""Orderings that need no model: by token ids, by their frequency, by the retriever's score, and as given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar

from invariant_rag.errors import InvalidSegment
from invariant_rag.orderings.base import Candidate, Ordering
from invariant_rag.shown import shown


class Lexical(Ordering):
    """Compare token ids lexicographically; a segment that is a prefix of another comes first.

    The default of RoToR: https://arxiv.org/abs/2502.08662, section 3.2.
    """

    name: ClassVar[str] = "lexical"

    def sort_keys(self, candidates: Sequence[Candidate], query: str) -> list[tuple[int, ...]]:
        """Return the token ids."""
        return list(map(attrgetter("token_ids"), candidates))


class LexicalReversed(Lexical):
    """The reverse of `lexical`."""

    name: ClassVar[str] = "lexical-reversed"
    descending: ClassVar[bool] = True


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


class Score(Ordering):
    """Rank by the retriever's score (`Segment.score`), highest first."""

    name: ClassVar[str] = "score"

    def sort_keys(self, candidates: Sequence[Candidate], query: str) -> list[float]:
        """Return the negated scores.

        Raises:
            InvalidSegment: A segment has no score; the message gives the indices.
        """
        scores = [candidate.segment.score for candidate in candidates]
        missing = [index for index, score in enumerate(scores) if score is None]
        if missing:
            texts = (candidates[index].text or candidates[index].token_ids for index in missing[:5])
            listed = "; ".join(f"{index} ({shown(text)})" for index, text in zip(missing, texts, strict=False))
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise InvalidSegment(
                f"ordering 'score' expects a score on every segment; {len(missing)} of {len(scores)} have none: "
                f"{listed}{more}",
                hint='Set Segment(..., score=...), or choose an ordering that needs no score, such as "lexical".',
            )
        return [-score for score in scores if score is not None]


class Given(Ordering):
    """Keep the input order: the first segment is farthest from the suffix. Not invariant."""

    name: ClassVar[str] = "given"
    invariant: ClassVar[bool] = False
    descending: ClassVar[bool] = True

    def sort_keys(self, candidates: Sequence[Candidate], query: str) -> range:
        """Return the input index of each candidate. The last candidate has rank 0."""
        return range(len(candidates))
