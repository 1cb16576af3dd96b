"""Metrics of a generated answer against gold answers (SQuAD, Lost in the Middle), and of answers to several orders."""

import re
import string
from collections import Counter
from collections.abc import Sequence

from invariant_rag.checks import check_items, check_text

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-case ``text``, drop ASCII punctuation and the words a, an, the, and join the rest by single spaces.

    The steps and their order are those of SQuAD (arXiv 1606.05250), which Lost in the Middle (arXiv 2307.03172) uses:
    punctuation goes before the articles, so "a-b" is "ab", and only ASCII punctuation goes.

    >>> normalize_answer("  The  U.S. Senate!")
    'us senate'
    """
    check_text("answer", text)
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the normalised prediction equals a normalised gold answer, else 0.0 (SQuAD's EM)."""
    answer = normalize_answer(prediction)
    return float(any(answer == normalize_answer(gold) for gold in check_items("golds", golds, str)))


def best_subspan_em(prediction: str, golds: Sequence[str]) -> float:
    """Return 1.0 if a normalised gold answer is a substring of the normalised prediction, else 0.0.

    The metric of Lost in the Middle: characters are matched, not words. The paper scores the first line of an output
    only, which is up to the caller. A gold answer that is empty after normalisation matches every prediction.
    """
    answer = normalize_answer(prediction)
    return float(any(normalize_answer(gold) in answer for gold in check_items("golds", golds, str)))


def token_f1(prediction: str, golds: Sequence[str]) -> float:
    """Return the best F1 of the words of the prediction over the gold answers (SQuAD's F1).

    If either side has no words after normalisation, the score is 1.0 if both have none, else 0.0 (SQuAD 2.0).
    """
    words = normalize_answer(prediction).split()
    scores = (_pair_f1(words, normalize_answer(gold).split()) for gold in check_items("golds", golds, str))
    return max(scores, default=0.0)


def agreement(answers: Sequence[str]) -> float:
    """Return 1.0 if the answers to one question in several orders are all the same, else 0.0.

    Its mean over questions, over all 120 orders of five documents, is the share of questions without sensitivity to
    permutations (Stable-RAG, arXiv 2601.02993). Answers are compared as they are: normalise them before.
    """
    return float(len(set(answers)) <= 1)


def _pair_f1(prediction: list[str], gold: list[str]) -> float:
    if not prediction or not gold:
        return float(prediction == gold)
    shared = (Counter(prediction) & Counter(gold)).total()
    return 2 * shared / (len(prediction) + len(gold))
