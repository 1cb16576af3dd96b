"""Files that people name, read and written, and JSON: only typed or documented errors come out."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from filelock import FileLock, Timeout

from invariant_rag.errors import FileInUse, UnusableFile
from invariant_rag.shown import reason

T = TypeVar("T")
MAX_DEPTH = 100
"""Deepest nesting of JSON that is read: what comes after, such as sort keys of metadata, recurses too."""


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file; raise `OSError` for others: a named pipe would make it wait for ever."""
    check_regular(path)
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """Raise `OSError` for what is no regular file."""
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # a null character in the path
        raise OSError(f"no path of a file: {error}") from error
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
        raise OSError(f"expected a file, got {kinds.get(stat.S_IFMT(mode), 'a device')}")


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    """Parse JSON; raise ValueError for what is none, is nested too deeply, or holds a number with thousands of digits.

    With `finite`, NaN and Infinity, which Python writes and JSON does not know, are refused.
    """
    try:
        document = json.loads(text, parse_constant=_refuse_constant if finite else None)
    except RecursionError:
        raise ValueError(f"expected JSON nested at most {MAX_DEPTH} deep, got far more") from None
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > MAX_DEPTH:  # type: ignore[arg-type]
        _check_depth(document)
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"expected JSON, which has no {name}")


def _check_depth(document: Any) -> None:
    level = [document]
    for _ in range(MAX_DEPTH + 1):
        below = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [inner for each in below for inner in each]
        if not level:
            return
    raise ValueError(f"expected JSON nested at most {MAX_DEPTH} deep, got more")


def encode_json(document: Any, *, indent: int | None = None, default: Any = None) -> bytes:
    r"""Return JSON as UTF-8. Half of a surrogate pair, which UTF-8 cannot hold, is written as its escape.

    >>> encode_json({"a": "\u00e9 \ud800"}).decode()
    '{"a": "é \\ud800"}'
    """
    return json.dumps(document, indent=indent, ensure_ascii=False, default=default).encode("utf-8", "backslashreplace")


def finite(document: Any) -> Any:
    """Return plain data with None for NaN and infinities, which JSON does not have, though Python writes them."""
    if isinstance(document, dict):
        return {key: finite(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [finite(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document


def make_folder(folder: Path, mode: int = 0o777) -> Path:
    """Create a folder for output, if it does not exist, and return it; raise `UnusableFile` where that fails."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UnusableFile(
            f"cannot make the folder {str(folder)!r}: {reason(error)}", hint="Choose another folder (--out)."
        ) from error
    return folder


def write_file(path: Path, content: bytes) -> None:
    """Write a file as a whole, or raise `UnusableFile`: a killed process, or a full disk, leaves the one before it."""
    partial = path.parent / f"{path.name}.{os.getpid()}.part"
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            partial.unlink(missing_ok=True)
        raise UnusableFile(f"cannot write {str(path)!r}: {reason(error)}") from error


class LineFile(AbstractContextManager["LineFile[T]"], Generic[T]):
    """An append-only file of JSON objects, one line each: one writer at a time, and no line is lost, doubled or torn.

    A process that is killed can tear the last line only, and opening the file removes it, so that what it held is made
    again. A full disk leaves the file as it was before the lines that it had no room for.

    Args:
        path: The file; the lock of who writes it is `PATH.lock`.
        parse: Turns a parsed line and its place, such as `records.jsonl, line 3`, into what `lines` then holds.
        invalid: Makes the error for a line that is no JSON, from a message.
    """

    def __init__(self, path: Path, parse: Callable[[Any, str], T], invalid: Callable[[str], Exception]) -> None:
        self.lines: list[T] = []
        self._path = path
        self._file: FileIO | None = None
        self._lock = FileLock(f"{path}.lock", thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise FileInUse(f"{str(path)!r} is being written by another process") from None
        except (OSError, NotImplementedError) as error:
            raise UnusableFile(f"{str(path)!r} cannot be locked: {reason(error)}") from error
        try:
            content = read_bytes(path) if path.exists() else b""
            self._size = content.rfind(b"\n") + 1
            for number, line in enumerate(content[: self._size].split(b"\n")[:-1], start=1):
                where = f"{path}, line {number}"
                try:
                    document = parse_json(line)
                except ValueError as error:
                    raise invalid(f"{where}: expected JSON, got {line[:60]!r}: {error}") from error
                self.lines.append(parse(document, where))
            self._file = path.open("ab", buffering=0)
            self._file.truncate(self._size)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise UnusableFile(f"{str(path)!r} cannot be opened: {reason(error)}") from error
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
            hint = "What was written before is kept: continue it."
            raise UnusableFile(f"{str(self._path)!r} cannot be written: {reason(error)}", hint=hint) from error
        self._size = size

    def close(self) -> None:
        """Close the file, and let other processes write it."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.close()
