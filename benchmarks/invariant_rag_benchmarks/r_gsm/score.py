"""Score: is the number after the last "Answer:" right?"""

from __future__ import annotations

import re

from invariant_rag_benchmarks.base import Case, Scored

_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


def stated_number(output: str) -> str:
    """Return the last number after the last `Answer:`, without commas and trailing zeros; empty if there is none.

    >>> stated_number("3 + 4 = 7. Answer: $1,200.50")
    '1200.5'
    """
    _, mark, tail = output.rpartition("Answer:")
    found = _NUMBER.findall(tail if mark else "")
    if not found:
        return ""
    number: str = found[-1].replace(",", "").rstrip(".")
    return number.rstrip("0").rstrip(".") if "." in number else number


def score(case: Case, output: str) -> Scored:
    """Compare numbers by value."""
    answer = stated_number(output)
    right = bool(answer) and float(answer) == float(case.gold[0].replace(",", ""))
    return Scored(answer, {"accuracy": float(right)})
