"""Ordering by the retriever's score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from invariant_rag.errors import InvalidSegment
from invariant_rag.orderings.base import Candidate, Ordering
from invariant_rag.shown import shown


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
