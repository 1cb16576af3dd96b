"""Records of other tools as questions of an audit: ragas, promptfoo, deepeval, inspect, and those like SQuAD."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from invariant_rag.errors import InvalidQuestion
from invariant_rag.files import parse_json

QUESTIONS = ("question", "user_input", "query", "input")
_SEGMENTS = ("segments", "retrieved_contexts", "retrieval_context", "contexts", "context", "documents")
_ANSWERS = tuple("answers reference ground_truth ground_truths expected expected_output target answer".split())
_FIELDS = {"question": QUESTIONS, "segments": _SEGMENTS, "answers": _ANSWERS}
_OTHERS = set(
    "id gold rubrics said response actual_output multi_responses reference_contexts title description "
    "metadata options threshold provider providers choices sandbox files setup tools_called context".split()
)
"""Fields of this package and of other tools that need no mention."""
_SIMILAR = 0.75
"""How alike a field and a known one are, of which it may be a misspelling."""
_LITERAL_CHECKS = {"contains", "icontains", "equals", "contains-any", "icontains-any"}
_RUBRICS = {
    "llm-rubric": "{value}",
    "model-graded-closedqa": "{value}",
    "factuality": "It agrees with: {value}",
    "model-graded-factuality": "It agrees with: {value}",
    "similar": "It means the same as: {value}",
    "answer-relevance": "It answers the question.",
}
"""Checks of promptfoo that take a judge, as what a right answer does."""


def as_record(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with `question`, `segments` and `answers`; everything else is kept under its name.

    A record of ragas has `user_input` (or `question`), `retrieved_contexts` (`contexts`) and `reference`
    (`ground_truth`); its `response` or, with `contexts`, its `answer` is what a system said, and no gold answer. A test
    case of deepeval has `input`, `retrieval_context` and `expected_output`, a sample of inspect `input`, `target` and
    `metadata`. A test of promptfoo has `vars`, and `assert` with `contains`, `equals` or their like, or with
    `llm-rubric`, `similar` and others that take a judge. SQuAD has `context` and `answers: {"text": [...]}`. A test of
    promptfoo whose context is one text keeps it: its documents cannot be moved.

    >>> as_record({"user_input": "Who?", "retrieved_contexts": ["Ann."], "reference": "Ann"})
    {'question': 'Who?', 'segments': ['Ann.'], 'answers': 'Ann'}
    """
    is_promptfoo = isinstance(entry.get("vars"), Mapping)
    record = _of_promptfoo(entry) if is_promptfoo else dict(entry)
    if "target" in record and isinstance(record.get("metadata"), Mapping):  # a sample of inspect
        record = {name: each for name, each in record["metadata"].items() if name in _SEGMENTS} | record
    if isinstance(record.get("input"), list):  # messages
        record["input"] = "\n".join(
            str(each.get("content", "")) for each in record["input"] if isinstance(each, Mapping)
        )
    if ("contexts" in record or "retrieved_contexts" in record) and {*_ANSWERS[1:4]} & {*record}:
        record = {"said" if name == "answer" else name: value for name, value in record.items()}
    found: dict[str, Any] = {}
    for ours, names in _FIELDS.items():
        name = next((name for name in names if record.get(name) is not None), None)
        if name is not None:
            found[ours] = record.pop(name)
    if isinstance(found.get("segments"), str) and "segments" not in entry:
        listed = parse_list(found["segments"])
        found["segments"] = [listed] if isinstance(listed, str) and not is_promptfoo else listed
    if isinstance(found.get("answers"), Mapping) and "text" in found["answers"]:
        found["answers"] = found["answers"]["text"]
    wanted, segments = record.get("reference_contexts"), found.get("segments")
    if "gold" not in record and isinstance(wanted, Sequence) and isinstance(segments, Sequence):
        found["gold"] = [index for index, each in enumerate(segments) if each in wanted]
    return {**record, **found}


def column_name(name: str) -> str:
    """Return the name of a column as fields of questions are written, if it is one of them in other letters.

    >>> column_name(" Question"), column_name("Page")
    ('question', 'Page')
    """
    lower = name.strip().lower()
    known = {*QUESTIONS, *_SEGMENTS, *_ANSWERS, *_OTHERS, "segment", "score"}
    return lower if lower in known else name.strip()


def rows_of(document: Mapping[str, Any], where: str) -> list[Any]:
    """Return the records of a document: of its columns, of the one list of records in it, or itself.

    ragas and `datasets` write columns as lists, and pandas as mappings from the number of a row.

    >>> rows_of({"question": ["Who?", "When?"], "contexts": [["Ann."], ["In May."]]}, "q.json")[1]
    {'question': 'When?', 'contexts': ['In May.']}
    >>> rows_of({"version": 1, "questions": [{"question": "Who?"}]}, "q.json")
    [{'question': 'Who?'}]

    Raises:
        InvalidQuestion: Its columns have different rows.
    """
    first = next((document[name] for name in QUESTIONS if name in document), None)
    is_messages = isinstance(first, list) and all(isinstance(each, Mapping) for each in first)
    if isinstance(first, list | Mapping) and not is_messages:
        rows = _row_names(first)
        for name, column in document.items():
            if _row_names(column) != rows:
                raise InvalidQuestion(
                    f"{where}: expected columns of {len(rows)} rows each, as ragas and pandas write them; "
                    f"{name!r} has others",
                    hint="Write one record per question: in pandas, `to_json(path, orient='records', lines=True)`.",
                )
        return [{name: column[row] for name, column in document.items()} for row in rows]
    lists = [each for each in document.values() if isinstance(each, list) and each]
    records = [each for each in lists if all(isinstance(one, Mapping) for one in each)]
    return records[0] if first is None and "vars" not in document and len(records) == 1 else [document]


def _row_names(column: Any) -> list[Any]:
    return list(column) if isinstance(column, Mapping) else list(range(len(column))) if isinstance(column, list) else []


def describe_unknown(extras: Iterable[tuple[Mapping[str, Any], set[str]]], *, misspelt_only: bool) -> str:
    """Return a sentence or two on the fields of questions that mean nothing to an audit; "" if there are none.

    Args:
        extras: The other fields of each question, and which of `question`, `segments`, `answers` and `gold` it lacks.
        misspelt_only: Whether to name only what may be a misspelling.
    """
    meant: dict[str, list[str]] = {}
    for fields, missing in extras:
        known = [each for name in sorted(missing) for each in _FIELDS.get(name, (name,))]
        for name in fields.keys() - _OTHERS:
            meant[name] = meant.get(name) or get_close_matches(name.lower(), known, 1, _SIMILAR)
    said = [
        f"{name!r} is no field of a question: did you mean {meant[name][0]!r}?" for name in sorted(meant) if meant[name]
    ]
    others = [repr(name) for name in sorted(meant) if not meant[name]]
    if others and not misspelt_only:
        said.append(f"Not used, but kept with the questions: {', '.join(others)}.")
    return " ".join(said)


def parse_list(text: Any) -> Any:
    """Return a list that is written as JSON or as pandas writes one; anything else as it is."""
    if not isinstance(text, str) or not text.strip().startswith("["):
        return text
    for parse in (parse_json, ast.literal_eval):
        try:
            found = parse(text.strip())
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # TypeError: a list as a key
            continue
        if isinstance(found, list):
            return found
    return text


def _of_promptfoo(test: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a test, the literal texts that it expects as `answers`, and its other checks as rubrics.

    Checks that are neither, such as `javascript`, are kept under `unread_checks`, which is named to the user.
    """
    graded: dict[str, list[Any]] = {"answers": [], "rubrics": [], "unread_checks": []}
    for each in filter(lambda each: isinstance(each, Mapping), test.get("assert") or ()):
        kind, value = str(each.get("type")), each.get("value")
        values = value if isinstance(value, list) else [value]
        if kind in _LITERAL_CHECKS and value is not None:
            graded["answers"] += values
        elif kind in _RUBRICS:
            graded["rubrics"] += [_RUBRICS[kind].format(value=one) for one in values]
        else:
            graded["unread_checks"].append(kind)
    others = {name: value for name, value in test.items() if name not in {"vars", "assert"}}
    return {**others, **test["vars"], **{name: each for name, each in graded.items() if each}}
