"""Records of other tools as questions of an audit: ragas, promptfoo, and data sets in the manner of SQuAD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_QUESTIONS = ("question", "user_input", "query", "input")
_SEGMENTS = ("segments", "retrieved_contexts", "contexts", "context", "documents")
_ANSWERS = ("answers", "reference", "ground_truth", "ground_truths", "expected", "answer")
_LITERAL_CHECKS = {"contains", "icontains", "equals", "contains-any", "icontains-any"}


def as_record(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with `question`, `segments` and `answers`; everything else is kept under its name.

    A record of ragas has `user_input` (or `question`), `retrieved_contexts` (`contexts`) and `reference`
    (`ground_truth`); its `response` or, with `contexts`, its `answer` is what a system said, and no gold answer. A test
    of promptfoo has `vars`, and `assert` with `contains`, `equals` or their like. SQuAD has `context` and
    `answers: {"text": [...]}`.

    >>> as_record({"user_input": "Who?", "retrieved_contexts": ["Ann."], "reference": "Ann"})
    {'question': 'Who?', 'segments': ['Ann.'], 'answers': 'Ann'}
    """
    if isinstance(entry.get("vars"), Mapping):
        entry = _of_promptfoo(entry)
    record = dict(entry)
    if ("contexts" in record or "retrieved_contexts" in record) and {*_ANSWERS[1:4]} & {*record}:
        record = {"said" if name == "answer" else name: value for name, value in record.items()}
    found: dict[str, Any] = {}
    for ours, names in (("question", _QUESTIONS), ("segments", _SEGMENTS), ("answers", _ANSWERS)):
        name = next((name for name in names if record.get(name) is not None), None)
        if name is not None:
            found[ours] = record.pop(name)
    if isinstance(found.get("segments"), str) and "segments" not in entry:
        found["segments"] = [found["segments"]]
    answers = found.get("answers")
    if isinstance(answers, Mapping) and "text" in answers:
        found["answers"] = answers["text"]
    if "reference_contexts" in record and "gold" not in record:
        found["gold"] = _places(found.get("segments"), record["reference_contexts"])
    return {**record, **found}


def _of_promptfoo(test: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a test, with the literal texts that it expects as `answers`."""
    expected: list[Any] = []
    for each in test.get("assert") or ():
        if isinstance(each, Mapping) and each.get("type") in _LITERAL_CHECKS and each.get("value") is not None:
            value = each["value"]
            expected += value if isinstance(value, list) else [value]
    others = {name: value for name, value in test.items() if name not in {"vars", "assert"}}
    return {**others, **test["vars"], **({"answers": expected} if expected else {})}


def _places(segments: Any, wanted: Any) -> list[int]:
    """Return which segments are among the wanted ones."""
    if not isinstance(segments, Sequence) or not isinstance(wanted, Sequence):
        return []
    return [index for index, each in enumerate(segments) if each in wanted]
