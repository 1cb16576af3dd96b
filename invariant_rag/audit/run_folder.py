"""The folder of an audit: what was asked and of whom, and the answers, in a file of lines that a process continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from invariant_rag.audit.calls import CallResult
from invariant_rag.audit.questions import Question, read_questions
from invariant_rag.checks import check_path
from invariant_rag.errors import AuditFailed, UnusableFile
from invariant_rag.files import LineFile, make_folder, parse_json, read_bytes
from invariant_rag.shown import reason, shown

RUN, ANSWERS, RESULT = "run.json", "answers.jsonl", "audit.json"
SCHEMA_VERSION = 1  # of `run.json` and `audit.json`; it changes with the meaning of a field


def open_answers(folder: Path) -> LineFile[CallResult]:
    """Open the file of the answers of a run, but for calls that failed."""
    return LineFile(folder / ANSWERS, _parse_answer, AuditFailed)


def _parse_answer(line: Any, where: str) -> CallResult:
    """Return an answer; somebody may have edited the file."""
    kinds = dict[str, set[type]](key={str}, text={str}, tokens={int, type(None)}, seconds={int, float}, errors={list})
    fits = isinstance(line, dict) and line.keys() == kinds.keys()
    fits = fits and all(type(line[name]) in kind for name, kind in kinds.items())
    if not fits or not all(isinstance(each, str) for each in line["errors"]):
        raise AuditFailed(f"{where}: expected an answer with {', '.join(kinds)}, got {shown(line)}")
    return CallResult(**{**line, "errors": tuple(line["errors"])})


def make_new_folder(out: Any) -> Path:
    """Make the folder of a new run; raise `UnusableFile` where that fails, or one is there."""
    folder = make_folder(check_path("out", out))
    if (folder / RUN).exists() or (folder / ANSWERS).exists():
        hint = f"Continue it with resume (--resume {folder}), or name another folder: everything is asked anew."
        raise UnusableFile(f"{str(folder)!r} holds an audit already", hint=hint)
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
