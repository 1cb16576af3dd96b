"""Scores: exact match, accuracy (the answer contains a gold one) and F1 of the answer in the output's JSON."""

from __future__ import annotations

import ast
import json

from invariant_rag.evaluation.metrics import best_subspan_em, exact_match, normalise_answer, token_f1

from invariant_rag_benchmarks.base import Case, Scored


def stated_answer(output: str) -> str:
    """Return the value of "Answer" in the first JSON object, or the first line if there is none.

    >>> stated_answer('{"Answer": ["Rome", "Oslo"]} I hope this helps')
    'Rome, Oslo'
    """
    text = output.strip()
    if "Answer" in text and "{" in text:
        first = text[text.index("{") :].replace("\n", "").split("}")[0] + "}"
        for parse in (json.loads, ast.literal_eval):
            try:
                found = parse(first)["Answer"]
            except (ValueError, SyntaxError, KeyError, TypeError):
                continue
            return ", ".join(map(str, found)) if isinstance(found, list) else str(found)
    return text.split("\n")[0]


def score(case: Case, output: str) -> Scored:
    """Score as RoToR does, after Baek et al. (arXiv 2306.04136)."""
    answer = stated_answer(output)
    scores = {
        "accuracy": best_subspan_em(answer, case.gold),
        "exact_match": exact_match(answer, case.gold),
        "f1": token_f1(answer, case.gold),
    }
    return Scored(normalise_answer(answer), scores)
