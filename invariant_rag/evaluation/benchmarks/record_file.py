"""`records.jsonl`: the records of a run, one JSON line each, append-only.

A process that is killed can cut off the last line only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from invariant_rag.errors import InvalidRun
from invariant_rag.evaluation.benchmarks.base import Record


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
        InvalidRun: A line other than the last cannot be read, or belongs to another config.
    """

    def __init__(self, path: Path, key: str, *, writes: bool = True) -> None:
        self.records: dict[str, Record] = {}
        self._key = key
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            record = self._read(line, f"{path}, line {number}")
            self.records.setdefault(record["id"], record)
        self._file = path.open("ab", buffering=0) if writes else None
        if self._file:
            self._file.truncate(len(whole))

    def append(self, records: Iterable[Record]) -> None:
        """Append records with a single write."""
        lines = []
        for record in records:
            kept = {**record, "run": self._key}
            self.records[kept["id"]] = kept
            lines.append(json.dumps(kept, ensure_ascii=False))
        if self._file:
            self._file.write("".join(f"{line}\n" for line in lines).encode())

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file:
            os.fsync(self._file.fileno())
            self._file.close()

    def _read(self, line: bytes, where: str) -> Record:
        try:
            record: Record = json.loads(line)
            if record["run"] != self._key:
                raise InvalidRun(f"{where}: expected a record of run {self._key}, got one of {record['run']}")
            record["id"]
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InvalidRun):
                raise
            raise InvalidRun(f"{where}: not a record: {error!r}") from error
        return record
