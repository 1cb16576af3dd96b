"""The answers of an audit, in memory and in `answers.jsonl`, from which an interrupted audit continues."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import TextIO

from invariant_rag.errors import AuditFailed


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
        seconds: Duration of the call.
    """

    key: str
    asker: str
    question: str
    order: tuple[int, ...]
    text: str
    tokens: int | None
    seconds: float


class AnswerStore:
    """Answers by key, in memory and, if it has a path, in an append-only .jsonl file.

    An answer is one line, written and flushed before the next call of its thread begins. A last line that was cut off
    when the process was killed is ignored, and the call is made again. Of two lines with one key, the first counts.
    Thread-safe; for one process at a time.

    Args:
        path: The file; created if it does not exist.

    Raises:
        AuditFailed: The file cannot be opened.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.answers: dict[str, StoredAnswer] = {}
        self._lock = Lock()
        self._file: TextIO | None = None
        if path is not None:
            try:
                cut_off = self._read(path) if path.exists() else False
                self._file = path.open("a", encoding="utf-8")
            except OSError as error:
                raise AuditFailed(f"{path}: cannot be opened: {error}", hint="Choose another folder.") from error
            if cut_off:
                self._file.write("\n")

    def _read(self, path: Path) -> bool:
        """Read the answers; return whether the last line has no line break."""
        content = path.read_bytes()
        for line in content.split(b"\n"):
            try:
                fields = json.loads(line)
                answer = StoredAnswer(**{**fields, "order": tuple(fields["order"])})
            except (ValueError, TypeError, KeyError):
                continue  # cut off: its call is made again
            self.answers.setdefault(answer.key, answer)
        return bool(content) and not content.endswith(b"\n")

    def add(self, answer: StoredAnswer) -> None:
        """Store an answer, unless its call is answered already."""
        with self._lock:
            if answer.key not in self.answers:
                self.answers[answer.key] = answer
                if self._file is not None:
                    self._file.write(json.dumps(asdict(answer)) + "\n")
                    self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
