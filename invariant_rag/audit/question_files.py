"""Files of questions as raw entries: JSON, YAML of promptfoo, tables by pandas, folders of Hugging Face `datasets`."""

from __future__ import annotations

import io
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from json import detect_encoding
from pathlib import Path
from typing import Any

from invariant_rag.audit.question_formats import QUESTIONS, column_name, parse_list, rows_of
from invariant_rag.errors import ExtraRequired, InvalidQuestion
from invariant_rag.files import parse_json, read_bytes
from invariant_rag.shown import shown

Entries = list[tuple[str, Any]]
"""Where each entry is, such as `questions.jsonl, line 3`, and what it says."""

COLUMNS = ("id", "question", "segment", "title", "score", "gold", "answer")
"""Columns of a table with one row per segment; others are kept with the question."""

_TABLES = {".csv": "read_csv", ".tsv": "read_csv", ".xlsx": "read_excel", ".parquet": "read_parquet"}
_DELIMITERS = ",;\t"
"""A spreadsheet writes semicolons where the comma is a decimal sign, and tabs as Unicode text."""
_NUMBERED = re.compile(r"(?:segment|context|document|passage|chunk)[ _-]?(\d{1,4})", re.IGNORECASE)
"""Columns with one segment each."""
_FLAGS = {"": False, "0": False, "0.0": False, "false": False, "no": False} | dict.fromkeys(
    ("1", "1.0", "true", "yes"), True
)


def read_entries(path: Path) -> Entries:
    """Read the entries of a file or of a folder.

    Raises:
        InvalidQuestion: It cannot be read, or is in none of the formats.
        ExtraRequired: It is a table or a folder of `datasets`, and pandas or pyarrow is not installed.
    """
    parsers: dict[str, Callable[[str, Path], Entries]] = {
        ".jsonl": _parse_jsonl, ".json": _parse_document, ".yaml": _parse_document, ".yml": _parse_document
    }  # fmt: skip
    try:
        if path.is_dir():
            return _read_dataset(path)
        if not path.exists():
            raise InvalidQuestion(f"no such file: {path}", hint="")
        suffix = path.suffix.lower()
        if suffix not in {*parsers, *_TABLES}:
            known = ", ".join([*parsers, *_TABLES])
            raise InvalidQuestion(f"{path}: expected a file of {known}, or a folder of a saved dataset")
        content = read_bytes(path)
    except OSError as error:
        raise InvalidQuestion(f"{path}: cannot be read: {error.strerror or error}", hint="") from error
    if suffix in {".xlsx", ".parquet"}:
        return _of_table(_read_table(_TABLES[suffix], io.BytesIO(content), path), path)
    try:
        text = content.decode(detect_encoding(content))
    except UnicodeDecodeError as error:
        raise InvalidQuestion(f"{path}: cannot be read: {error}", hint="Save it as UTF-8.") from error
    return parsers.get(suffix, _parse_csv)(text, path)


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
    if len(entries) == 1 and isinstance(entries[0][1], Mapping):
        where, document = entries[0]
        return _numbered(rows_of(document, where), where)
    return entries


def _numbered(rows: list[Any], where: str) -> Entries:
    """Return the rows of a document with their places, if it has several."""
    return [(where if len(rows) == 1 else f"{where}, question {number}", row) for number, row in enumerate(rows, 1)]


def _parse_document(text: str, path: Path) -> Entries:
    """Parse a list of questions, or a configuration of promptfoo with its `tests`."""
    from invariant_rag.audit.yaml_files import parse_yaml

    try:
        document = parse_json(text) if path.suffix.lower() == ".json" else parse_yaml(text)
    except ValueError as error:
        raise InvalidQuestion(f"{path}: cannot be parsed: {error}") from error
    shared: Mapping[str, Any] = {}
    if isinstance(document, Mapping) and "tests" in document:
        default = document.get("defaultTest")
        shared = default.get("vars") or {} if isinstance(default, Mapping) else {}
        document = document["tests"]
    elif isinstance(document, Mapping):
        return _numbered(rows_of(document, str(path)), str(path))
    entries: Entries = []
    for number, each in enumerate(document if isinstance(document, list) else [document], start=1):
        if isinstance(each, str) and each.startswith("file://"):
            entries += read_entries(path.parent / each.removeprefix("file://"))
        elif isinstance(each, Mapping):
            variables = {**shared, **each["vars"]} if isinstance(each.get("vars"), Mapping) else None
            entries.append((f"{path}, test {number}", each if variables is None else {**each, "vars": variables}))
        else:
            raise InvalidQuestion(f"{path}, test {number}: expected a mapping, got {type(each).__name__}")
    return entries


def _parse_csv(text: str, path: Path) -> Entries:
    separator = max(_DELIMITERS, key=text.partition("\n")[0].count)
    options = {"sep": separator, "dtype": str, "keep_default_na": False, "index_col": False}
    return _of_table(_read_table("read_csv", io.StringIO(text), path, **options), path)


def _read_table(reader: str, source: Any, path: Path, **options: Any) -> Any:
    """Return a table of pandas.

    Raises:
        InvalidQuestion: It is none.
        ExtraRequired: pandas, or what it reads such a file with, is not installed.
    """
    try:
        import pandas as pd

        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row has more fields than there are columns
            return getattr(pd, reader)(source, **options)
    except ImportError as error:
        raise ExtraRequired(error.name or "pandas", "evaluation") from None
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, UserWarning, Warning) as error:
        raise InvalidQuestion(f"{path}: expected a table: {str(error)[:200]}") from error


def _of_table(table: Any, path: Path) -> Entries:
    """Return the rows of a table: one for each question, or one for each segment."""
    table.columns = columns = [column_name(str(each)) for each in table.columns]
    if not {*QUESTIONS} & {*columns}:
        raise InvalidQuestion(
            f"{path}: expected columns out of {', '.join(COLUMNS)}, with question; got {shown(columns)}",
            hint="A table has a row per segment (question,segment,gold,answer), or a row per question: question,"
            "context 1,context 2,answer, or question,contexts,answer with a JSON list of texts under contexts.",
        )
    rows = parse_json(table.to_json(orient="records", date_format="iso"))
    entries = [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]
    return _join_rows(entries) if "segment" in columns else [(where, _one_row(row)) for where, row in entries]


def _join_rows(rows: Entries) -> Entries:
    """Join the rows of one id (or question), which have a segment each."""
    entries: dict[str, tuple[str, dict[str, Any]]] = {}
    for where, cells in rows:
        row = {name: "" if cell is None else str(cell) for name, cell in cells.items()}
        _, entry = entries.setdefault(row.get("id") or row["question"], (where, {"segments": [], "answers": []}))
        answers = [each.strip() for each in row.get("answer", "").split("|") if each.strip()]
        entry["answers"] += [each for each in answers if each not in entry["answers"]]
        others = {name: cell for name, cell in row.items() if name not in COLUMNS and cell}
        for name, cell in {"id": row.get("id", ""), "question": row["question"], **others}.items():
            entry.setdefault(name, cell)
        if row["segment"]:
            gold, title = _parse_flag(row.get("gold", ""), where), row.get("title") or None
            score = _parse_number(row.get("score", ""), where)
            entry["segments"].append({"text": row["segment"], "title": title, "score": score, "gold": gold})
    return list(entries.values())


def _one_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row that is a whole question; cells with a list are read as one, as pandas or JSON writes it.

    >>> _one_row({"question": "Who?", "Context 2": "Bo.", "Context 1": "Ann."})
    {'question': 'Who?', 'segments': ['Ann.', 'Bo.']}
    """
    numbered = {int(found[1]): name for name in row if (found := _NUMBERED.fullmatch(name))}
    segments = [row[numbered[number]] for number in sorted(numbered) if row[numbered[number]]]
    taken = {*numbered.values()}
    others = {name: parse_list(cell) for name, cell in row.items() if cell not in ("", None) and name not in taken}
    return {**others, "segments": segments} if segments else others


def _parse_flag(cell: str, where: str) -> bool:
    if cell.strip().lower() not in _FLAGS:
        raise InvalidQuestion(f"{where}: expected 1 or 0, got {shown(cell)}")
    return _FLAGS[cell.strip().lower()]


def _parse_number(cell: str, where: str) -> float | None:
    try:
        return float(cell.replace(",", ".")) if cell.strip() else None
    except ValueError:
        raise InvalidQuestion(f"{where}: expected a number, got {shown(cell)}") from None


def _read_dataset(folder: Path) -> Entries:
    """Read a dataset that `save_to_disk` wrote, or Parquet files as a hub has them; of several splits, all."""
    arrow, parquet = (sorted(folder.rglob(pattern)) for pattern in ("*.arrow", "*.parquet"))
    if not arrow and not parquet:
        raise InvalidQuestion(f"{folder}: expected a folder with .arrow or .parquet files, got none")
    entries: Entries = []
    for path in arrow or parquet:
        entries += _of_table(_read_arrow(path) if arrow else _read_table("read_parquet", path, path), path)
    return entries


def _read_arrow(path: Path) -> Any:
    """Return the table of an Arrow stream, as `datasets` writes them."""
    try:
        import pyarrow as pa
        from pyarrow import ipc
    except ImportError:
        raise ExtraRequired("pyarrow", "evaluation") from None
    with path.open("rb") as file:
        try:
            return ipc.open_stream(file).read_pandas()
        except (OSError, pa.ArrowException) as error:
            raise InvalidQuestion(f"{path}: cannot be read: {error}") from error
