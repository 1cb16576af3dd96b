"""Files of questions as records: JSON, YAML of promptfoo, tables by pandas, datasets; and fields of other tools."""

from __future__ import annotations

import ast
import io
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from json import detect_encoding
from pathlib import Path
from typing import Any

from invariant_rag.errors import ExtraRequired, InvalidQuestion
from invariant_rag.files import parse_json, read_bytes
from invariant_rag.shown import shown

Entries = list[tuple[str, Any]]
"""Where each entry is, such as `questions.jsonl, line 3`, and what it says."""

COLUMNS = ("id", "question", "segment", "title", "score", "gold", "answer")
"""Columns of a table with one row per segment; others are kept with the question."""

_TABLES = {".csv": "read_csv", ".tsv": "read_csv", ".xlsx": "read_excel", ".parquet": "read_parquet"}
_NUMBERED = re.compile(r"(?:segment|context|document|passage|chunk)[ _-]?(\d{1,4})", re.IGNORECASE)
"""Columns with one segment each."""
_FLAGS = dict.fromkeys(("", "0", "0.0", "false", "no"), False) | dict.fromkeys(("1", "1.0", "true", "yes"), True)

_QUESTIONS = ("question", "user_input", "query", "input")
_SEGMENTS = ("segments", "retrieved_contexts", "retrieval_context", "contexts", "context", "documents")
_ANSWERS = tuple("answers reference ground_truth ground_truths expected expected_output target answer".split())
_FIELDS = {"question": _QUESTIONS, "segments": _SEGMENTS, "answers": _ANSWERS}
_OTHERS = set(
    "id gold rubrics said response actual_output multi_responses reference_contexts title description "
    "metadata options threshold provider providers choices sandbox files setup tools_called context".split()
)
"""Fields of this package and of other tools that need no mention."""
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
    """Read the entries of a file or of a folder."""
    documents = {".json": parse_json, ".yaml": _parse_yaml, ".yml": _parse_yaml}
    suffix = path.suffix.lower()
    try:
        if path.is_dir():
            return _read_dataset(path)
        if not path.exists():
            raise InvalidQuestion(f"no such file: {path}", hint="")
        if suffix not in {".jsonl", *documents, *_TABLES}:
            known = ", ".join([".jsonl", *documents, *_TABLES])
            raise InvalidQuestion(f"{path}: expected a file of {known}, or a folder of a saved dataset")
        content = read_bytes(path)
    except OSError as error:
        raise InvalidQuestion(f"{path}: cannot be read: {error.strerror or error}", hint="") from error
    if suffix in {".xlsx", ".parquet"}:
        return _read_table(_TABLES[suffix], io.BytesIO(content), path)
    try:
        text = content.decode(detect_encoding(content))
    except UnicodeDecodeError as error:
        raise InvalidQuestion(f"{path}: cannot be read: {error}", hint="Save it as UTF-8.") from error
    if suffix in documents:
        return _parse_document(text, path, documents[suffix])
    return _parse_jsonl(text, path) if suffix == ".jsonl" else _parse_csv(text, path)


def _parse_jsonl(text: str, path: Path) -> Entries:
    entries = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                entries.append((f"{path}, line {number}", parse_json(line)))
            except ValueError as error:
                hint = "If the file is one document of JSON, over several lines, name it .json."
                hint_here = hint if number == 1 else None
                raise InvalidQuestion(f"{path}, line {number}: expected JSON: {error}", hint=hint_here) from error
    one = len(entries) == 1 and isinstance(entries[0][1], Mapping)
    return _numbered(*entries[0]) if one else entries


def _numbered(where: str, document: Mapping[str, Any]) -> Entries:
    """Return the rows of a document with their places, if it has several."""
    rows = rows_of(document, where)
    return [(where if len(rows) == 1 else f"{where}, question {number}", row) for number, row in enumerate(rows, 1)]


def _parse_document(text: str, path: Path, parse: Callable[[str], Any]) -> Entries:
    """Parse a list of questions, or a configuration of promptfoo with its `tests`."""
    try:
        document = parse(text)
    except ValueError as error:
        raise InvalidQuestion(f"{path}: cannot be parsed: {error}") from error
    shared: Mapping[str, Any] = {}
    if isinstance(document, Mapping) and "tests" in document:
        default = document.get("defaultTest")
        shared = default.get("vars") or {} if isinstance(default, Mapping) else {}
        document = document["tests"]
    elif isinstance(document, Mapping):
        return _numbered(str(path), document)
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
    """Parse YAML from outside into plain data."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        anchored = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            is_alias = isinstance(event, yaml.AliasEvent)
            if is_alias and self.anchored:
                message = "expected no alias within what an alias stands for"
                raise yaml.composer.ComposerError(None, None, message, event.start_mark)
            inside = getattr(event, "anchor", None) is not None and not is_alias
            self.anchored += inside
            try:
                return super().compose_node(parent, index)
            finally:
                self.anchored -= inside

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:  # `!!int` of a text
                message = f"expected a value of {node.tag}: {error}"
                raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from error

    try:
        return yaml.load(text, Loader)  # noqa: S506 - it is a SafeLoader
    except RecursionError:
        raise ValueError("expected YAML nested less deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _parse_csv(text: str, path: Path) -> Entries:
    # A spreadsheet writes semicolons where the comma is a decimal sign, and tabs as Unicode text.
    separator = max(",;\t", key=text.partition("\n")[0].count)
    options = {"sep": separator, "dtype": str, "keep_default_na": False, "index_col": False}
    return _read_table("read_csv", io.StringIO(text), path, **options)


def _read_dataset(folder: Path) -> Entries:
    """Read a dataset that `save_to_disk` wrote, or Parquet files as a hub has them; of several splits, all."""
    arrow, parquet = (sorted(folder.rglob(pattern)) for pattern in ("*.arrow", "*.parquet"))
    if not arrow and not parquet:
        raise InvalidQuestion(f"{folder}: expected a folder with .arrow or .parquet files, got none")
    reader = "arrow" if arrow else "read_parquet"
    return [entry for path in arrow or parquet for entry in _read_table(reader, path, path)]


def _read_table(reader: str, source: Any, path: Path, **options: Any) -> Entries:
    """Return the rows of a table, read by pandas: one for each question, or one for each segment."""
    try:
        import pandas as pd

        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row has more fields than there are columns
            table = _read_arrow(source) if reader == "arrow" else getattr(pd, reader)(source, **options)
    except ImportError as error:
        raise ExtraRequired(error.name or "pandas", "evaluation") from None
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, Warning) as error:  # those of Arrow are ValueErrors
        raise InvalidQuestion(f"{path}: expected a table: {str(error)[:200]}") from error
    known = {*_OTHERS, *COLUMNS, *_QUESTIONS, *_SEGMENTS, *_ANSWERS}
    names = [str(each).strip() for each in table.columns]
    table.columns = columns = [name.lower() if name.lower() in known else name for name in names]
    if not {*_QUESTIONS} & {*columns}:
        raise InvalidQuestion(
            f"{path}: expected columns out of {', '.join(COLUMNS)}, with question; got {shown(columns)}",
            hint="A table has a row per segment (question,segment,gold,answer), or a row per question: question,"
            "context 1,context 2,answer, or question,contexts,answer with a JSON list of texts under contexts.",
        )
    rows = parse_json(table.to_json(orient="records", date_format="iso"))
    entries = [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]
    return _join_rows(entries) if "segment" in columns else [(where, _one_row(row)) for where, row in entries]


def _read_arrow(path: Path) -> Any:
    from pyarrow import ipc

    with path.open("rb") as file:
        return ipc.open_stream(file).read_pandas()


def _join_rows(rows: Entries) -> Entries:
    """Join the rows of one id (or question), which have a segment each."""
    entries: dict[str, tuple[str, dict[str, Any]]] = {}
    for where, cells in rows:
        row = dict.fromkeys(COLUMNS, "") | {name: "" if cell is None else str(cell) for name, cell in cells.items()}
        _, entry = entries.setdefault(row["id"] or row["question"], (where, {"segments": [], "answers": []}))
        answers = [each.strip() for each in row["answer"].split("|") if each.strip()]
        entry["answers"] += [each for each in answers if each not in entry["answers"]]
        for name, cell in row.items():
            if name in {"id", "question"} or (name not in COLUMNS and cell):
                entry.setdefault(name, cell)
        if row["segment"]:
            gold, score = row["gold"].strip().lower(), row["score"].strip().replace(",", ".")
            if gold not in _FLAGS:
                raise InvalidQuestion(f"{where}: expected 1 or 0, got {shown(row['gold'])}")
            segment = {"text": row["segment"], "title": row["title"] or None, "gold": _FLAGS[gold]}
            try:
                entry["segments"].append({**segment, "score": float(score) if score else None})
            except ValueError:
                raise InvalidQuestion(f"{where}: expected a number, got {shown(row['score'])}") from None
    return list(entries.values())


def _one_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row that is a whole question; cells with a list are read as one, as pandas or JSON writes it.

    >>> _one_row({"question": "Who?", "Context 2": "Bo.", "Context 1": "Ann."})
    {'question': 'Who?', 'segments': ['Ann.', 'Bo.']}
    """
    numbered = {int(found[1]): name for name in row if (found := _NUMBERED.fullmatch(name))}
    segments = [row[numbered[number]] for number in sorted(numbered) if row[numbered[number]]]
    taken = {*numbered.values()}
    others = {name: _parse_list(cell) for name, cell in row.items() if cell not in ("", None) and name not in taken}
    return {**others, "segments": segments} if segments else others


def rows_of(document: Mapping[str, Any], where: str) -> list[Any]:
    """Return the records of a document: of its columns, of the one list of records in it, or itself.

    ragas and `datasets` write columns as lists, and pandas as mappings from the number of a row.

    >>> rows_of({"question": ["Who?", "When?"], "contexts": [["Ann."], ["In May."]]}, "q.json")[1]
    {'question': 'When?', 'contexts': ['In May.']}
    >>> rows_of({"version": 1, "questions": [{"question": "Who?"}]}, "q.json")
    [{'question': 'Who?'}]
    """
    first = next((document[name] for name in _QUESTIONS if name in document), None)
    is_messages = isinstance(first, list) and all(isinstance(each, Mapping) for each in first)
    if isinstance(first, list | Mapping) and not is_messages:
        columns = {name: list(each.values()) if isinstance(each, Mapping) else each for name, each in document.items()}
        for name, column in columns.items():
            if not isinstance(column, list) or len(column) != len(first):
                raise InvalidQuestion(
                    f"{where}: expected columns of {len(first)} rows each, as ragas and pandas write them; "
                    f"{name!r} has others",
                    hint="Write one record per question: in pandas, `to_json(path, orient='records', lines=True)`.",
                )
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    lists = [each for each in document.values() if isinstance(each, list) and each]
    records = [each for each in lists if all(isinstance(one, Mapping) for one in each)]
    return records[0] if first is None and "vars" not in document and len(records) == 1 else [document]


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
        said = [each.get("content", "") for each in record["input"] if isinstance(each, Mapping)]
        record["input"] = "\n".join(map(str, said))
    if ("contexts" in record or "retrieved_contexts" in record) and {*_ANSWERS[1:4]} & {*record}:
        record = {"said" if name == "answer" else name: value for name, value in record.items()}
    found: dict[str, Any] = {}
    for ours, names in _FIELDS.items():
        name = next((name for name in names if record.get(name) is not None), None)
        if name is not None:
            found[ours] = record.pop(name)
    if isinstance(found.get("segments"), str) and "segments" not in entry:
        listed = _parse_list(found["segments"])
        found["segments"] = [listed] if isinstance(listed, str) and not is_promptfoo else listed
    if isinstance(found.get("answers"), Mapping) and "text" in found["answers"]:
        found["answers"] = found["answers"]["text"]
    wanted, segments = record.get("reference_contexts"), found.get("segments")
    if "gold" not in record and isinstance(wanted, Sequence) and isinstance(segments, Sequence):
        found["gold"] = [index for index, each in enumerate(segments) if each in wanted]
    return {**record, **found}


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


def describe_unknown(fields: Iterable[str], lacking: Iterable[str], *, misspelt_only: bool) -> str:
    """Return a sentence or two on fields of records that mean nothing to an audit; "" if there are none.

    Args:
        fields: Names of the other fields.
        lacking: Which of `question`, `segments`, `answers` and `gold` some record lacks.
        misspelt_only: Whether to name only what may be a misspelling.
    """
    known = [each for name in sorted(lacking) for each in _FIELDS.get(name, (name,))]
    unknown = sorted({*fields} - _OTHERS)
    meant = {name: close[0] for name in unknown if (close := get_close_matches(name.lower(), known, 1, 0.75))}
    said = [f"{name!r} is no field of a question: did you mean {close!r}?" for name, close in meant.items()]
    others = [repr(name) for name in unknown if name not in meant]
    if others and not misspelt_only:
        said.append(f"Not used, but kept with the questions: {', '.join(others)}.")
    return " ".join(said)
