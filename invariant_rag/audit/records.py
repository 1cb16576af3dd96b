"""Records of any tool as records of this package: ragas, deepeval, inspect, promptfoo, tables of one chunk a row."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from invariant_rag.checks import check_name
from invariant_rag.errors import InvalidQuestion
from invariant_rag.files import parse_json
from invariant_rag.shown import shown

Entries = list[tuple[str, Any]]  # where each entry is, such as `questions.jsonl, line 3`, and what it says
FIELDS = ("id", "question", "segments", "answers", "gold", "rubrics")
COLUMNS = ("id", "question", "segment", "title", "score", "gold", "answer")  # of a table, or a record, with one segment
QUESTION_FIELDS = ("question", "user_input", "query", "input")
_SEGMENTS = ("segments", "retrieved_contexts", "retrieval_context", "contexts", "context", "documents")
_ANSWERS = tuple("answers reference ground_truth ground_truths expected expected_output target answer".split())
_NAMES = {"question": QUESTION_FIELDS, "segments": _SEGMENTS, "answers": _ANSWERS}
_OTHERS = set(
    "id gold rubrics segment title score context contexts metadata description response actual_output multi_responses "
    "reference_contexts tools_called options threshold provider providers choices sandbox files setup".split()
)  # fields of this package and of other tools that need no mention
KNOWN = {*_OTHERS, *COLUMNS, *QUESTION_FIELDS, *_SEGMENTS, *_ANSWERS}
_FLAGS = dict.fromkeys(("", "0", "0.0", "false", "no"), False) | dict.fromkeys(("1", "1.0", "true", "yes"), True)
_LITERAL_CHECKS = {"contains", "icontains", "equals", "contains-any", "icontains-any"}
_RUBRICS = {
    "llm-rubric": "{value}",
    "model-graded-closedqa": "{value}",
    "factuality": "It agrees with: {value}",
    "model-graded-factuality": "It agrees with: {value}",
    "similar": "It means the same as: {value}",
    "answer-relevance": "It answers the question.",
}  # checks of promptfoo that take a judge, as what a right answer does


def rename(entry: Any, fields: Mapping[str, str], where: str) -> Any:
    """Return an entry with our names of its fields, by a map of theirs by ours."""
    if not isinstance(entry, Mapping):
        return entry
    for ours, theirs in fields.items():
        check_name("field", ours, dict.fromkeys((*FIELDS, *COLUMNS)))
        if theirs not in entry and ours == "question":
            raise InvalidQuestion(f"{where}: expected {theirs!r} for {ours}, got {sorted(map(str, entry))}")
    names = {theirs: ours for ours, theirs in fields.items()}
    return {names.get(name, name): each for name, each in entry.items() if name in names or name not in fields}


def join_rows(entries: Entries) -> Entries:
    """Join the records of one id (or question) that have one segment each, under `segment`."""
    joined: dict[Any, tuple[str, Any]] = {}
    for number, (where, row) in enumerate(entries):
        if not isinstance(row, Mapping) or "segment" not in row:
            joined[number] = where, row
            continue
        others = {name: each for name, each in row.items() if name not in COLUMNS or name in {"id", "question"}}
        key = str(row.get("id", row.get("question")))
        _, entry = joined.setdefault(key, (where, {**others, "segments": [], "answers": []}))
        answers = [each.strip() for each in str(row.get("answer", "")).split("|")]
        entry["answers"] += [each for each in answers if each and each not in entry["answers"]]
        gold, score = (str(row.get(name, "")).strip().lower() for name in ("gold", "score"))
        if gold not in _FLAGS:
            raise InvalidQuestion(f"{where}: expected gold as 1 or 0, got {shown(row['gold'])}")
        try:
            scored = {"score": float(score.replace(",", ".")) if score else None, "gold": _FLAGS[gold]}
        except ValueError:
            raise InvalidQuestion(f"{where}: expected score as a number, got {shown(row['score'])}") from None
        entry["segments"].append({"text": str(row["segment"]), "title": row.get("title"), **scored})
    return list(joined.values())


def as_record(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with `question`, `segments` and `answers`; everything else is kept under its name.

    ragas has `user_input`, `retrieved_contexts` and `reference`, and names of before; its `response`, or its `answer`
    beside those, is what a system said. deepeval has `input`, `retrieval_context` and `expected_output`; inspect
    `input`, `target` and `metadata`; promptfoo `vars`, and `assert` with literal texts or checks that take a judge.
    """
    record = _of_promptfoo(entry) if isinstance(entry.get("vars"), Mapping) else dict(entry)
    if "target" in record and isinstance(record.get("metadata"), Mapping):  # a sample of inspect
        record = {name: each for name, each in record["metadata"].items() if name in _SEGMENTS} | record
    if isinstance(record.get("input"), list):
        messages = [each for each in record["input"] if isinstance(each, Mapping)]
        record["input"] = "\n".join(str(each.get("content", "")) for each in messages)
    if {"contexts", "retrieved_contexts"} & {*record} and {*_ANSWERS[1:4]} & {*record}:
        record.pop("answer", None)
    renamed: dict[str, Any] = {}
    for ours, names in _NAMES.items():
        for name in [name for name in names if record.get(name) is not None][:1]:
            renamed[ours] = record.pop(name)
    reference_contexts, segments = record.get("reference_contexts"), parse_list(renamed.get("segments"))
    renamed |= {} if segments is None else {"segments": segments}
    if "gold" not in record and isinstance(reference_contexts, Sequence) and isinstance(segments, Sequence):
        renamed["gold"] = [index for index, each in enumerate(segments) if each in reference_contexts]
    return {**record, **renamed}


def _of_promptfoo(test: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a test, the literal texts it expects as `answers`, and checks for a judge as rubrics."""
    answers, rubrics, unread = [], [], {}
    for each in filter(lambda each: isinstance(each, Mapping), test.get("assert") or ()):
        kind, value = str(each.get("type")), each.get("value")
        values = value if isinstance(value, list) else [value]
        if kind in _LITERAL_CHECKS and value is not None:
            answers += values
        elif kind in _RUBRICS:
            rubrics += [_RUBRICS[kind].format(value=one) for one in values]
        else:
            unread[f"assert: {kind}"] = value
    others = {name: value for name, value in test.items() if name not in {"vars", "assert"}}
    graded = ({"answers": answers} if answers else {}) | ({"rubrics": rubrics} if rubrics else {})
    return {**others, **test["vars"], **graded, **unread}


def parse_list(text: Any) -> Any:
    """Return a list that is written as JSON or as pandas writes one; anything else as it is."""
    if not isinstance(text, str) or not text.strip().startswith("["):
        return text
    for parse in (parse_json, ast.literal_eval):
        try:
            parsed = parse(text.strip())
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # TypeError: a list as a key
            continue
        if isinstance(parsed, list):
            return parsed
    return text


def describe_unknown(fields: Iterable[str], lacking: Iterable[str]) -> str:
    """Return a sentence on fields that mean nothing, with what of the `lacking` ones may be meant; "" without any."""
    known = [each for name in sorted(lacking) for each in _NAMES.get(name, (name,))]
    described = []
    for name in sorted({*map(str, fields)} - {*FIELDS} - _OTHERS):
        close = get_close_matches(name.lower(), known, 1, 0.75)
        described.append(repr(name) + (f" (did you mean {close[0]!r}?)" if close else ""))
    return f"No field of a question, and not used: {', '.join(described)}." if described else ""
