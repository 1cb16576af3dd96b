"""The folder of an audit: answers, the identities of systems, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invariant_rag.checks import check_path
from invariant_rag.errors import AuditFailed, UnusableFile
from invariant_rag.evaluation.audit.answer_store import AnswerStore, StoredAnswer
from invariant_rag.files import encode_json, make_folder, parse_json, read_bytes, write_file

if TYPE_CHECKING:
    from invariant_rag.evaluation.audit.result import Audit

RESULT = "audit.json"


@dataclass(frozen=True)
class AuditFolder:
    """Where an audit is kept, or nowhere.

    Attributes:
        path: The folder; None for an audit that is kept in memory.
        identities: Identity under which the answers of a system are stored, by the identity that it had afterwards: a
            system may count its calls, or keep what it was asked.
    """

    path: Path | None
    identities: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, out: Any, *, writes: bool = True) -> AuditFolder:
        """Return the folder of an audit, and make it if it does not exist, unless nothing is to be written.

        Raises:
            InvalidChoice: It is no path.
            UnusableFile: It cannot be made or read.
        """
        if out is None:
            return cls(None)
        path = check_path("out", out)
        if writes:
            make_folder(path)
        known = path / "systems.json"
        try:
            identities = parse_json(read_bytes(known)) if known.exists() else {}
        except (OSError, ValueError) as error:
            raise UnusableFile(f"{str(known)!r} cannot be read: {error}", hint="Remove it.") from error
        return cls(path, identities if isinstance(identities, dict) else {})

    def open_store(self, fresh: bool) -> AnswerStore:
        """Open the answers of the folder.

        Args:
            fresh: Whether to set those aside that are there.

        Raises:
            AuditFailed: A line is no answer.
            FileInUse: Another process writes the file.
            UnusableFile: The file cannot be opened.
        """
        if self.path is None:
            return AnswerStore()
        answers = self.path / "answers.jsonl"
        if fresh and answers.exists():
            AnswerStore(answers).close()  # refuses a file that another process writes
            answers.replace(self.path / f"answers-until-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}.jsonl")
        return AnswerStore(answers)

    def read_answers(self) -> Mapping[str, StoredAnswer]:
        """Return the answers of the folder by key. Nothing is written, and another process may write meanwhile.

        Raises:
            AuditFailed: A line is no answer.
            UnusableFile: The file cannot be read.
        """
        return {} if self.path is None else AnswerStore(self.path / "answers.jsonl", writes=False).answers

    def remember(self, now: str, stored: str) -> None:
        """Note that a system changed while it was asked: its answers are stored under the identity it had before."""
        if self.path is not None and now != stored and self.identities.get(now) != stored:
            write_file(self.path / "systems.json", encode_json({**self.identities, now: stored}) + b"\n")

    def write(self, result: Audit) -> None:
        """Write the result and the report.

        Raises:
            UnusableFile: They cannot be written.
        """
        if self.path is not None:
            from invariant_rag.evaluation.audit.report import write_report

            write_file(self.path / RESULT, encode_json(result.as_dict(), indent=2) + b"\n")
            write_report(result, self.path)


def read_result(folder: Path) -> dict[str, Any]:
    """Read the result of an audit from its folder, as plain data.

    Raises:
        AuditFailed: There is none, or it is not of this version.
    """
    path = folder / RESULT if folder.is_dir() else folder
    try:
        found = parse_json(read_bytes(path))
    except (OSError, ValueError) as error:
        raise AuditFailed(
            f"{path}: no result of an audit: {error}", hint="Name the --out folder of an audit."
        ) from error
    if not _fits(found, _SHAPE) or not all(each["asked"] for each in found["asked"]):
        raise AuditFailed(f"{path}: no result of an audit of this version", hint="Audit once more into that folder.")
    return dict(found)


_SHAPE: Any = {
    "system": str,
    "date": str,
    "measured": list,
    "asked": [
        {
            "question": str,
            "flips": bool,
            "segments": [{"title": str | None, "text": str}],
            "asked": [{"remedy": str, "kind": str, "score": int | float | None}],
        }
    ],
}
"""What is read of a result: somebody may have edited the file."""


def _fits(found: Any, shape: Any) -> bool:
    """Return whether plain data has the keys and the types of a shape; a list in it holds the shape of each."""
    if isinstance(shape, dict):
        return isinstance(found, dict) and all(name in found and _fits(found[name], shape[name]) for name in shape)
    if isinstance(shape, list):
        return isinstance(found, list) and all(_fits(each, shape[0]) for each in found)
    return isinstance(found, shape)
