"""Records of other tools as questions of an audit: ragas, promptfoo, deepeval, inspect, and those like SQuAD."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from invariant_rag.errors import InvalidQuestion
from invariant_rag.files import parse_json

_QUESTIONS = ("question", "user_input", "query", "input")
_SEGMENTS = ("segments", "retrieved_contexts", "retrieval_context", "contexts", "context", "documents")
_ANSWERS = (
    "answers", "reference", "ground_truth", "ground_truths", "expected", "expected_output", "target", "answer"
)  # fmt: skip
_OTHERS = {
    *("id", "gold", "pairwise", "said", "response", "multi_responses", "reference_contexts", "rubrics", "title"),
    *("actual_output", "rubrics", "context", "tools_called", "choices", "sandbox", "files", "setup"),
    *("description", "metadata", "options", "threshold", "provider", "providers"),
}
"""Fields of this package, ragas, promptfoo and SQuAD that need no mention."""
_SIMILAR = 0.75
"""How alike a field and a known one are, of which it may be a misspelling."""
_RUBRICS = {
    "llm-rubric": "{value}",
    "model-graded-closedqa": "{value}",
    "factuality": "It agrees with: {value}",
    "model-graded-factuality": "It agrees with: {value}",
    "similar": "It means the same as: {value}",
    "answer-relevance": "It answers the question.",
}
"""Checks of promptfoo that take a judge, as what a right answer does."""
_LITERAL_CHECKS = {"contains", "icontains", "equals", "contains-any", "icontains-any"}


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
    if is_promptfoo:
        entry = _of_promptfoo(entry)
    record = dict(entry)
    if "target" in record and isinstance(record.get("metadata"), Mapping):  # a sample of inspect
        record = {**{name: each for name, each in record["metadata"].items() if name in _SEGMENTS}, **record}
    if isinstance(record.get("input"), list):  # messages
        record["input"] = "\n".join(str(e.get("content", "")) for e in record["input"] if isinstance(e, Mapping))
    if ("contexts" in record or "retrieved_contexts" in record) and {*_ANSWERS[1:4]} & {*record}:
        record = {"said" if name == "answer" else name: value for name, value in record.items()}
    found: dict[str, Any] = {}
    for ours, names in (("question", _QUESTIONS), ("segments", _SEGMENTS), ("answers", _ANSWERS)):
        name = next((name for name in names if record.get(name) is not None), None)
        if name is not None:
            found[ours] = record.pop(name)
    if isinstance(found.get("segments"), str) and "segments" not in entry:
        found["segments"] = _listed(found["segments"]) or (found["segments"] if is_promptfoo else [found["segments"]])
    answers = found.get("answers")
    if isinstance(answers, Mapping) and "text" in answers:
        found["answers"] = answers["text"]
    if "reference_contexts" in record and "gold" not in record:
        found["gold"] = _places(found.get("segments"), record["reference_contexts"])
    return {**record, **found}


def column_name(name: str) -> str:
    """Return the name of a column as fields of questions are written, if it is one of them in other letters.

    >>> column_name(" Question"), column_name("Page")
    ('question', 'Page')
    """
    lower = name.strip().lower()
    known = {*_QUESTIONS, *_SEGMENTS, *_ANSWERS, *_OTHERS, "segment", "score"}
    return lower if lower in known else name.strip()


def _listed(text: str) -> list[Any] | None:
    """Return a list that is written as JSON; None if it is none."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = parse_json(text)
    except ValueError:
        return None
    return found if isinstance(found, list) else None


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
    name = next((name for name in _QUESTIONS if name in document), None)
    if name is not None and isinstance(document[name], list | Mapping):
        return _rows_of_columns(document, document[name], where)
    lists = [each for each in document.values() if isinstance(each, list) and each]
    records = [each for each in lists if all(isinstance(one, Mapping) for one in each)]
    return records[0] if name is None and "vars" not in document and len(records) == 1 else [document]


def _rows_of_columns(document: Mapping[str, Any], first: Any, where: str) -> list[Any]:
    rows = list(first) if isinstance(first, Mapping) else range(len(first))
    columns = {}
    for name, column in document.items():
        matches = (
            isinstance(column, Mapping) and list(column) == rows
            if isinstance(first, Mapping)
            else (isinstance(column, list) and len(column) == len(rows))
        )
        if not matches:
            raise InvalidQuestion(
                f"{where}: expected columns of {len(rows)} rows each, as ragas and pandas write them; "
                f"{name!r} has others",
                hint="Write one record per question: in pandas, `to_json(path, orient='records', lines=True)`.",
            )
        columns[name] = column
    return [{name: column[row] for name, column in columns.items()} for row in rows]


def describe_unknown(extras: Iterable[tuple[Mapping[str, Any], set[str]]], *, misspelt_only: bool) -> str:
    """Return a sentence or two on the fields of questions that mean nothing to an audit; "" if there are none.

    Args:
        extras: The other fields of each question, and which of `question`, `segments`, `answers` and `gold` it lacks.
        misspelt_only: Whether to name only what may be a misspelling.
    """
    meant: dict[str, str] = {}
    others: dict[str, None] = {}
    for fields, missing in extras:
        for name in fields.keys() - _OTHERS:
            found = _meant(name, missing)
            if found:
                meant.setdefault(name, found)
            else:
                others.setdefault(name)
    said = [f"{name!r} is no field of a question: did you mean {found!r}?" for name, found in sorted(meant.items())]
    if others and not misspelt_only:
        names = ", ".join(repr(name) for name in sorted(others))
        said.append(f"Not used, but kept with the questions and shown in the report: {names}.")
    return " ".join(said)


def _meant(name: str, missing: set[str]) -> str | None:
    """Return the known field of which a name may be a misspelling, among those that are missing."""
    known = {"question": _QUESTIONS, "segments": _SEGMENTS, "answers": _ANSWERS, "gold": ("gold",)}
    candidates = [each for field in sorted(missing) for each in known[field]]
    return next(iter(get_close_matches(name.lower(), candidates, 1, _SIMILAR)), None)


def _of_promptfoo(test: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a test, the literal texts that it expects as `answers`, and its other checks as rubrics.

    Checks that are neither, such as `javascript`, are kept under `unread_checks`, which is named to the user.
    """
    expected: list[Any] = []
    rubrics: list[str] = []
    unread: list[str] = []
    for each in test.get("assert") or ():
        if not isinstance(each, Mapping):
            continue
        kind, value = str(each.get("type")), each.get("value")
        if kind in _LITERAL_CHECKS and value is not None:
            expected += value if isinstance(value, list) else [value]
        elif kind in _RUBRICS:
            rubrics += [_RUBRICS[kind].format(value=one) for one in (value if isinstance(value, list) else [value])]
        else:
            unread.append(kind)
    others = {name: value for name, value in test.items() if name not in {"vars", "assert"}}
    graded = {"answers": expected, "rubrics": rubrics, "unread_checks": unread}
    return {**others, **test["vars"], **{name: each for name, each in graded.items() if each}}


def _places(segments: Any, wanted: Any) -> list[int]:
    """Return which segments are among the wanted ones."""
    if not isinstance(segments, Sequence) or not isinstance(wanted, Sequence):
        return []
    return [index for index, each in enumerate(segments) if each in wanted]
