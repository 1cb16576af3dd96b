"""The rule of Selective Routing: the confidences, the branch they choose, and the margin (arXiv 2502.08662).

Confidences are those of the published code, which the published margin of 0.2 was chosen for: the largest probability
in a softmax over the candidates alone, and for a text the arithmetic mean of its token probabilities. Two differences:

- A candidate of several tokens is scored whole, where the published code reads its first token only. The candidates
  ` A` to ` D` have no other.
- The probability of a token is that of the chosen token under the model, where the published code takes the largest one
  after logits processors. In greedy decoding without processors these are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Literal, TypeAlias

from invariant_rag.checks import check_items, check_real
from invariant_rag.errors import InvalidChoice

Branch: TypeAlias = Literal["plain", "invariant"]

ALPHA = 0.2
"""The published margin, chosen on the validation set of MMLU."""
ALPHAS = (-0.5, -0.4, -0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""The candidate margins of the paper (arXiv 2502.08662, appendix E)."""


def route(plain_confidence: float, invariant_confidence: float, alpha: float = ALPHA) -> Branch:
    """Choose a branch: the plain one if `plain_confidence + alpha > invariant_confidence`, else the invariant one.

    On a tie the invariant answer is taken, as in the paper (section 3.3) and in the published `run.py`; the published
    `mmlu_eval_bulk.py` takes the plain one.

    >>> route(0.5, 0.8), route(0.5, 0.625, alpha=0.125), route(0.9, 0.95)
    ('invariant', 'invariant', 'plain')

    Args:
        plain_confidence: Confidence of the plain model, from 0 to 1.
        invariant_confidence: Confidence of the invariant model.
        alpha: Margin by which the invariant model must be more confident.
    """
    for name, value in (
        ("plain_confidence", plain_confidence),
        ("invariant_confidence", invariant_confidence),
        ("alpha", alpha),
    ):
        check_real(name, value)
    return "plain" if plain_confidence + alpha > invariant_confidence else "invariant"


def text_confidence(logprobs: Sequence[float]) -> float:
    """Return the confidence in a text: the arithmetic mean of its token probabilities, or 0 for no tokens.

    >>> text_confidence([math.log(0.5), math.log(0.125)])
    0.3125

    Args:
        logprobs: Log-probability of each token, the end token included.
    """
    listed = check_items("logprobs", logprobs, Real)
    return math.fsum(map(math.exp, listed)) / len(listed) if listed else 0.0


def candidate_confidence(logprobs: Sequence[float]) -> float:
    """Return the largest probability in a softmax over the candidates alone.

    >>> round(candidate_confidence([math.log(0.002), math.log(0.006)]), 4)
    0.75

    Args:
        logprobs: Log-probability of each candidate; at least one.

    Raises:
        InvalidChoice: There is none, or one is no number.
    """
    listed = check_items("logprobs", logprobs, Real)
    if not listed:
        raise InvalidChoice("logprobs: expected at least one number, got none")
    largest = max(listed)
    return 1 / math.fsum(math.exp(each - largest) for each in listed)


@dataclass(frozen=True)
class RoutingRecord:
    """The results of both branches for one labelled question.

    Attributes:
        plain_confidence: Confidence of the plain model.
        invariant_confidence: Confidence of the invariant model.
        plain_score: Quality of the plain answer: correct or not, or any metric where higher is better.
        invariant_score: Quality of the invariant answer.
    """

    plain_confidence: float
    invariant_confidence: float
    plain_score: float
    invariant_score: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            check_real(each.name, int(value) if isinstance(value, bool) else value)


@dataclass(frozen=True)
class TunedAlpha:
    """The result of `tune_alpha`.

    Attributes:
        alpha: The best margin.
        score: Mean score of the routed answers at this margin.
        scores: Mean score for every candidate margin.
    """

    alpha: float
    score: float
    scores: dict[float, float]


def tune_alpha(records: Iterable[RoutingRecord], alphas: Sequence[float] = ALPHAS) -> TunedAlpha:
    """Find the margin with the best mean score on a labelled set.

    Ties are broken towards 0, and then towards the positive margin, which prefers the plain model.

    Args:
        records: The results of both branches for each question.
        alphas: Candidate margins; the published ones by default.

    Raises:
        InvalidChoice: `records` or `alphas` is empty.
    """
    records = check_items("records", records, RoutingRecord)
    alphas = [check_real("alphas", each) for each in check_items("alphas", alphas, Real)]
    if not records or not alphas:
        raise InvalidChoice(f"expected at least one record and one margin, got {len(records)} and {len(alphas)}")

    def mean(alpha: float) -> float:
        branches = [route(each.plain_confidence, each.invariant_confidence, alpha) for each in records]
        scores = [
            each.plain_score if branch == "plain" else each.invariant_score
            for each, branch in zip(records, branches, strict=True)
        ]
        return math.fsum(scores) / len(scores)

    scores = {alpha: mean(alpha) for alpha in alphas}
    best = max(scores, key=lambda alpha: (scores[alpha], -abs(alpha), alpha))
    return TunedAlpha(best, scores[best], scores)
