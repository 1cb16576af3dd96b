"""Faults: a writer that is killed, a disk that is full, two writers at once. Nothing is lost, doubled or torn."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from invariant_rag.audit.folder import LineFile
from invariant_rag.errors import FileInUse, InvalidQuestion, UnusableFile
from tests.fuzz.mutations import full_disk

ROOT = Path(__file__).parents[2]
Rounds = Callable[[], Iterator[random.Random]]
CHILD = """
import pathlib
import sys
sys.path.insert(0, "tests/audit")
from invariant_rag.audit import audit
from known import first, records

def told(question, segments):
    print("call", flush=True)
    return first(question, segments)

folder = pathlib.Path(sys.argv[1])
to = {"resume": folder} if (folder / "run.json").exists() else {"questions": records(6), "out": folder}
audit(told, workers=2, remedies=["sort"], **to)
"""


@pytest.mark.rounds(3)
def test_a_run_that_is_killed_at_any_call_loses_and_doubles_nothing(rounds: Rounds, tmp_path: Path) -> None:
    for number, source in enumerate(rounds()):
        folder = tmp_path / str(number // 4)  # each run is killed several times
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert child.stdout is not None
        for _ in range(source.randint(0, 60)):
            child.stdout.readline()
        time.sleep(source.random() / 500)
        child.send_signal(signal.SIGKILL)
        child.stdout.close()
        child.wait()
        path = folder / "answers.jsonl"
        if path.exists():
            with LineFile(path, lambda line, _: line["key"], InvalidQuestion) as file:
                assert len(file.lines) == len(set(file.lines))


class OneFile(RuleBasedStateMachine):
    """A file of lines and what it should hold, through writes, tears, full disks and second writers."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.path = self.folder / f"{time.monotonic_ns()}.jsonl"
        self.expected: list[object] = []
        self.file = self.opened()

    def opened(self) -> LineFile[object]:
        return LineFile(self.path, lambda line, _: line, InvalidQuestion)

    @rule(lines=st.lists(st.text(max_size=50), max_size=3))
    def append(self, lines: list[str]) -> None:
        self.file.append(lines)
        self.expected += lines

    @rule(room=st.integers(0, 60))
    def append_to_a_full_disk(self, room: int) -> None:
        with full_disk(self.path.stat().st_size + room), pytest.raises(UnusableFile):
            self.file.append(["short", "x" * 100])

    @rule()
    def open_twice(self) -> None:
        with pytest.raises(FileInUse):
            self.opened()

    @rule(torn=st.binary(max_size=30))
    def be_killed_in_the_middle_of_a_line(self, torn: bytes) -> None:
        self.file.close()
        with self.path.open("ab") as file:
            file.write(torn.replace(b"\n", b""))
        self.file = self.opened()
        assert self.file.lines == self.expected

    @invariant()
    def the_file_holds_what_was_written(self) -> None:
        assert [json.loads(line) for line in self.path.read_bytes().split(b"\n")[:-1]] == self.expected

    def teardown(self) -> None:
        self.file.close()


@pytest.mark.rounds(4)
def test_a_file_of_lines_survives_everything(rounds: Rounds, tmp_path: Path, ignored_size_signal: None) -> None:
    OneFile.folder = tmp_path
    for source in rounds():
        bounded = settings(max_examples=20, stateful_step_count=20, deadline=None, database=None)
        run_state_machine_as_test(seed(source.randrange(1 << 32))(OneFile), settings=bounded)
