"""Scores of an answer against gold answers (SQuAD, Lost in the Middle), and tests over variants of questions."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from invariant_rag.audit.statistics import CONFIDENCE, Estimate, exact_upper_bound, resampled_means

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
PERMUTATIONS = 1000
_BATCH = 100  # shuffles that are drawn at a time, which bounds memory to [100, questions]


def normalize_answer(text: str) -> str:
    """Lower-case ``text``, drop ASCII punctuation, then the words a, an, the, and join the rest by single spaces.

    As in SQuAD (arXiv 1606.05250), whose steps Lost in the Middle (arXiv 2307.03172) uses.

    >>> normalize_answer("  The  U.S. Senate!")
    'us senate'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the normalised prediction equals a normalised gold answer, else 0.0 (SQuAD's EM)."""
    return float(normalize_answer(prediction) in map(normalize_answer, golds))


def best_subspan_em(prediction: str, golds: Sequence[str]) -> float:
    """Return 1.0 if a normalised gold answer is a substring of the normalised prediction, else 0.0.

    The metric of Lost in the Middle: characters are matched, not words. The paper scores the first line of an output
    only, which is up to the caller. A gold answer that is empty after normalisation matches every prediction.
    """
    answer = normalize_answer(prediction)
    return float(any(normalize_answer(gold) in answer for gold in golds))


def token_f1(prediction: str, golds: Sequence[str]) -> float:
    """Return the best F1 of the words of the prediction over the gold answers (SQuAD's F1).

    If either side has no words after normalisation, the score is 1.0 if both have none, else 0.0 (SQuAD 2.0).
    """

    def f1(words: list[str], gold: list[str]) -> float:
        shared = (Counter(words) & Counter(gold)).total()
        return 2 * shared / (len(words) + len(gold)) if words and gold else float(words == gold)

    words = normalize_answer(prediction).split()
    return max((f1(words, normalize_answer(gold).split()) for gold in golds), default=0.0)


def variations(scores: np.ndarray[Any, Any], seed: int = 0) -> dict[str, dict[str, float] | None]:
    """Return `spread` (best mean minus worst) and `deviation` (standard deviation of the means) over variants.

    Each is a value, `low` and `high` of the interval of the true one, and `chance`, below which chance alone stays 19
    times out of 20. Both are seminorms of the means: that of a sum is at most the sum of both. So the value differs
    from the true one by at most the variation of the errors, of which the bootstrap gives the 95% quantile: the margin
    of the interval. (Percentiles of the variation itself exclude 0 even where the true one is 0.) The margin is at
    least the largest share of questions of which none was seen, so that no interval is without width.

    `scores` `[questions, variants]` are from 0 to 1. Questions that lack a variant are left out, since variants of
    other questions cannot be compared; of none, each is None.
    """
    known = scores[np.isfinite(scores).all(axis=1)]
    if not known.size or known.shape[1] < 2:
        return {"spread": None, "deviation": None}
    means, resampled, source = known.mean(axis=0), resampled_means(known, seed), np.random.default_rng(seed)
    batches = [np.broadcast_to(known, (_BATCH, *known.shape))] * (PERMUTATIONS // _BATCH)
    by_chance = np.concatenate([source.permuted(each, axis=2).mean(axis=1) for each in batches])
    measured: dict[str, dict[str, float] | None] = {}
    for name, statistic in (("spread", np.ptp), ("deviation", np.std)):
        value = float(statistic(means))
        error = float(np.quantile(statistic(resampled - means, axis=1), CONFIDENCE))
        margin = max(error, exact_upper_bound(0, len(known)))
        chance = float(np.quantile(statistic(by_chance, axis=1), CONFIDENCE))
        estimate = Estimate(value, max(0.0, value - margin), min(1.0, value + margin))
        measured[name] = {**estimate.as_dict(), "chance": round(chance, 6)}
    return measured
