"""Files that are mutated, torn or written twice, full disks, killed writers: read or refused by name, nothing lost.

In the folder of a cache, no wrong entry is served, and nothing that is not the cache's is touched.
"""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from invariant_rag import InvariantModel, KeyValueCache, errors
from invariant_rag.audit.folder import open_answers
from invariant_rag.audit.questions import read_questions
from invariant_rag.files import LineFile
from invariant_rag.generation.kv_cache import read_entry, write_entry
from invariant_rag.rag.documents import chunk_documents, load_documents
from invariant_rag.testing import random_prompt, tiny_model
from tests.fuzz.conftest import full_disk, mutated
from tests.rag.test_documents import write_pdf
from tests.test_files import ANSWER

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
        warnings.simplefilter("ignore", errors.DocumentSkipped)
        for each in chunk_documents(load_documents(path), max_chars=200, overlap=20):
            assert each.canonical_key
            assert each.content_hash


def refusals(rounds, content, file, read):
    """Read mutations of a file, each within seconds, and yield what is said of those that are refused."""
    for source in rounds():
        file.write_bytes(mutated(content, source))
        start = time.process_time()
        try:
            read(file)
        except errors.InvariantRAGError as error:
            yield str(error)
        assert time.process_time() - start < MOST_SECONDS


@pytest.mark.rounds(200)
@pytest.mark.filterwarnings("default")  # pypdf warns of what it repairs
@pytest.mark.parametrize("suffix", ["pdf", "encrypted.pdf", "jsonl", "md", "txt"])
def test_a_mutated_document_is_read_or_named(suffix, rounds, tmp_path):
    original = tmp_path / f"original.{suffix}"
    if suffix.endswith("pdf"):
        key = "key" if suffix == "encrypted.pdf" else None
        write_pdf(original, ["The Aru rises here.", "", "Orn is a castle."], title="Atlas", password=key)
    elif suffix == "jsonl":
        original.write_bytes(lines([{"text": f"one {n}", "title": "T", "year": [n, {"a": 1.5}]} for n in range(4)]))
    else:
        original.write_text("## Castle Orn ##\n\nIt stands above the Aru. It has a market.\n\n- 山は高い。\n" * 5)
    content, file = original.read_bytes(), tmp_path / f"a.{suffix}"
    for error in refusals(rounds, content, file, read_documents):
        assert file.name in error or "holds documents" in error


@pytest.mark.rounds(500)
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_mutated_questions_are_read_or_named(suffix, rounds, tmp_path):
    records = [{"id": f"q{number}", **QUESTION} for number in range(3)]
    content = lines(records) if suffix == "jsonl" else table()

    def read(path):
        for each in read_questions(path, None):
            assert [segment.canonical_key for segment in each.segments]

    assert all(refusals(rounds, content, tmp_path / f"a.{suffix}", read))


@pytest.mark.rounds(200)
def test_a_mutated_run_is_continued_without_loss_or_refused(rounds, tmp_path):
    path = tmp_path / "answers.jsonl"
    content = lines([{**ANSWER, "key": str(n)} for n in range(4)])
    for source in rounds():
        path.write_bytes(mutated(content, source))
        before = path.read_bytes()
        try:
            open_answers(path.parent).close()
        except errors.InvariantRAGError:
            assert path.read_bytes() == before  # a run that is refused is left alone
        else:
            assert path.read_bytes().startswith(before[: before.rfind(b"\n") + 1])


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
        command, hidden = [sys.executable, "-c", CHILD, str(folder)], subprocess.DEVNULL
        child = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=hidden)
        for _ in range(source.randint(0, 60)):
            child.stdout.readline()
        time.sleep(source.random() / 500)
        child.send_signal(signal.SIGKILL)
        child.stdout.close()
        child.wait()
        path = folder / "answers.jsonl"
        if path.exists():
            with LineFile(path, lambda line, _: line["key"], errors.InvalidQuestion) as file:
                assert len(file.lines) == len(set(file.lines))


@pytest.mark.rounds(80)
def test_a_file_of_lines_survives_everything(rounds, tmp_path):
    """Twenty writes, full disks, second writers and tears in the middle of a line."""

    def opened():
        return LineFile(path, lambda line, _: line, errors.InvalidQuestion)

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
                    with full_disk(path.stat().st_size + source.randrange(61)), pytest.raises(errors.UnusableFile):
                        file.append(["short", "x" * 100])
                case 2:
                    with pytest.raises(errors.FileInUse):
                        opened()
                case _:
                    file.close()
                    with path.open("ab") as torn:
                        torn.write(source.randbytes(source.randrange(30)).replace(b"\n", b""))
                    file = opened()
                    assert file.lines == expected
            assert [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] == expected
        file.close()


# --- the folder of a cache ---

CUTS = (
    lambda each: each[1:],
    lambda each: [],
    lambda each: [(keys[:, :-1], values[:, :-1]) for keys, values in each],
)
TENSORS = {"0.keys": torch.ones(1, 2, 3), "0.values": torch.ones(1, 2, 3)}
FOREIGN = [b"", b"%PDF-1.7\n", b"PK\x03\x04", b"{}", save(TENSORS), save(TENSORS, {"format": "pt"})]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def entry(source):
    """One to twelve layers of any shapes, also without tokens."""
    dtype, shape = source.choice(DTYPES), (source.randint(1, 3), source.randrange(5), source.randint(1, 4))
    made = torch.Generator().manual_seed(source.randrange(1 << 30))
    keys, values = ([torch.randn(shape, generator=made).to(dtype) for _ in range(12)] for _ in range(2))
    return list(zip(keys, values, strict=True))[: source.randint(1, 12)]


def content(entry):
    """What two entries have in common that are the same, by bytes: what is no number equals itself."""
    flat = [each for pair in entry for each in pair]
    return [(each.dtype, each.shape, each.view(torch.uint8).numpy().tobytes()) for each in flat]


@pytest.mark.rounds(100)
def test_whatever_happens_to_a_folder_every_key_gives_its_own_entry_or_none(rounds, tmp_path):
    for number, source in enumerate(rounds()):
        treat(tmp_path / str(number), source)


def treat(folder, source):
    """Do twenty random things to a folder that two tenants use."""
    room = source.choice((0, 500, 5000, 1 << 20))
    caches = {each: KeyValueCache(0, folder=folder, max_disk_bytes=room, namespace=each) for each in ("", "a")}
    entries = {(tenant, key): entry(source) for tenant in caches for key in "wxyz"}  # a key determines its entry
    foreign = {}
    for _ in range(20):
        files = sorted(folder.glob("*.safetensors"))
        ours = [path for path in files if path not in foreign]
        tenant, key = source.choice(("", "a")), source.choice("wxyz")
        match source.randrange(8):
            case 0 | 1:
                caches[tenant].put(key, entries[tenant, key])
                assert all(path.stat().st_mode & 0o77 == 0 for path in folder.iterdir() if path not in foreign)
            case 2 if ours:
                path = source.choice(ours)
                path.write_bytes(mutated(path.read_bytes(), source))
            case 3 if len(ours) > 1:
                one, other = source.sample(ours, 2)
                one.replace(other)
            case 4:
                name = source.randbytes(32).hex() if source.random() < 0.5 else source.randrange(99)
                path = folder / f"{name}.safetensors"
                foreign[path] = source.choice([*FOREIGN, source.randbytes(300)])
                path.write_bytes(foreign[path])
            case 5 if ours:
                os.truncate(source.choice(ours), source.randrange(200))
            case 6:
                caches[tenant].clear()
            case _:
                with full_disk(source.randrange(2000)):
                    caches[tenant].put(key, entries[tenant, key])
        for (tenant, key), expected in entries.items():
            served = caches[tenant].get(key)
            assert served is None or content(served) == content(expected)
        assert all(path.read_bytes() == content for path, content in foreign.items())


@pytest.mark.rounds(5)
def test_files_that_are_exchanged_or_mutated_change_no_answer(rounds, tmp_path):
    models = [InvariantModel(tiny_model("llama", seed=seed), ordering="lexical") for seed in (0, 1)]
    for number, source in enumerate(rounds()):
        folder = tmp_path / str(number)
        method = source.choice(("rotor", "ape", "pine"))
        prompts = [random_prompt(source, (3, 2, 3), prefix=3, suffix=2) for _ in range(2)]
        asked = [(lm.with_method(method, ordering="lexical"), prompt) for lm in models for prompt in prompts]
        expected = [lm.with_cache(KeyValueCache(folder=folder)).logits(prompt) for lm, prompt in asked]
        files = sorted(folder.glob("*.safetensors"))
        for path in source.sample(files, min(3, len(files))):
            other = source.choice(files)
            if not path.exists():
                continue
            match source.randrange(4):
                case 0:
                    path.replace(other)
                case 1:
                    other.write_bytes(path.read_bytes())
                case 2:  # its own name and a right checksum, but something is missing; what it holds has another layout
                    with suppress(errors.DamagedEntry):
                        path.write_bytes(write_entry(source.choice(CUTS)(read_entry(path)), path.name))
                case _:
                    path.write_bytes(mutated(path.read_bytes(), source))
        found = [lm.with_cache(KeyValueCache(folder=folder)).logits(prompt) for lm, prompt in asked]
        assert all(map(torch.equal, found, expected))
