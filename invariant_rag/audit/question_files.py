"""Files of questions as records: JSON lines, JSON, YAML of promptfoo, tables by pandas; and fields of other tools."""

from __future__ import annotations

import ast
import io
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from json import detect_encoding
from pathlib import Path
from typing import Any

from invariant_rag.errors import ExtraRequired, InvalidQuestion
from invariant_rag.files import parse_json, read_bytes
from invariant_rag.shown import shown

Entries = list[tuple[str, Any]]
"""Where each entry is, such as `questions.jsonl, line 3`, and what it says."""

FIELDS = ("id", "question", "segments", "answers", "gold", "rubrics")
"""Keys of a record."""

COLUMNS = ("id", "question", "segment", "title", "score", "gold", "answer")
"""Keys of a record, or columns of a table, with one segment of a question."""

_QUESTIONS = ("question", "user_input", "query", "input")
_SEGMENTS = ("segments", "retrieved_contexts", "retrieval_context", "contexts", "context", "documents")
_ANSWERS = tuple("answers reference ground_truth ground_truths expected expected_output target answer".split())
_NAMES = {"question": _QUESTIONS, "segments": _SEGMENTS, "answers": _ANSWERS}
_OTHERS = set(
    "id gold rubrics segment title score context contexts metadata description response actual_output multi_responses "
    "reference_contexts tools_called options threshold provider providers choices sandbox files setup".split()
)
"""Fields of this package and of other tools that need no mention."""
_SUFFIXES = (".jsonl", ".json", ".yaml", ".yml", ".csv", ".tsv", ".xlsx", ".parquet")
_FLAGS = dict.fromkeys(("", "0", "0.0", "false", "no"), False) | dict.fromkeys(("1", "1.0", "true", "yes"), True)
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


def read_entries(path: Path) -> Entries:
    """Read the entries of a file."""
    suffix = path.suffix.lower()
    try:
        if not path.exists():
            raise InvalidQuestion(f"no such file: {path}", hint="")
        if suffix not in _SUFFIXES:
            raise InvalidQuestion(f"{path}: expected a file of {', '.join(_SUFFIXES)}")
        content = read_bytes(path)
    except OSError as error:
        raise InvalidQuestion(f"{path}: cannot be read: {error.strerror or error}", hint="") from error
    if suffix in {".xlsx", ".parquet"}:
        return _read_table(io.BytesIO(content), path)
    try:
        text = content.decode(detect_encoding(content))
    except UnicodeDecodeError as error:
        raise InvalidQuestion(f"{path}: cannot be read: {error}", hint="Save it as UTF-8.") from error
    if suffix in {".csv", ".tsv"}:
        return _read_table(io.StringIO(text), path, max(",;\t", key=text.partition("\n")[0].count))
    return _parse_jsonl(text, path) if suffix == ".jsonl" else _parse_document(text, path)


def _parse_jsonl(text: str, path: Path) -> Entries:
    entries = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                entries.append((f"{path}, line {number}", parse_json(line)))
            except ValueError as error:
                hint = (
                    "If the file is one document of JSON, over several lines, name it .json." if number == 1 else None
                )
                raise InvalidQuestion(f"{path}, line {number}: expected JSON: {error}", hint=hint) from error
    return entries


def _parse_document(text: str, path: Path) -> Entries:
    """Parse a list of questions, their columns, or a configuration of promptfoo with its `tests`."""
    try:
        document = parse_json(text) if path.suffix.lower() == ".json" else _parse_yaml(text)
    except ValueError as error:
        raise InvalidQuestion(f"{path}: cannot be parsed: {error}") from error
    shared: Mapping[str, Any] = {}
    if isinstance(document, Mapping) and "tests" in document:
        default = document.get("defaultTest")
        shared = default.get("vars") or {} if isinstance(default, Mapping) else {}
        document = document["tests"]
    elif isinstance(document, Mapping):
        document = _rows_of(document, path)
    entries: Entries = []
    for number, each in enumerate(document if isinstance(document, list) else [document], start=1):
        if isinstance(each, str) and each.startswith("file://"):
            entries += read_entries(path.parent / each.removeprefix("file://"))
        elif isinstance(each, Mapping):
            variables = {"vars": {**shared, **each["vars"]}} if isinstance(each.get("vars"), Mapping) else {}
            entries.append((f"{path}, test {number}", {**each, **variables}))
        else:
            raise InvalidQuestion(f"{path}, test {number}: expected a mapping, got {type(each).__name__}")
    return entries


def _parse_yaml(text: str) -> Any:
    """Parse YAML from outside: an alias within what an alias stands for could grow without bounds."""
    import yaml

    anchored: list[bool] = []
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) and any(anchored):
                line = event.start_mark.line + 1
                raise ValueError(f"expected no alias within what an alias stands for, line {line}")
            if isinstance(event, yaml.CollectionStartEvent):
                anchored.append(event.anchor is not None)
            elif isinstance(event, yaml.CollectionEndEvent):
                anchored.pop()
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError("expected YAML nested less deeply") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise ValueError(f"expected YAML: {error}") from error  # others than YAMLError: `!!int` of a text


def _read_table(source: Any, path: Path, separator: str = "") -> Entries:
    """Return the rows of a table, read by pandas; cells with a list are read as one, as pandas or JSON writes it."""
    try:
        import pandas as pd

        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row has more fields than there are columns
            if separator:
                table = pd.read_csv(source, sep=separator, dtype=str, keep_default_na=False, index_col=False)
            else:
                table = (pd.read_excel if path.suffix.lower() == ".xlsx" else pd.read_parquet)(source)
        known = {*_OTHERS, *COLUMNS, *_QUESTIONS, *_SEGMENTS, *_ANSWERS}
        names = [str(each).strip() for each in table.columns]
        table.columns = [name.lower() if name.lower() in known else name for name in names]
        rows = parse_json(table.to_json(orient="records", date_format="iso"))
    except ImportError as error:
        raise ExtraRequired(error.name or "pandas", "evaluation") from None
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, Warning) as error:
        raise InvalidQuestion(f"{path}: expected a table: {str(error)[:200]}") from error
    filled = [{name: _parse_list(cell) for name, cell in row.items() if cell not in ("", None)} for row in rows]
    return [(f"{path}, row {number}", row) for number, row in enumerate(filled, start=1)]


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
            number_of = float(score.replace(",", ".")) if score else None
        except ValueError:
            raise InvalidQuestion(f"{where}: expected score as a number, got {shown(row['score'])}") from None
        segment = {"text": str(row["segment"]), "title": row.get("title"), "score": number_of, "gold": _FLAGS[gold]}
        entry["segments"].append(segment)
    return list(joined.values())


def _rows_of(document: Mapping[str, Any], path: Path) -> list[Any]:
    """Return the records of a document: of its columns, of the one list of records in it, or itself.

    ragas and `datasets` write columns as lists, and pandas as mappings from the number of a row.
    """
    first = next((document[name] for name in _QUESTIONS if name in document), None)
    is_messages = isinstance(first, list) and all(isinstance(each, Mapping) for each in first)
    if isinstance(first, list | Mapping) and not is_messages:
        import pandas as pd

        try:
            return list(pd.DataFrame(document).to_dict("records"))
        except ValueError as error:
            hint = "Write one record per question: in pandas, `to_json(path, orient='records', lines=True)`."
            raise InvalidQuestion(f"{path}: expected columns of {len(first)} rows each: {error}", hint=hint) from error
    lists = [each for each in document.values() if isinstance(each, list) and each]
    records = [each for each in lists if all(isinstance(one, Mapping) for one in each)]
    return records[0] if first is None and "vars" not in document and len(records) == 1 else [document]


def as_record(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with `question`, `segments` and `answers`; everything else is kept under its name.

    ragas has `user_input`, `retrieved_contexts` and `reference`, and names of before; its `response`, or its `answer`
    beside those, is what a system said. deepeval has `input`, `retrieval_context` and `expected_output`; inspect
    `input`, `target` and `metadata`; promptfoo `vars`, and `assert` with literal texts or checks that take a judge.

    >>> as_record({"user_input": "Who?", "retrieved_contexts": ["Ann."], "reference": "Ann"})
    {'question': 'Who?', 'segments': ['Ann.'], 'answers': 'Ann'}
    """
    record = _of_promptfoo(entry) if isinstance(entry.get("vars"), Mapping) else dict(entry)
    if "target" in record and isinstance(record.get("metadata"), Mapping):  # a sample of inspect
        record = {name: each for name, each in record["metadata"].items() if name in _SEGMENTS} | record
    if isinstance(record.get("input"), list):  # messages
        said = [each.get("content", "") for each in record["input"] if isinstance(each, Mapping)]
        record["input"] = "\n".join(map(str, said))
    if {"contexts", "retrieved_contexts"} & {*record} and {*_ANSWERS[1:4]} & {*record}:
        record.pop("answer", None)
    found: dict[str, Any] = {}
    for ours, names in _NAMES.items():
        name = next((name for name in names if record.get(name) is not None), None)
        if name is not None:
            found[ours] = record.pop(name)
    if "segments" in found:
        found["segments"] = _parse_list(found["segments"])
    wanted, segments = record.get("reference_contexts"), found.get("segments")
    if "gold" not in record and isinstance(wanted, Sequence) and isinstance(segments, Sequence):
        found["gold"] = [index for index, each in enumerate(segments) if each in wanted]
    return {**record, **found}


def _of_promptfoo(test: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a test, the literal texts it expects as `answers`, and checks for a judge as rubrics."""
    graded: dict[str, list[Any]] = {"answers": [], "rubrics": []}
    unread = {}
    for each in filter(lambda each: isinstance(each, Mapping), test.get("assert") or ()):
        kind, value = str(each.get("type")), each.get("value")
        values = value if isinstance(value, list) else [value]
        if kind in _LITERAL_CHECKS and value is not None:
            graded["answers"] += values
        elif kind in _RUBRICS:
            graded["rubrics"] += [_RUBRICS[kind].format(value=one) for one in values]
        else:
            unread[f"assert: {kind}"] = value
    others = {name: value for name, value in test.items() if name not in {"vars", "assert"}}
    return {**others, **test["vars"], **{name: each for name, each in graded.items() if each}, **unread}


def _parse_list(text: Any) -> Any:
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


def describe_unknown(fields: Iterable[str], lacking: Iterable[str]) -> str:
    """Return a sentence on fields that mean nothing, with what of the `lacking` ones may be meant; "" without any."""
    known = [each for name in sorted(lacking) for each in _NAMES.get(name, (name,))]
    said = []
    for name in sorted({*map(str, fields)} - {*FIELDS} - _OTHERS):
        close = get_close_matches(name.lower(), known, 1, 0.75)
        said.append(repr(name) + (f" (did you mean {close[0]!r}?)" if close else ""))
    return f"No field of a question, and not used: {', '.join(said)}." if said else ""
