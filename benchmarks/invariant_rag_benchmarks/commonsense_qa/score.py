"""Score: the option of the likeliest of ` A` to ` E`; without letters, the only option that the output contains."""

from __future__ import annotations

from invariant_rag_benchmarks.base import Case, Scored
from invariant_rag_benchmarks.choices import score_choice


def score(case: Case, output: str) -> Scored:
    """Score 1 for the right letter, or, without letters, if the output contains the right option and no other one.

    The latter is `eval_accuracy` in `evalCSQA.py` of Set-Based Prompting: letter by letter, case included.
    """
    if case.candidates:
        return score_choice(case, output)
    named = [option for option in case.gold if option in output]
    return Scored(" | ".join(sorted(named)), {"accuracy": float(named == [case.gold[0]])})
