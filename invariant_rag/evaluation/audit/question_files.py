"""Files of questions: lines of JSON, tables, YAML of promptfoo, and folders of Hugging Face `datasets`, as raw entries."""

from __future__ import annotations

import ast
import codecs
import io
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from invariant_rag.errors import ExtraRequired, InvalidQuestion
from invariant_rag.evaluation.audit.question_formats import column_name, rows_of
from invariant_rag.files import parse_json, read_bytes
from invariant_rag.shown import shown

Entries = list[tuple[str, Any]]
"""Where each entry is, such as `questions.jsonl, line 3`, and what it says."""

COLUMNS = ("id", "question", "segment", "title", "score", "gold", "answer", "pairwise")
"""Columns of a table with one row per segment; others are kept with the question."""

_DELIMITERS = ",;\t"
"""Of a .csv file: a spreadsheet writes semicolons where the comma is a decimal sign, and tabs as Unicode text."""
_QUESTION_COLUMNS = {"question", "user_input", "query"}
_NUMBERED = re.compile(r"(?:segment|context|document|passage|chunk)[ _-]?(\d{1,4})", re.IGNORECASE)
"""Columns with one segment each."""
_DECIMAL_COMMA = re.compile(r"\s*-?\d+,\d+\s*")
_BYTE_ORDER_MARKS = (  # that of UTF-32 begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_HINTS = {
    ".jsonl": InvalidQuestion.hint,
    ".json": 'A .json file is a list: [{"question": "...", "segments": ["...", ...], "answers": ["...", ...]}, ...].',
    ".csv": "A table has a row per segment (question,segment,score,gold,answer), or a row per question: "
    "question,context 1,context 2,answer, or question,contexts,answer with a JSON list of texts under contexts.",
    ".yaml": "A .yaml file is a list of questions with segments and answers, or a configuration of promptfoo.",
    "folder": "A row of a saved dataset has question, segments (or contexts: a list of texts), and answers.",
    "": "A question has question, segments (a list of texts), and may have answers and gold.",
}


_LIKE = {".yml": ".yaml", ".tsv": ".csv", ".xlsx": ".csv", ".parquet": ".csv"}


def hint_of(source: object) -> str:
    """Return how questions are written in a file of this kind, in a folder, or in Python."""
    if not isinstance(source, str | Path):
        return _HINTS[""]
    suffix = Path(source).suffix.lower() or "folder"
    return _HINTS.get(_LIKE.get(suffix, suffix), InvalidQuestion.hint)


def read_entries(path: Path) -> Entries:
    """Read the entries of a file or of a folder.

    Raises:
        InvalidQuestion: It cannot be read, or is in none of the formats.
        ExtraRequired: It is a folder of `datasets`, and pyarrow is not installed.
    """
    if _is_folder(path):
        return _read_dataset(path)
    parsers: dict[str, Callable[[str, Path], Entries]] = {
        ".jsonl": _parse_jsonl,
        ".json": _parse_document,
        ".csv": _parse_csv,
        ".tsv": _parse_csv,
        ".yaml": _parse_document,
        ".yml": _parse_document,
    }
    if not path.exists():
        raise InvalidQuestion(f"no such file: {path}", hint="")
    suffix = path.suffix.lower()
    tables = {".xlsx": "read_excel", ".parquet": "read_parquet"}
    if suffix not in {*parsers, *tables}:
        raise InvalidQuestion(
            f"{path}: expected a .jsonl, .json, .csv, .xlsx, .parquet or .yaml file, or a folder of a saved dataset"
        )
    try:
        content = read_bytes(path)
        if suffix in tables:
            return _of_table(_read_table(tables[suffix], io.BytesIO(content), path), path)
    except OSError as error:
        raise InvalidQuestion(f"{path}: cannot be read: {error.strerror or error}", hint="") from error
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS if content.startswith(mark)), "utf-8-sig")
    try:
        return parsers[suffix](content.decode(encoding), path)
    except UnicodeDecodeError as error:
        raise InvalidQuestion(f"{path}: cannot be read: {error}", hint="Save it as UTF-8.") from error


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:  # its name is too long
        raise InvalidQuestion(f"{path}: cannot be read: {error.strerror}") from error


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
    from invariant_rag.evaluation.audit.yaml_files import parse_yaml

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
    separator = _delimiter(text)
    table = _read_table(
        "read_csv", io.StringIO(text), path, sep=separator, dtype=str, keep_default_na=False, index_col=False
    )
    return _of_table(table, path, decimal_comma=separator != ",")


def _read_table(reader: str, source: Any, path: Path, **options: Any) -> Any:
    """Return a table of pandas.

    Raises:
        InvalidQuestion: It is none.
        ExtraRequired: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise ExtraRequired("pandas", "evaluation") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row has more fields than there are columns
            return getattr(pd, reader)(source, **options)
    except (pd.errors.ParserWarning, zipfile.BadZipFile, OSError, ValueError, KeyError) as error:
        raise InvalidQuestion(f"{path}: expected a table: {str(error)[:200]}") from error


def _of_table(table: Any, path: Path, *, decimal_comma: bool = False) -> Entries:
    """Return the rows of a table: one for each question, or one for each segment."""
    table.columns = [column_name(str(each)) for each in table.columns]
    columns = list(table.columns)
    if not _QUESTION_COLUMNS & {*columns}:
        raise InvalidQuestion(
            f"{path}: expected columns out of {', '.join(COLUMNS)}, with question; got {shown(columns)}"
        )
    rows = [(f"{path}, row {number}", row) for number, row in enumerate(_plain_rows(table), start=1)]
    torn = next((where for where, row in rows if row.get(columns[-1]) is None and "segment" in columns), None)
    if torn is not None and path.suffix.lower() in {".csv", ".tsv"}:
        raise InvalidQuestion(f"{torn}: expected {len(columns)} fields")
    if "segment" in columns:
        texts = [
            (where, {name: "" if each is None else str(each) for name, each in row.items()}) for where, row in rows
        ]
        return _join_rows(texts, decimal_comma=decimal_comma)
    return [(where, _one_row(row)) for where, row in rows]


def _plain_rows(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a table as plain data, without NaN."""
    found: list[dict[str, Any]] = parse_json(table.to_json(orient="records", date_format="iso"))
    return found


def _delimiter(text: str) -> str:
    """Return what separates the columns: the first that gives a column of questions, else what gives most columns."""
    header = text.partition("\n")[0].strip("\r")
    split = {each: [name.strip('"') for name in header.split(each)] for each in _DELIMITERS}
    known = (each for each, names in split.items() if _QUESTION_COLUMNS & {*map(column_name, names)})
    return next(known, max(split, key=lambda each: len(split[each])))


def _join_rows(rows: Iterable[tuple[str, dict[str, str]]], *, decimal_comma: bool) -> Entries:
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
                "score": _parse_number(row.get("score", ""), where, decimal_comma),
                "gold": _parse_bool(row.get("gold", ""), where),
            }
            entry["segments"].append(segment)
    return list(entries.values())


def _one_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row that is a whole question; cells with a list are read as one, as pandas or JSON writes it.

    >>> _one_row({"question": "Who?", "Context 2": "Bo.", "Context 1": "Ann."})
    {'question': 'Who?', 'segments': ['Ann.', 'Bo.']}
    """
    numbered = {int(found[1]): name for name in row if (found := _NUMBERED.fullmatch(name))}
    segments = [row[numbered[number]] for number in sorted(numbered) if row[numbered[number]]]
    taken = {*numbered.values()}
    others = {name: _parse_cell(cell) for name, cell in row.items() if cell not in ("", None) and name not in taken}
    return {**others, "segments": segments} if segments else others


def _parse_cell(cell: Any) -> Any:
    if not isinstance(cell, str) or not cell.strip().startswith("["):
        return cell
    for parse in (parse_json, ast.literal_eval):
        try:
            found = parse(cell)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # TypeError: a list as a key
            continue
        if isinstance(found, list):
            return found
    return cell


def _parse_bool(cell: str, where: str) -> bool:
    values = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
    if cell.strip().lower() not in values:
        raise InvalidQuestion(f"{where}: expected 1 or 0, got {shown(cell)}")
    return values[cell.strip().lower()]


def _parse_number(cell: str, where: str, decimal_comma: bool) -> float | None:
    number = cell.replace(",", ".") if decimal_comma and _DECIMAL_COMMA.fullmatch(cell) else cell
    try:
        return float(number) if cell.strip() else None
    except ValueError:
        raise InvalidQuestion(f"{where}: expected a number, got {cell!r}") from None


def _read_dataset(folder: Path) -> Entries:
    """Read a dataset that `save_to_disk` wrote, or Parquet files as a hub has them; of several splits, all."""
    arrow, parquet = (sorted(folder.rglob(pattern)) for pattern in ("*.arrow", "*.parquet"))
    if not arrow and not parquet:
        raise InvalidQuestion(f"{folder}: expected a folder with .arrow or .parquet files, got none")
    entries: Entries = []
    for path in arrow or parquet:
        table = _read_arrow(path) if arrow else _read_table("read_parquet", path, path)
        entries += _of_table(table, path)
    return entries


def _read_arrow(path: Path) -> Any:
    """Return the table of an Arrow file: `datasets` writes streams."""
    try:
        import pyarrow as pa
        from pyarrow import ipc
    except ImportError:
        raise ExtraRequired("pyarrow", "evaluation") from None
    with path.open("rb") as file:
        try:
            try:
                return ipc.open_stream(file).read_pandas()
            except pa.ArrowInvalid:
                file.seek(0)
                return ipc.open_file(file).read_pandas()
        except (OSError, pa.ArrowException) as error:
            raise InvalidQuestion(f"{path}: cannot be read: {error}") from error
