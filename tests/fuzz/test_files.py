"""Mutated files: each is read, or refused by a typed error that names it, within seconds."""

from __future__ import annotations

import csv
import io
import json
import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from invariant_rag.audit.folder import open_answers
from invariant_rag.audit.questions import read_questions
from invariant_rag.errors import DocumentSkipped, InvariantRAGError
from invariant_rag.rag.documents import chunk_documents, load_documents
from tests.audit.test_line_file import ANSWER
from tests.fuzz.mutations import mutated
from tests.rag.test_documents import write_pdf

Rounds = Callable[[], Iterator[random.Random]]
MOST_SECONDS = 10
SEGMENTS = ["a mill", {"text": "a ferry", "title": "T", "score": 0.5, "metadata": {"page": 1}}]
QUESTION = {"question": "Who built it?", "segments": SEGMENTS, "answers": ["a"], "gold": [1]}


def lines(records: list[object]) -> bytes:
    return "".join(json.dumps(each) + "\n" for each in records).encode()


def table() -> bytes:
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["id", "question", "segment", "title", "score", "gold", "answer"])
    rows.writerows([[f"q{row // 2}", "Who?", f'a "mill",\n{row}', "T", 0.5, 1, "a|b"] for row in range(6)])
    return text.getvalue().encode()


def read_documents(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DocumentSkipped)
        for each in chunk_documents(load_documents(path), max_chars=200, overlap=20):
            assert each.canonical_key
            assert each.content_hash


def errors(rounds: Rounds, content: bytes, file: Path, read: Callable[[Path], None]) -> Iterator[str]:
    """Read mutations of a file, each within seconds, and yield what is said of those that are refused."""
    for source in rounds():
        file.write_bytes(mutated(content, source))
        start = time.process_time()
        try:
            read(file)
        except InvariantRAGError as error:
            yield str(error)
        assert time.process_time() - start < MOST_SECONDS


@pytest.mark.rounds(200)
@pytest.mark.filterwarnings("default")  # pypdf warns of what it repairs
@pytest.mark.parametrize("suffix", ["pdf", "encrypted.pdf", "jsonl", "md", "txt"])
def test_a_mutated_document_is_read_or_named(suffix: str, rounds: Rounds, tmp_path: Path) -> None:
    original = tmp_path / f"original.{suffix}"
    if suffix.endswith("pdf"):
        password = "" if suffix == "pdf" else "key"
        write_pdf(original, ["The Aru rises here.", "", "Orn is a castle."], title="Atlas", password=password or None)
    elif suffix == "jsonl":
        original.write_bytes(lines([{"text": f"one {n}", "title": "T", "year": [n, {"a": 1.5}]} for n in range(4)]))
    else:
        original.write_text("## Castle Orn ##\n\nIt stands above the Aru. It has a market.\n\n- 山は高い。\n" * 5)
    content, file = original.read_bytes(), tmp_path / f"a.{suffix}"
    for error in errors(rounds, content, file, read_documents):
        assert file.name in error or "holds documents" in error


@pytest.mark.rounds(500)
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_mutated_questions_are_read_or_named(suffix: str, rounds: Rounds, tmp_path: Path) -> None:
    content, file = (
        lines([{"id": f"q{number}", **QUESTION} for number in range(3)]) if suffix == "jsonl" else table(),
        tmp_path / f"a.{suffix}",
    )

    def read(path: Path) -> None:
        for each in read_questions(path, None):
            assert [segment.canonical_key for segment in each.segments]

    assert all(errors(rounds, content, file, read))


@pytest.mark.rounds(200)
def test_a_mutated_run_is_continued_without_loss_or_refused(rounds: Rounds, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    content = lines([{**ANSWER, "key": str(n)} for n in range(4)])
    for source in rounds():
        path.write_bytes(mutated(content, source))
        before = path.read_bytes()
        try:
            open_answers(path.parent).close()
        except InvariantRAGError:
            assert path.read_bytes() == before  # a run that is refused is left alone
        else:
            assert path.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
