"""Files that are mutated, torn or written twice, full disks, killed writers: read or refused by name, nothing lost."""

import json
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from invariant_rag.audit.folder import open_answers
from invariant_rag.audit.questions import read_questions
from invariant_rag.errors import DocumentSkipped, FileInUse, InvalidQuestion, InvariantRAGError, UnusableFile
from invariant_rag.files import LineFile
from invariant_rag.rag.documents import chunk_documents, load_documents
from tests.audit.test_systems import ANSWER
from tests.fuzz.mutations import full_disk, mutated
from tests.rag.test_documents import write_pdf

MOST_SECONDS = 10
SEGMENTS = ["a mill", {"text": "a ferry", "title": "T", "score": 0.5, "metadata": {"page": 1}}]
QUESTION = {"question": "Who built it?", "segments": SEGMENTS, "answers": ["a"], "gold": [1]}


def lines(records):
    return "".join(json.dumps(each) + "\n" for each in records).encode()


def table():
    rows = [f'q{row // 2},Who?,"a ""mill"",\n{row}",T,0.5,1,a|b\r\n' for row in range(6)]
    return "".join(["id,question,segment,title,score,gold,answer\r\n", *rows]).encode()


def read_documents(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DocumentSkipped)
        for each in chunk_documents(load_documents(path), max_chars=200, overlap=20):
            assert each.canonical_key
            assert each.content_hash


def errors(rounds, content, file, read):
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
def test_a_mutated_document_is_read_or_named(suffix, rounds, tmp_path):
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
def test_mutated_questions_are_read_or_named(suffix, rounds, tmp_path):
    records = [{"id": f"q{number}", **QUESTION} for number in range(3)]
    content = lines(records) if suffix == "jsonl" else table()

    def read(path):
        for each in read_questions(path, None):
            assert [segment.canonical_key for segment in each.segments]

    assert all(errors(rounds, content, tmp_path / f"a.{suffix}", read))


@pytest.mark.rounds(200)
def test_a_mutated_run_is_continued_without_loss_or_refused(rounds, tmp_path):
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


ROOT = Path(__file__).parents[2]
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
def test_a_run_that_is_killed_at_any_call_loses_and_doubles_nothing(rounds, tmp_path):
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


@pytest.mark.rounds(80)
def test_a_file_of_lines_survives_everything(rounds, tmp_path, ignored_size_signal):
    """Twenty writes, full disks, second writers and tears in the middle of a line."""

    def opened():
        return LineFile(path, lambda line, _: line, InvalidQuestion)

    for number, source in enumerate(rounds()):
        path, expected = tmp_path / f"{number}.jsonl", []
        file = opened()
        for _ in range(20):
            match source.randrange(4):
                case 0:
                    text = "".join(chr(source.randrange(0x110000)) for _ in range(source.choice((0, 1, 50))))
                    texts = [text] * source.randrange(4)
                    file.append(texts)
                    expected += texts
                case 1:
                    with full_disk(path.stat().st_size + source.randrange(61)), pytest.raises(UnusableFile):
                        file.append(["short", "x" * 100])
                case 2:
                    with pytest.raises(FileInUse):
                        opened()
                case _:
                    file.close()
                    with path.open("ab") as torn:
                        torn.write(source.randbytes(source.randrange(30)).replace(b"\n", b""))
                    file = opened()
                    assert file.lines == expected
            assert [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] == expected
        file.close()
