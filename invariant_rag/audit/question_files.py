"""Files of questions as records: lines, documents and tables, of any tool."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Mapping
from json import detect_encoding
from pathlib import Path
from typing import Any

from invariant_rag.audit.records import KNOWN, QUESTION_FIELDS, Entries, parse_list
from invariant_rag.errors import ExtraRequired, InvalidQuestion
from invariant_rag.files import parse_json, read_bytes
from invariant_rag.shown import reason

_SUFFIXES = (".jsonl", ".json", ".yaml", ".yml", ".csv", ".tsv", ".xlsx", ".parquet")


def read_entries(path: Path) -> Entries:
    """Read the entries of a file."""
    suffix = path.suffix.lower()
    try:
        if not path.exists():
            raise InvalidQuestion(f"no such file: {path}", hint="")
        if suffix not in _SUFFIXES:
            raise InvalidQuestion(f"{path}: expected a file of {', '.join(_SUFFIXES)}")
        content = read_bytes(path)
        if suffix in {".xlsx", ".parquet"}:
            return _read_table(io.BytesIO(content), path)
        text = content.decode(detect_encoding(content))
    except (OSError, UnicodeDecodeError) as error:
        hint = "Save it as UTF-8." if isinstance(error, UnicodeDecodeError) else ""
        raise InvalidQuestion(f"{path}: cannot be read: {reason(error)}", hint=hint) from error
    if suffix in {".csv", ".tsv"}:
        return _read_table(io.StringIO(text), path, max(",;\t", key=text.partition("\n")[0].count))
    return _parse_jsonl(text, path) if suffix == ".jsonl" else _parse_document(text, path)


def _parse_jsonl(text: str, path: Path) -> Entries:
    entries: Entries = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            entries += [(f"{path}, line {number}", parse_json(line))] if line.strip() else []
        except ValueError as error:
            hint = "If the file is one document of JSON, over several lines, name it .json." if number == 1 else None
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
        default, document = document.get("defaultTest"), document["tests"]
        shared = default.get("vars") or {} if isinstance(default, Mapping) else {}
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
    """Return the rows of a table, read by pandas; cells with a list, as pandas or JSON writes it, are one."""
    try:
        import pandas as pd

        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row has more fields than there are columns
            if separator:
                table = pd.read_csv(source, sep=separator, dtype=str, keep_default_na=False, index_col=False)
            else:
                table = (pd.read_excel if path.suffix.lower() == ".xlsx" else pd.read_parquet)(source)
        names = [str(each).strip() for each in table.columns]
        table.columns = [name.lower() if name.lower() in KNOWN else name for name in names]
        rows = parse_json(table.to_json(orient="records", date_format="iso"))
    except ImportError as error:
        raise ExtraRequired(error.name or "pandas", "evaluation") from None
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, Warning) as error:
        raise InvalidQuestion(f"{path}: expected a table: {str(error)[:200]}") from error
    return [
        (f"{path}, row {number}", {name: parse_list(cell) for name, cell in row.items() if cell not in ("", None)})
        for number, row in enumerate(rows, start=1)
    ]


def _rows_of(document: Mapping[str, Any], path: Path) -> list[Any]:
    """Return the records of a document: columns as ragas and pandas write them, its one list of records, or itself."""
    first = next((document[name] for name in QUESTION_FIELDS if name in document), None)
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
