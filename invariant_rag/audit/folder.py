"""The folder of an audit: what was asked and of whom, the answers, the result; and two results compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from invariant_rag.audit.calling import Answer
from invariant_rag.audit.line_file import LineFile
from invariant_rag.audit.questions import Question, read_questions
from invariant_rag.audit.result import SCHEMA_VERSION
from invariant_rag.audit.statistics import Estimate, mean_difference, mean_interval, paired_p_value
from invariant_rag.checks import check_path
from invariant_rag.errors import AuditFailed, UnusableFile
from invariant_rag.files import encode_json, make_folder, parse_json, read_bytes, write_file
from invariant_rag.shown import reason, shown

RUN, ANSWERS, RESULT = "run.json", "answers.jsonl", "audit.json"


class AnswerFile:
    """The answers of a run, in memory and in `answers.jsonl`. A call that failed is not in the file: it is made again.

    Args:
        folder: The folder; None: memory only.

    Attributes:
        answers: What is known, by key.
    """

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else LineFile(folder / ANSWERS, _parse_answer, AuditFailed)
        known = [] if self._file is None else self._file.lines
        self.answers: dict[str, Answer] = {each.key: each for each in known}

    def add(self, answer: Answer) -> None:
        """Keep an answer."""
        self.answers[answer.key] = answer
        if self._file is not None and answer.text is not None:
            self._file.append([asdict(answer)])

    def close(self) -> None:
        """Close the file, and let other processes write it."""
        if self._file is not None:
            self._file.close()


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


def make_new_folder(out: Any) -> Path:
    """Make the folder of a new run; raise `UnusableFile` where that fails, or one is there."""
    folder = make_folder(check_path("out", out))
    if (folder / RUN).exists() or (folder / ANSWERS).exists():
        raise UnusableFile(
            f"{str(folder)!r} holds an audit already",
            hint=f"Continue it with resume (--resume {folder}), or name another folder: everything is asked anew.",
        )
    return folder


def start_run(out: Any, run: dict[str, Any], questions: list[Question]) -> Path:
    """Make the folder of a new run, and write down what is asked and of whom."""
    folder = make_new_folder(out)
    records = [each.as_dict() for each in questions]
    document = {"schema_version": SCHEMA_VERSION, **run, "questions": records}
    write_file(folder / RUN, encode_json(document, indent=1, default=str) + b"\n")
    return folder


def read_run(folder: Any) -> tuple[Path, dict[str, Any], list[Question]]:
    """Return the folder of a run that was begun, what it says, and its questions."""
    path = check_path("resume", folder)
    run = _read(path / RUN, {"system": str, "seed": int, "margin": float, "questions": list})
    return path, run, read_questions(run["questions"], None)


def _read(path: Path, shape: dict[str, type]) -> dict[str, Any]:
    try:
        found = parse_json(read_bytes(path))
    except (OSError, ValueError, UnusableFile) as error:
        raise AuditFailed(f"{path}: no audit: {reason(error)}", hint="Name the folder of an audit.") from error
    fits = isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in shape.items())
    if not fits or found.get("schema_version") != SCHEMA_VERSION:
        raise AuditFailed(f"{path}: no audit of this version", hint="Audit once more, into another folder.")
    return dict(found)


@dataclass(frozen=True)
class AuditDiff:
    """Two audits compared on the questions of both.

    Attributes:
        before: Name of the first system.
        after: Name of the second.
        common: Questions that both asked, with gold answers.
        accuracy: Accuracy today of both, on these questions.
        gain: That of the second minus that of the first.
        p: Two-tailed p-value of the gain.
        fixed: Questions that are right now in every call of today, and wrong before.
        broken: Questions that are wrong now, and right before.
    """

    before: str
    after: str
    common: int
    accuracy: tuple[Estimate, Estimate]
    gain: Estimate
    p: float
    fixed: list[str]
    broken: list[str]


def diff_audits(before: Path, after: Path) -> AuditDiff:
    """Compare two audits, by their folders: accuracy today, over distinct draws of it."""
    results = [
        _read(each / RESULT if each.is_dir() else each, {"system": str, "screen": dict, "questions": list})
        for each in (before, after)
    ]
    shares = [
        {(str(one.get("id")), str(one.get("question"))): share for one in found["questions"] if (share := _share(one))}
        for found in results
    ]
    names = [name for name in shares[0] if name in shares[1]]
    if not names:
        raise AuditFailed("the audits share no question with gold answers", hint="Audit the same questions.")
    old, new = (np.array([each[name][0] for name in names]) for each in shares)

    def changed(was: float) -> list[str]:
        return [text for (_, text), one, other in zip(names, old, new, strict=True) if (one, other) == (was, 1 - was)]

    return AuditDiff(
        str(results[0]["system"]),
        str(results[1]["system"]),
        len(names),
        (mean_interval(old), mean_interval(new)),
        mean_difference(new, old),
        min(1.0, 2 * min(paired_p_value(new - old), paired_p_value(old - new))),
        fixed=changed(0.0),
        broken=changed(1.0),
    )


def _share(record: Mapping[str, Any]) -> tuple[float] | None:
    """Return the share of right answers of today in a tuple; None if they are neither right nor wrong."""
    said = [call["outcome"] for call in record["calls"] if call["call"] in {"today", "placebo"}]
    known = [each for each in said if each in {"right", "wrong", "failed"}]
    return (known.count("right") / len(known),) if known and record.get("answers") else None
