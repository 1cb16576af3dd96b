"""A file of JSON lines that a process continues: one writer at a time, and no line is lost, doubled or torn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from filelock import FileLock, Timeout

from invariant_rag.errors import FileInUse, UnusableFile
from invariant_rag.files import encode_json, parse_json, read_bytes

T = TypeVar("T")


class LineFile(Generic[T]):
    """An append-only file of JSON objects, one line each.

    A process that is killed can tear the last line only. Opening the file removes a torn line, so that what it held is
    made again. A full disk leaves the file as it was before the lines that it had no room for.

    Args:
        path: The file; created when it is opened for writing.
        parse: Turns a parsed line and its place, such as `records.jsonl, line 3`, into what `lines` holds.
        invalid: Makes the error for a line that is no JSON, from a message.
        writes: Whether to append; else the file is only read, because another process writes it. One process at a time
            may write: it holds the lock `PATH.lock`.

    Attributes:
        lines: What was in the file.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[Any, str], T],
        invalid: Callable[[str], Exception],
        *,
        writes: bool = True,
    ) -> None:
        self.lines: list[T] = []
        self._path = path
        self._file: FileIO | None = None
        self._size = 0
        self._lock = _lock(path) if writes else None
        try:
            content = read_bytes(path) if path.exists() else b""
            self._size = content.rfind(b"\n") + 1
            for number, line in enumerate(content[: self._size].split(b"\n")[:-1], start=1):
                where = f"{path}, line {number}"
                self.lines.append(parse(_parse_line(line, where, invalid), where))
            if writes:
                self._file = path.open("ab", buffering=0)
                self._file.truncate(self._size)
        except OSError as error:
            self.close()
            raise UnusableFile(f"{str(path)!r} cannot be opened: {error}") from error
        except BaseException:
            self.close()
            raise

    def append(self, documents: Iterable[Any]) -> None:
        """Append lines, all or none of them."""
        if self._file is None:
            return
        content = memoryview(b"".join(encode_json(each) + b"\n" for each in documents))
        size = self._size + len(content)
        try:
            while content:
                content = content[self._file.write(content) :]
        except OSError as error:
            self._file.truncate(self._size)
            raise UnusableFile(
                f"{str(self._path)!r} cannot be written: {error}",
                hint="What was written before is kept: continue it.",
            ) from error
        self._size = size

    def close(self) -> None:
        """Close the file, and let other processes write it."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _lock(path: Path) -> FileLock:
    """Return the lock of a file, held by this process."""
    lock = FileLock(f"{path}.lock", thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FileInUse(f"{str(path)!r} is being written by another process") from None
    except (OSError, NotImplementedError) as error:
        raise UnusableFile(f"{str(path)!r} cannot be locked: {error}") from error
    return lock


def _parse_line(line: bytes, where: str, invalid: Callable[[str], Exception]) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        raise invalid(f"{where}: expected JSON, got {line[:60]!r}: {error}") from error
