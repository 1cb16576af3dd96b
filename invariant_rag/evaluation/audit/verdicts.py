"""Parse the verdict of a judge: which of two responses does its answer name?"""

from __future__ import annotations

import re
from collections.abc import Sequence

from invariant_rag.evaluation.metrics import normalise_answer
from invariant_rag.segments import Segment

_KIND = r"(?i:response|answer|option|assistant|output|candidate|one)"
_BETTER = r"(?i:better|best|stronger|superior|preferable|preferred|winner)"
_CHOICE = rf"(?:{_BETTER}|(?i:prefer|choose|pick|favou?r|verdict|choice))"
# A letter or number in parentheses is a label in lower case as well: "Output (a)". Without them, "a" is an article.
_LABEL = r"(?:\(\s*(?P<marked>[ABab12])\s*\)|(?P<label>[AB12]\b|\b(?i:first|second)\b))"
_BRACKETS = re.compile(r"\[\[\s*(?P<label>[AaBb12])\s*\]\]")
_ALONE = re.compile(
    rf"\A\W*(?i:the\s+)?(?:{_BETTER}\s+)?{_KIND}?\W*(?P<label>(?i:[ab12]|first|second))(?:\s+{_KIND})?\W*\Z"
)
_SENTENCES = (
    re.compile(rf"{_LABEL}(?:'s)?(?:\s+{_KIND})?\s+(?:is|was)\s+(?!not\b)(?:\w+\s+){{0,2}}?{_BETTER}\b"),
    re.compile(
        rf"\b{_CHOICE}\b(?:\s+{_KIND})?[^\w(]*(?:(?:is|would be)[^\w(]+)?(?i:the\s+)?(?:{_KIND}[^\w(]+)?{_LABEL}"
    ),
)
"""Ways to say which response is better, the clearest first."""
_CONCLUSION = re.compile(r"\b(?i:therefore|thus|hence|overall|in conclusion|in summary|final verdict)\b")
_FIRST = {"a", "1", "first"}
_EMPHASIS = re.compile(r"\*+|`+|\b_+|_+\b")
_BOXED = re.compile(r"\\boxed\{\W*(?:\\text\{)?\W*([ABab12])\W*\}")


def parse_verdict(answer: str, segments: Sequence[Segment]) -> int | None:
    """Return which of two responses an answer names: by its text, or by a label (A, B, 1, 2, (a), (b), first, second).

    A label may stand in double brackets or a box, alone, or in a sentence that says which response is better. Of an
    answer that names both so, the conclusion counts: the last line with brackets, or what follows the last "therefore"
    or its like. None if the answer names neither, or both to the end.

    >>> parse_verdict("I think response B is better.", [Segment("yes"), Segment("no")])
    1
    >>> parse_verdict("Output (b) is better written. Therefore, Output (a) is better.", [Segment("x"), Segment("y")])
    0
    """
    said = normalise_answer(answer)
    answer = _EMPHASIS.sub("", _BOXED.sub(r"[[\1]]", answer))
    texts = [normalise_answer(segment.text) for segment in segments]
    if texts.count(said) == 1:
        return texts.index(said)
    if _BRACKETS.search(answer):
        lines = [line for line in answer.split("\n") if _BRACKETS.search(line)]
        return _only(_named(_BRACKETS, lines[-1]))
    if named := _named(_ALONE, answer):
        return _only(named)
    for pattern in _SENTENCES:
        named = _named(pattern, answer)
        if len(named) == 2:
            *_, conclusion = _CONCLUSION.split(answer)
            named = _named(pattern, conclusion) or named
        if named:
            return _only(named)
    return None


def _named(pattern: re.Pattern[str], text: str) -> set[int]:
    """Return the responses, 0 and 1, whose labels a pattern finds."""
    labels = [next(label for label in found.groupdict().values() if label) for found in pattern.finditer(text)]
    return {int(label.lower() not in _FIRST) for label in labels}


def _only(named: set[int]) -> int | None:
    return next(iter(named)) if len(named) == 1 else None
