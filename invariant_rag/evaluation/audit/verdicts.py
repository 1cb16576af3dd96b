"""Parse the verdict of a judge: which of two responses does its answer name?"""

from __future__ import annotations

import re
from collections.abc import Sequence

from invariant_rag.evaluation.metrics import normalise_answer
from invariant_rag.segments import Segment

_KIND = r"(?i:response|answer|option|assistant|output|candidate|one)"
_BETTER = r"(?i:better|best|stronger|superior|preferable|preferred|winner)"
_CHOICE = rf"(?:{_BETTER}|(?i:prefer|choose|pick|favou?r|verdict|choice))"
_LABEL = r"(?P<label>[AB12]|(?i:first|second))"
_VERDICTS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[\[\s*(?P<label>[AaBb12])\s*\]\]",
        rf"\A\W*(?i:the\s+)?(?:{_BETTER}\s+)?{_KIND}?\W*(?P<label>(?i:[ab12]|first|second))(?:\s+{_KIND})?\W*\Z",
        rf"\b{_LABEL}\b(?:'s)?(?:\s+{_KIND})?\s+(?:is|was)\s+(?!not\b)(?:\w+\s+){{0,2}}?{_BETTER}\b",
        rf"\b{_CHOICE}\b(?:\s+{_KIND})?\W*(?:(?:is|would be)\W+)?(?i:the\s+)?(?:{_KIND}\W+)?{_LABEL}\b",
    )
)
"""Ways to name a response, the clearest first."""
_FIRST = {"a", "1", "first"}


def parse_verdict(answer: str, segments: Sequence[Segment]) -> int | None:
    """Return which of two responses an answer names: by its text, or by a label (A, B, 1, 2, first, second).

    A label may stand in double brackets, alone, or in a sentence that says which response is better. None if the
    answer names neither, or if its clearest sentences name both.

    >>> parse_verdict("I think response B is better.", [Segment("yes"), Segment("no")])
    1
    """
    said = normalise_answer(answer)
    texts = [normalise_answer(segment.text) for segment in segments]
    if texts.count(said) == 1:
        return texts.index(said)
    for pattern in _VERDICTS:
        named = {int(found["label"].lower() not in _FIRST) for found in pattern.finditer(answer)}
        if named:
            return named.pop() if len(named) == 1 else None
    return None
