"""The answers of an audit, in memory and in `answers.jsonl`, from which an interrupted audit continues."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from threading import Lock
from typing import Any

from invariant_rag.errors import AuditFailed
from invariant_rag.evaluation.line_file import LineFile


@dataclass(frozen=True)
class StoredAnswer:
    """The answer to one call.

    Attributes:
        key: `Call.key`.
        asker: Name of the function that was called.
        question: Id of the question.
        order: Order in which the segments were listed.
        text: The answer.
        tokens: Prompt and completion tokens, if known.
        seconds: Duration of the call, pauses between tries included.
        date: When it was answered, in UTC; "" if unknown.
        errors: Class and message of the error of each try that failed before it.
    """

    key: str
    asker: str
    question: str
    order: tuple[int, ...]
    text: str
    tokens: int | None
    seconds: float
    date: str = ""
    errors: tuple[str, ...] = ()


class AnswerStore:
    """Answers by key, in memory and, if it has a path, in an append-only .jsonl file.

    An answer is one line, written before the next call of its thread begins. A last line that was cut off when the
    process was killed is removed, and the call is made again. Of two lines with one key, the first counts. Thread-safe;
    a second process is refused.

    Args:
        path: The file; created if it does not exist.
        writes: Whether answers are added to the file; else nothing is written, and another process may write it.

    Raises:
        AuditFailed: A line is no answer.
        FileInUse: Another process writes the file.
        UnusableFile: The file cannot be opened.
    """

    def __init__(self, path: Path | None = None, *, writes: bool = True) -> None:
        self.answers: dict[str, StoredAnswer] = {}
        self._lock = Lock()
        self._file = None if path is None else LineFile(path, _parse_answer, _unreadable, writes=writes)
        for answer in [] if self._file is None else self._file.lines:
            self.answers.setdefault(answer.key, answer)

    def add(self, answer: StoredAnswer) -> None:
        """Store an answer, unless its call is answered already.

        Raises:
            UnusableFile: It cannot be written.
        """
        with self._lock:
            if answer.key not in self.answers:
                if self._file is not None:
                    self._file.append([asdict(answer)])
                self.answers[answer.key] = answer

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _parse_answer(line: Any, where: str) -> StoredAnswer:
    names = {each.name for each in fields(StoredAnswer)}
    if not isinstance(line, dict) or {*line, "date", "errors"} != names:
        raise _unreadable(f"{where}: expected an object with {', '.join(sorted(names))}")
    order, tokens, seconds, errors = line["order"], line["tokens"], line["seconds"], line.get("errors", [])
    whole = [*order, *([] if tokens is None else [tokens])] if isinstance(order, list) else [None]
    if (
        not all(isinstance(line[name], str) for name in ("key", "asker", "question", "text"))
        or not isinstance(line.get("date", ""), str)
        or not (isinstance(errors, list) and all(isinstance(each, str) for each in errors))
        or not all(isinstance(each, int) and not isinstance(each, bool) for each in whole)
        or not isinstance(seconds, int | float)
        or isinstance(seconds, bool)
    ):
        raise _unreadable(f"{where}: a field of the answer has the wrong type")
    return StoredAnswer(**{**line, "order": tuple(order), "errors": tuple(errors)})


def _unreadable(message: str) -> AuditFailed:
    return AuditFailed(message, hint="Remove the line, and its call is made again; or choose another folder.")
