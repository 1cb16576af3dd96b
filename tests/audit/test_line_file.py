"""Claims about files of lines that are continued: one writer, whole lines, and nothing lost when the disk is full."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from invariant_rag.audit.folder import open_answers
from invariant_rag.errors import AuditFailed, FileInUse, InvalidQuestion, UnusableFile
from invariant_rag.files import LineFile

ANSWER = {"key": "k", "text": "t", "tokens": None, "seconds": 0.5, "errors": []}


def lines(path: Path) -> LineFile[object]:
    return LineFile(path, lambda line, _: line, InvalidQuestion)


def test_a_second_process_is_refused_and_a_writer_that_was_killed_holds_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    child = f"""
import os, signal
from pathlib import Path
from invariant_rag.errors import FileInUse
from invariant_rag.audit.folder import open_answers
try:
    open_answers(Path({str(path.parent)!r}))
except FileInUse as error:
    print("refused")
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with lines(path) as file:
        file.append([ANSWER])
        done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
        assert done.stdout == "refused\n"
        with pytest.raises(FileInUse, match="is being written by another process"):
            lines(path)
    assert subprocess.run([sys.executable, "-c", child], check=False).returncode == -signal.SIGKILL
    with lines(path) as file:
        assert file.lines == [ANSWER]


def test_a_full_disk_is_an_error_and_tears_no_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with lines(path) as file:
        file.append(["kept"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))  # room for a part of the next line
        try:
            with pytest.raises(UnusableFile, match="cannot be written"):
                file.append(["x" * 100])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert path.read_text() == '"kept"\n'
        file.append(["later"])
    with lines(path) as file:
        assert file.lines == ["kept", "later"]


def test_a_torn_line_is_removed_and_half_a_surrogate_pair_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with lines(path) as file:
        file.append([{"é \ud800": "\u2028\r\n"}])
    path.write_bytes(path.read_bytes() + b'{"torn')
    with lines(path) as file:
        assert file.lines == [{"é \ud800": "\u2028\r\n"}]
        file.append(["later"])
    assert path.read_bytes().decode().count("\n") == 2
    with lines(path) as file:
        assert file.lines == [{"é \ud800": "\u2028\r\n"}, "later"]


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_refused_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(UnusableFile, match=f"expected a file, got a (named )?{kind}"):
        open_answers(path.parent)


@pytest.mark.parametrize("name", ANSWER)
def test_an_answer_with_a_value_of_another_type_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    allowed = {"tokens": [None, 5], "seconds": [5, 0.5], "errors": [[]]}.get(name, ["x", "\ud800"])
    for value in [None, 5, 0.5, True, "x", [], {}, [1], {"a": "b"}, "\ud800"]:
        path.write_text(json.dumps({**ANSWER, name: value}) + "\n")
        if value in allowed and not isinstance(value, bool):
            open_answers(path.parent).close()
        else:
            with pytest.raises(AuditFailed, match="line 1"):
                open_answers(path.parent)
    path.write_text(json.dumps({key: each for key, each in ANSWER.items() if key != name}) + "\n")
    with pytest.raises(AuditFailed, match="line 1"):
        open_answers(path.parent)
