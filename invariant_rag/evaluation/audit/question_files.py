"""Files of questions: lines of JSON, CSV, YAML of promptfoo, and folders of Hugging Face `datasets`, as raw entries."""

from __future__ import annotations

import ast
import csv
import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from invariant_rag.errors import ExtraRequired, InvalidQuestion
from invariant_rag.files import parse_json, read_bytes
from invariant_rag.shown import shown

Entries = list[tuple[str, Any]]
"""Where each entry is, such as `questions.jsonl, line 3`, and what it says."""

COLUMNS = ("id", "question", "segment", "title", "score", "gold", "answer", "pairwise")
"""Columns of a .csv file with one row per segment; others are kept with the question."""


def read_entries(path: Path) -> Entries:
    """Read the entries of a file or of a folder.

    Raises:
        InvalidQuestion: It cannot be read, or is in none of the formats.
        ExtraRequired: It is a folder of `datasets`, and pyarrow is not installed.
    """
    if path.is_dir():
        return _read_dataset(path)
    parsers: dict[str, Callable[[str, Path], Entries]] = {
        ".jsonl": _parse_jsonl,
        ".json": _parse_document,
        ".csv": _parse_csv,
        ".yaml": _parse_document,
        ".yml": _parse_document,
    }
    if path.suffix not in parsers:
        raise InvalidQuestion(f"{path}: expected a .jsonl, .json, .csv or .yaml file, or a folder of a saved dataset")
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidQuestion(f"{path}: cannot be read: {error}") from error
    return parsers[path.suffix](text, path)


def _parse_jsonl(text: str, path: Path) -> Entries:
    entries = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                entries.append((f"{path}, line {number}", parse_json(line)))
            except ValueError as error:
                raise InvalidQuestion(f"{path}, line {number}: expected JSON: {error}") from error
    return entries


def _parse_document(text: str, path: Path) -> Entries:
    """Parse a list of questions, or a configuration of promptfoo with its `tests`."""
    import yaml

    try:
        document = parse_json(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise InvalidQuestion(f"{path}: cannot be parsed: {error}") from error
    shared: Mapping[str, Any] = {}
    if isinstance(document, Mapping) and "tests" in document:
        default = document.get("defaultTest")
        shared = default.get("vars") or {} if isinstance(default, Mapping) else {}
        document = document["tests"]
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
    limit = csv.field_size_limit(max(len(text), csv.field_size_limit()))  # a segment may be long
    try:
        rows = csv.DictReader(io.StringIO(text, newline=""))
        columns = list(rows.fieldnames or ())
        numbered = list(_numbered_rows(rows, path, len(columns)))
    except csv.Error as error:
        raise InvalidQuestion(f"{path}: expected CSV: {error}") from error
    finally:
        csv.field_size_limit(limit)
    if "question" not in columns and not {"user_input", "query"} & {*columns}:
        raise InvalidQuestion(
            f"{path}: expected columns out of {', '.join(COLUMNS)}, with question; got {shown(columns)}"
        )
    if "segment" in columns:
        return _join_rows(numbered)
    return [(where, _one_row(row)) for where, row in numbered]


def _numbered_rows(rows: csv.DictReader[str], path: Path, columns: int) -> Iterable[tuple[str, dict[str, str]]]:
    """Yield rows with the line where each begins: a cell may go over several lines."""
    start = rows.line_num + 1
    for row in rows:
        where = f"{path}, line {start}"
        if None in row or None in row.values():
            raise InvalidQuestion(f"{where}: expected {columns} fields")
        yield where, row
        start = rows.line_num + 1


def _join_rows(rows: Iterable[tuple[str, dict[str, str]]]) -> Entries:
    """Join the rows of one id (or question), which have a segment each."""
    entries: dict[str, tuple[str, dict[str, Any]]] = {}
    for where, row in rows:
        _, entry = entries.setdefault(row.get("id") or row["question"], (where, {"segments": [], "answers": []}))
        answers = [each.strip() for each in row.get("answer", "").split("|") if each.strip()]
        entry["answers"] += [each for each in answers if each not in entry["answers"]]
        entry["pairwise"] = entry.get("pairwise", False) or _parse_bool(row.get("pairwise", ""), where)
        others = {name: cell for name, cell in row.items() if name not in COLUMNS and cell}
        for name, cell in {"id": row.get("id", ""), "question": row["question"], **others}.items():
            entry.setdefault(name, cell)
        if row.get("segment"):
            segment = {
                "text": row["segment"],
                "title": row.get("title") or None,
                "score": _parse_number(row.get("score", ""), where),
                "gold": _parse_bool(row.get("gold", ""), where),
            }
            entry["segments"].append(segment)
    return list(entries.values())


def _one_row(row: Mapping[str, str]) -> dict[str, Any]:
    """Return a row that is a whole question; cells with a list are read as one, as pandas or JSON writes it."""
    return {name: _parse_cell(cell) for name, cell in row.items() if cell != ""}


def _parse_cell(cell: str) -> Any:
    if not cell.strip().startswith("["):
        return cell
    for parse in (parse_json, ast.literal_eval):
        try:
            found = parse(cell)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(found, list):
            return found
    return cell


def _parse_bool(cell: str, where: str) -> bool:
    values = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
    if cell.strip().lower() not in values:
        raise InvalidQuestion(f"{where}: expected 1 or 0, got {shown(cell)}")
    return values[cell.strip().lower()]


def _parse_number(cell: str, where: str) -> float | None:
    try:
        return float(cell) if cell.strip() else None
    except ValueError:
        raise InvalidQuestion(f"{where}: expected a number, got {cell!r}") from None


def _read_dataset(folder: Path) -> Entries:
    """Read a dataset that `save_to_disk` wrote, or Parquet files as a hub has them; of several splits, all."""
    arrow, parquet = (sorted(folder.rglob(pattern)) for pattern in ("*.arrow", "*.parquet"))
    if not arrow and not parquet:
        raise InvalidQuestion(f"{folder}: expected a folder with .arrow or .parquet files, got none")
    try:
        import pyarrow as pa
        from pyarrow import parquet as parquet_files
    except ImportError:
        raise ExtraRequired("pyarrow", "benchmarks") from None
    entries: Entries = []
    for path in arrow or parquet:
        try:
            table = parquet_files.read_table(path) if not arrow else _read_arrow(path)
        except (OSError, pa.ArrowException) as error:
            raise InvalidQuestion(f"{path}: cannot be read: {error}") from error
        entries += [(f"{path}, row {number}", row) for number, row in enumerate(table.to_pylist(), start=1)]
    return entries


def _read_arrow(path: Path) -> Any:
    """Return the table of an Arrow file: `datasets` writes streams."""
    import pyarrow as pa
    from pyarrow import ipc

    with path.open("rb") as file:
        try:
            return ipc.open_stream(file).read_all()
        except pa.ArrowInvalid:
            file.seek(0)
            return ipc.open_file(file).read_all()
