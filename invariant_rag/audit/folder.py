"""The folder of an audit: what was asked and of whom, and the answers, in a file of lines that a process continues."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import Any, Generic, TypeVar

from filelock import FileLock, Timeout

from invariant_rag.audit.calls import Answer
from invariant_rag.audit.questions import Question, read_questions
from invariant_rag.checks import check_path
from invariant_rag.errors import AuditFailed, FileInUse, UnusableFile
from invariant_rag.files import encode_json, make_folder, parse_json, read_bytes, write_file
from invariant_rag.shown import reason, shown

T = TypeVar("T")
RUN, ANSWERS, RESULT = "run.json", "answers.jsonl", "audit.json"

SCHEMA_VERSION = 1  # of `run.json` and `audit.json`; it changes with the meaning of a field


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


def open_answers(folder: Path) -> LineFile[Answer]:
    """Open the file of the answers of a run, but for calls that failed."""
    return LineFile(folder / ANSWERS, _parse_answer, AuditFailed)


def _parse_answer(line: Any, where: str) -> Answer:
    """Return an answer; somebody may have edited the file."""
    kinds = {"key": str, "text": str, "tokens": int | None, "seconds": int | float, "errors": list}
    fits = isinstance(line, dict) and line.keys() == kinds.keys()
    fits = fits and all(
        isinstance(line[name], kind) and not isinstance(line[name], bool) for name, kind in kinds.items()
    )
    if not fits or not all(isinstance(each, str) for each in line["errors"]):
        raise AuditFailed(f"{where}: expected an answer with {', '.join(kinds)}, got {shown(line)}")
    return Answer(**{**line, "errors": tuple(line["errors"])})


def make_new_folder(out: Any) -> Path:
    """Make the folder of a new run; raise `UnusableFile` where that fails, or one is there."""
    folder = make_folder(check_path("out", out))
    if (folder / RUN).exists() or (folder / ANSWERS).exists():
        hint = f"Continue it with resume (--resume {folder}), or name another folder: everything is asked anew."
        raise UnusableFile(f"{str(folder)!r} holds an audit already", hint=hint)
    return folder


def start_run(out: Any, run: dict[str, Any], questions: list[Question]) -> Path:
    """Make the folder of a new run, and write down what is asked and of whom."""
    folder = make_new_folder(out)
    document = {"schema_version": SCHEMA_VERSION, **run, "questions": [each.as_dict() for each in questions]}
    write_file(folder / RUN, encode_json(document, indent=1, default=str) + b"\n")
    return folder


def read_run(folder: Any) -> tuple[Path, dict[str, Any], list[Question]]:
    """Return the folder of a run that was begun, what it says, and its questions."""
    path = check_path("resume", folder)
    try:
        run = parse_json(read_bytes(path / RUN))
    except (OSError, ValueError) as error:
        raise AuditFailed(f"{path / RUN}: no audit: {reason(error)}", hint="Name the folder of an audit.") from error
    shape = {"system": str, "seed": int, "margin": float, "questions": list}
    fits = isinstance(run, dict) and all(isinstance(run.get(name), kind) for name, kind in shape.items())
    if not fits or run.get("schema_version") != SCHEMA_VERSION:
        raise AuditFailed(f"{path / RUN}: no audit of this version", hint="Audit once more, into another folder.")
    return path, run, read_questions(run["questions"], None)
