"""Files of lines that are continued: one writer, whole lines, and nothing lost when the disk is full."""

import json
import os
import signal
import subprocess
import sys

import pytest

from invariant_rag.audit.folder import open_answers
from invariant_rag.errors import AuditFailed, FileInUse, InvalidQuestion, UnusableFile
from invariant_rag.files import LineFile
from tests.fuzz.conftest import full_disk

ANSWER = {"key": "k", "text": "t", "tokens": None, "seconds": 0.5, "errors": []}
ODD = {"é \ud800": "\u2028\r\n"}
CHILD = """
import os, signal, sys
from pathlib import Path
from invariant_rag.errors import FileInUse
from invariant_rag.audit.folder import open_answers
try:
    open_answers(Path(sys.argv[1]))
except FileInUse:
    sys.exit(7)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "answers.jsonl"


def lines(path):
    return LineFile(path, lambda line, _: line, InvalidQuestion)


def test_a_second_process_is_refused_and_a_writer_that_was_killed_holds_no_lock(path):
    child = [sys.executable, "-c", CHILD, str(path.parent)]
    with lines(path) as file:
        file.append([ANSWER])
        assert subprocess.run(child, check=False).returncode == 7
        with pytest.raises(FileInUse, match="is being written by another process"):
            lines(path)
    assert subprocess.run(child, check=False).returncode == -signal.SIGKILL
    with lines(path) as file:
        assert file.lines == [ANSWER]


def test_a_full_disk_and_a_torn_line_lose_nothing_and_tear_no_line(path):
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with lines(path) as file:
        file.append([ODD])
        try:
            with full_disk(path.stat().st_size + 10), pytest.raises(UnusableFile, match="cannot be written"):
                file.append(["x" * 100])
        finally:
            signal.signal(signal.SIGXFSZ, handler)
        file.append(["later"])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"torn')
    with lines(path) as file:
        assert file.lines == [ODD, "later"]
    assert path.read_bytes() == whole
    assert whole.decode().count("\n") == 2


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_no_file_is_refused_and_not_waited_for(kind, path):
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(UnusableFile, match=f"expected a file, got a (named )?{kind}"):
        lines(path)


@pytest.mark.parametrize("name", ANSWER)
def test_an_answer_with_a_value_of_another_type_is_refused(name, path):
    allowed = {"tokens": [None, 5], "seconds": [5, 0.5], "errors": [[]]}.get(name, ["x", "\ud800"])
    odd = [None, 5, 0.5, True, "x", [], {}, [1], {"a": "b"}, "\ud800"]
    for each in odd:
        path.write_text(json.dumps({**ANSWER, name: each}) + "\n")
        if type(each) is not bool and each in allowed:
            open_answers(path.parent).close()
        else:
            with pytest.raises(AuditFailed, match="line 1"):
                open_answers(path.parent)
    path.write_text(json.dumps({key: each for key, each in ANSWER.items() if key != name}) + "\n")
    with pytest.raises(AuditFailed, match="line 1"):
        open_answers(path.parent)
