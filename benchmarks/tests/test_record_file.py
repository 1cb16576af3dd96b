"""Claims about records.jsonl: a record has what a report reads, and a file that is damaged is refused or continued."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from invariant_rag.errors import FileInUse, InvalidRun, InvariantRAGError

from invariant_rag_benchmarks.runner import open_records

RECORD = {
    **dict.fromkeys(("id", "question", "variant", "group", "output", "answer"), "x"),
    "run": "k",
    "scores": {"em": 1.0},
    "dropped": 0,
    "trimmed": 0,
}
WRONG = [None, 5, True, "x", [], {}, [1], {"a": "b"}, float("nan"), 10**400, "\ud800"]


def test_one_process_writes_and_others_read(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with open_records(path, "k") as file:
        file.append([RECORD])
        with pytest.raises(FileInUse, match="is being written by another process"):
            open_records(path, "k")
        assert open_records(path, "k", writes=False).lines == [RECORD]


def fits(line: dict[str, object], name: str, value: object) -> bool:
    """Whether a value has the type that the field has."""
    kinds = {bool: bool, str: str, list: list, dict: dict}
    return type(value) is kinds.get(type(line[name]), type(line[name]))


@pytest.mark.parametrize("name", RECORD)
def test_a_record_with_a_value_of_another_type_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    for value in WRONG:
        if fits(RECORD, name, value) and value not in ({"a": "b"}, "x", "\ud800"):
            continue
        path.write_text(json.dumps({**RECORD, name: value}) + "\n")
        if fits(RECORD, name, value) and name not in {"scores", "run"}:
            with open_records(path, "k") as file:
                assert len(file.lines) == 1
        else:
            with pytest.raises(InvalidRun, match="line 1"):
                open_records(path, "k")
    path.write_text(json.dumps({key: each for key, each in RECORD.items() if key != name}) + "\n")
    with pytest.raises(InvalidRun, match="line 1"):
        open_records(path, "k")


def test_a_damaged_file_is_continued_without_loss_or_refused_and_left_alone(tmp_path: Path) -> None:
    path, source = tmp_path / "records.jsonl", random.Random(0)
    whole = b"".join(json.dumps({**RECORD, "id": str(number)}).encode() + b"\n" for number in range(4))
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(source.randint(1, 3)):
            damaged[source.randrange(len(damaged))] = source.randrange(256)
        before = bytes(damaged[: source.randint(1, len(damaged))])
        path.write_bytes(before)
        try:
            with open_records(path, "k") as file:
                kept = len(file.lines)
                file.append([{**RECORD, "id": "new"}])
            with open_records(path, "k") as file:
                assert len(file.lines) == kept + 1
        except InvariantRAGError:
            assert path.read_bytes() == before
        else:
            assert path.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
