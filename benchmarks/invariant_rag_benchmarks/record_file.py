"""`records.jsonl`: the records of a run, one JSON line each, append-only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from invariant_rag.audit.line_file import LineFile
from invariant_rag.errors import InvalidDataset, InvalidRun
from pydantic import ConfigDict

from invariant_rag_benchmarks.base import Example, Record, Text, parse_example


class _Rejected(Example):
    answer: Text
    scores: dict[str, float]


class _Line(Example):
    """The fields of a record that reports read."""

    model_config = ConfigDict(strict=True)

    id: Text
    run: Text
    question: Text
    variant: Text
    group: Text
    output: Text
    answer: Text
    scores: dict[str, float]
    dropped: int
    trimmed: int
    perplexity: float | None = None
    collisions: float | None = None
    branch: str | None = None
    plain_confidence: float | None = None
    invariant_confidence: float | None = None
    logprobs: list[Any] | None = None
    gold: list[Any] | None = None
    prompt: dict[str, Any] | None = None
    rejected: _Rejected | None = None


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
        try:
            line = parse_example(_Line, record, where)
        except InvalidDataset as error:
            raise InvalidRun(str(error)) from None
        if line.run != self._key:
            raise InvalidRun(f"{where}: expected a record of run {self._key}, got one of {line.run!r}")
        parsed: Record = record
        return parsed
