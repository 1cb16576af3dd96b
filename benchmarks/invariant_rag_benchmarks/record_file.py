"""`records.jsonl`: the records of a run, one JSON line each, append-only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from invariant_rag.errors import InvalidRun
from invariant_rag.evaluation.line_file import LineFile

from invariant_rag_benchmarks.base import Record

_NUMBER = (int, float)
_REQUIRED: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("id", "run", "question", "variant", "group", "output", "answer"), str),
    **dict.fromkeys(("dropped", "trimmed"), int),
    "scores": dict,
}
_OPTIONAL: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("perplexity", "collisions", "plain_confidence", "invariant_confidence"), _NUMBER),
    "branch": str,
    **dict.fromkeys(("logprobs", "gold"), list),
    **dict.fromkeys(("rejected", "prompt"), dict),
}


class RecordFile:
    """The records of a run, open for appending.

    Existing records are read when the file is opened. An incomplete last line is removed, and its case is run again.

    Args:
        path: The file; created if it does not exist.
        key: Key of the run's config, written into every record.
        writes: Whether to write records; else they are only kept in memory, because another process writes them.

    Attributes:
        records: The records by id.

    Raises:
        InvalidRun: A line other than the last cannot be read, is no record, or belongs to another config.
        FileInUse: Another process continues the run.
        UnusableFile: The file cannot be opened.
    """

    def __init__(self, path: Path, key: str, *, writes: bool = True) -> None:
        self.records: dict[str, Record] = {}
        self._key = key
        self._file = LineFile(path, self._check, InvalidRun, writes=writes)
        for record in self._file.lines:
            self.records.setdefault(record["id"], record)

    def append(self, records: Iterable[Record]) -> None:
        """Append records, all or none of them.

        Raises:
            UnusableFile: They cannot be written.
        """
        kept = [{**record, "run": self._key} for record in records]
        self._file.append(kept)
        self.records.update((record["id"], record) for record in kept)

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def _check(self, record: Any, where: str) -> Record:
        if not isinstance(record, dict):
            raise InvalidRun(f"{where}: expected a record, got {type(record).__name__}")
        if missing := [name for name in _REQUIRED if name not in record]:
            raise InvalidRun(f"{where}: expected a record with {', '.join(missing)}")
        if record["run"] != self._key:
            raise InvalidRun(f"{where}: expected a record of run {self._key}, got one of {record['run']!r}")
        rejected = record.get("rejected", {"answer": "", "scores": {}})
        nested = isinstance(rejected, dict) and isinstance(rejected.get("answer"), str)
        wrong = [
            name
            for name, wanted in {**_REQUIRED, **_OPTIONAL}.items()
            if name in record and (not isinstance(record[name], wanted) or isinstance(record[name], bool))
        ]
        if not wrong and not (nested and _are_scores(record["scores"]) and _are_scores(rejected.get("scores"))):
            wrong = ["scores"]
        if wrong:
            raise InvalidRun(f"{where}: the type of {', '.join(wrong)} is none that a record has there")
        return record


def _are_scores(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in value.values()
    )
