"""The folder of an audit: what was asked and of whom, the answers, the result."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from invariant_rag.audit.calling import Answer
from invariant_rag.audit.line_file import LineFile
from invariant_rag.audit.questions import Question, read_questions
from invariant_rag.checks import check_path
from invariant_rag.errors import AuditFailed, UnusableFile
from invariant_rag.files import encode_json, make_folder, parse_json, read_bytes, write_file
from invariant_rag.shown import shown

SCHEMA_VERSION = 1
"""Of `run.json` and `audit.json`. It changes with the meaning of a field."""

RUN, ANSWERS, RESULT = "run.json", "answers.jsonl", "audit.json"


class AnswerFile:
    """The answers of a run, in memory and in `answers.jsonl`. A call that failed is not in the file: it is made again.

    Args:
        folder: The folder; None: memory only.

    Attributes:
        answers: What is known, by key.

    Raises:
        AuditFailed: A line is no answer.
        FileInUse: Another process writes the file.
        UnusableFile: The file cannot be opened.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else LineFile(folder / ANSWERS, _parse_answer, AuditFailed)
        known = [] if self._file is None else self._file.lines
        self.answers: dict[str, Answer] = {each.key: each for each in known}

    def add(self, answer: Answer) -> None:
        """Keep an answer.

        Raises:
            UnusableFile: It cannot be written.
        """
        self.answers[answer.key] = answer
        if self._file is not None and answer.text is not None:
            self._file.append([asdict(answer)])

    def close(self) -> None:
        """Close the file, and let other processes write it."""
        if self._file is not None:
            self._file.close()


def start_run(out: Any, run: dict[str, Any], questions: list[Question]) -> Path:
    """Make the folder of a new run, and write down what is asked and of whom.

    Raises:
        UnusableFile: It cannot be made, or holds a run already.
    """
    folder = check_path("out", out)
    make_folder(folder)
    if (folder / RUN).exists() or (folder / ANSWERS).exists():
        raise UnusableFile(
            f"{str(folder)!r} holds an audit already",
            hint=f"Continue it with resume (--resume {folder}), or name another folder: everything is asked anew.",
        )
    records = [each.as_dict() for each in questions]
    document = {"schema_version": SCHEMA_VERSION, **run, "questions": records}
    write_file(folder / RUN, encode_json(document, indent=1, default=str) + b"\n")
    return folder


def read_run(folder: Any) -> tuple[Path, dict[str, Any], list[Question]]:
    """Return the folder of a run that was begun, what it says, and its questions.

    Raises:
        AuditFailed: There is none, or it is not of this version.
    """
    path = check_path("resume", folder)
    run = _read(path / RUN, {"system": str, "seed": int, "margin": float, "questions": list})
    questions = read_questions(run["questions"], None)
    return path, run, questions


def read_result(folder: Path) -> dict[str, Any]:
    """Read the result of an audit from its folder, as plain data.

    Raises:
        AuditFailed: There is none, or it is not of this version.
    """
    return _read(folder / RESULT if folder.is_dir() else folder, {"system": str, "screen": dict, "questions": list})


def _read(path: Path, shape: dict[str, type]) -> dict[str, Any]:
    try:
        found = parse_json(read_bytes(path))
    except (OSError, ValueError, UnusableFile) as error:
        raise AuditFailed(f"{path}: no audit: {error}", hint="Name the folder of an audit.") from error
    fits = isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in shape.items())
    if not fits or found.get("schema_version") != SCHEMA_VERSION:
        raise AuditFailed(f"{path}: no audit of this version", hint="Audit once more, into another folder.")
    return dict(found)


def _parse_answer(line: Any, where: str) -> Answer:
    """Return an answer; somebody may have edited the file."""
    kinds = {"key": str, "text": str, "tokens": int | None, "seconds": int | float, "errors": list}
    if not isinstance(line, dict) or line.keys() != kinds.keys():
        raise AuditFailed(f"{where}: expected an answer with {', '.join(kinds)}, got {shown(line)}")
    for name, kind in kinds.items():
        if not isinstance(line[name], kind) or isinstance(line[name], bool):
            raise AuditFailed(f"{where}: {name}: got {shown(line[name])}")
    if not all(isinstance(each, str) for each in line["errors"]):
        raise AuditFailed(f"{where}: errors: expected texts, got {shown(line['errors'])}")
    return Answer(**{**line, "errors": tuple(line["errors"])})
