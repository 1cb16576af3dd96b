"""Files of the cache: bound to their keys, private, within room, and nobody else's are touched."""

import multiprocessing
import os
import random
import stat
import time
from itertools import chain, cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.errors import DamagedEntry, UnusableFile
from invariant_rag.generation.kv_cache import checksum, read_entry, write_entry
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model

SIDES = ("keys", "values")
UNFINISHED = "invariant-rag-x.unfinished"


def entry(size):
    """An entry of `8 * size` bytes."""
    return [(torch.full((1, size, 1), 1.0), torch.full((1, size, 1), 2.0))]


def file_of(folder, key, namespace=""):
    """The file that an entry is written to, in a folder without others."""
    known = set(folder.glob("*.safetensors"))
    KeyValueCache(folder=folder, namespace=namespace).put(key, entry(20))
    (path,) = set(folder.glob("*.safetensors")) - known
    return path


def size_of(folder):
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def has(folder, *keys, namespace=""):
    return [KeyValueCache(folder=folder, namespace=namespace).get(str(key)) is not None for key in keys]


def test_only_their_owner_can_read_the_files(tmp_path):
    folder, before = tmp_path / "a" / "b", os.umask(0)
    try:
        path = file_of(folder, "x")
    finally:
        os.umask(before)
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in (folder, *folder.iterdir())}
    assert modes == {"b": 0o700, path.name: 0o600, "key-value-cache.lock": 0o600}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_another_program_reads_an_entry_as_the_docstring_says(dtype, tmp_path):
    stored = [(torch.randn(2, 5, 3).to(dtype), torch.randn(2, 5, 4).to(dtype)) for _ in range(11)]
    named = {f"{n}.{side}": each for n, pair in enumerate(stored) for side, each in zip(SIDES, pair, strict=True)}
    KeyValueCache(folder=tmp_path, namespace="a tenant").put("x", stored)
    (path,) = tmp_path.glob("invariant-rag-*.safetensors")
    tensors = load_file(path)
    assert tensors.keys() == named.keys()
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"sha256": checksum(path.name, tensors)}
    assert all(torch.equal(each, named[name]) for name, each in tensors.items())
    assert all(map(torch.equal, chain(*read_entry(path)), named.values()))


def file_with(*names):
    """The content of a file with tensors of these names, whose checksum is right."""
    tensors = {name: torch.ones(1, 2, 3) for name in names}
    return lambda _, path: save(tensors, {"sha256": checksum(path, tensors)})


DAMAGE = {
    "cut": lambda content, _: content[:-5],
    "flip": lambda content, _: content[:-1] + bytes([content[-1] ^ 1]),
    "empty": lambda *_: b"",
    "another's": lambda *_: write_entry(entry(20), "invariant-rag-another.safetensors"),
    "a header": lambda content, _: content[:8] + b"[" * (len(content) - 8),
    "metadata": lambda content, _: content.replace(b'"sha256":"', b'"sha255":"'),
    "foreign": lambda *_: b"%PDF-1.7",
    "no tensors": file_with(),
    "no values": file_with("0.keys"),
    "no pairs": file_with("0.keys", "1.values"),
    "more tensors": file_with("0.keys", "0.values", "0.more"),
    "other tensors": file_with("a", "b"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_and_is_removed(damage, tmp_path):
    path = file_of(tmp_path, "x")
    path.write_bytes(DAMAGE[damage](path.read_bytes(), path.name))
    with pytest.raises(DamagedEntry, match=path.name):
        read_entry(path)
    cache = KeyValueCache(folder=tmp_path)
    assert cache.get("x") is None
    assert (cache.stats().damaged, cache.stats().misses) == (1, 1)
    assert not path.exists()


FORGED = {
    "a layer less": lambda entry: entry[:-1],
    "a token less": lambda entry: [(k[:, 1:], v[:, 1:]) for k, v in entry],
    "a head less": lambda entry: [(k[1:], v[1:]) for k, v in entry],
    "another dtype": lambda entry: [(k.half(), v.half()) for k, v in entry],
    "no tokens": lambda entry: [(k[:, :0], v[:, :0]) for k, v in entry],
}


@pytest.mark.parametrize("wrong", ["renamed", *FORGED])
def test_an_entry_that_is_not_what_was_asked_for_changes_no_answer(wrong, tmp_path):
    prompt = random_prompt(random.Random(0), (3, 5, 1, 4), prefix=4, suffix=3)
    one, other = (InvariantModel(tiny_model("llama", num_hidden_layers=2, seed=seed)) for seed in (0, 1))
    for lm, folder in ((one, "one"), (other, "other")):
        lm.with_cache(KeyValueCache(folder=tmp_path / folder)).logits(prompt)
    (path,), (theirs,) = ((tmp_path / folder).glob("*.safetensors") for folder in ("one", "other"))
    if wrong == "renamed":
        path.replace(theirs)
    else:
        theirs.write_bytes(write_entry(FORGED[wrong](read_entry(path)), theirs.name))
    cache = KeyValueCache(folder=tmp_path / "other")
    assert torch.equal(other.with_cache(cache).logits(prompt), other.with_cache(KeyValueCache()).logits(prompt))
    assert (cache.stats().damaged, cache.stats().disk_hits, cache.stats().misses) == (1, 0, 1)
    assert read_entry(theirs), "the right one was written again"


def test_entries_of_one_namespace_are_not_served_to_another(tmp_path):
    names = ["", "a", "b", "('x', 'a')", "\ud800"]
    for name in names:
        assert has(tmp_path, "x", namespace=name) == [False]
        file_of(tmp_path, "x", name)
        assert has(tmp_path, "x", namespace=name) == [True]
    KeyValueCache(folder=tmp_path, namespace="a").clear()
    assert [has(tmp_path, "x", namespace=each)[0] for each in names] == [each != "a" for each in names]


def test_clearing_and_making_room_touch_nobody_elses_files(tmp_path):
    """Each is larger than the room, and its name looks like ours. The least recently used entries make room."""
    names = ("model.safetensors", f"{'a' * 64}.safetensors", "x.unfinished", "unfinished-notes", "invariant-rag-x.pdf")
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 999)
        os.utime(tmp_path / name, (0, 0))
    folders = [tmp_path / UNFINISHED, tmp_path / "invariant-rag-x.safetensors"]
    for each in folders:
        each.mkdir()
    foreign, size = size_of(tmp_path), file_of(tmp_path, "x").stat().st_size
    cache = KeyValueCache(max_bytes=0, folder=tmp_path, max_disk_bytes=3 * size)
    for number in range(5):
        time.sleep(0.01)
        if number == 4:
            assert cache.get("1") is not None  # used now
            time.sleep(0.01)
        cache.put(str(number), entry(20))
        assert size_of(tmp_path) <= 3 * size + foreign
    assert has(tmp_path, *range(5)) == [False, True, False, True, True]
    cache.clear()
    assert not any(has(tmp_path, *range(5)))
    assert all((tmp_path / name).read_bytes() == name.encode() * 999 for name in names)
    assert all(each.is_dir() for each in folders)


def test_an_entry_larger_than_the_room_is_not_written(tmp_path):
    size = file_of(tmp_path / "a", "x").stat().st_size
    for room in (0, 1, size - 1):
        cache = KeyValueCache(folder=tmp_path / "b", max_disk_bytes=room)
        cache.put("x", entry(20))
        assert size_of(tmp_path / "b") == 0
        assert (cache.stats().entries, cache.stats().disk_errors) == (1, 0)


def test_what_a_dead_writer_left_is_removed_and_what_is_being_written_is_not(tmp_path):
    left = tmp_path / UNFINISHED
    for act in (lambda cache: cache.put("x", entry(10)), KeyValueCache.clear):
        left.write_bytes(b"torn")
        act(KeyValueCache(folder=tmp_path))
        assert not left.exists()


@pytest.mark.parametrize("kind", ["a pipe", "a folder"])
def test_what_is_no_file_is_an_error_of_the_disk_and_a_folder_that_cannot_be_cleared_is_named(kind, tmp_path):
    path = file_of(tmp_path / "a", "x")
    path.unlink()
    os.mkfifo(path) if kind == "a pipe" else path.mkdir()
    cache = KeyValueCache(max_bytes=0, folder=path.parent)
    assert cache.get("x") is None
    assert cache.stats().disk_errors == 1
    cache.clear()
    assert path.exists()
    path.parent.rename(tmp_path / "b")
    path.parent.write_text("")
    with pytest.raises(UnusableFile, match="cannot clear"):
        cache.clear()


def test_a_store_that_may_only_be_read_serves(tmp_path, monkeypatch):
    file_of(tmp_path, "x")

    def refuse(*_):
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "utime", refuse)
    cache = KeyValueCache(folder=tmp_path)
    assert cache.get("x") is not None
    assert (cache.stats().disk_hits, cache.stats().disk_errors) == (1, 0)


def _write_for_ever(folder, start, room):
    cache = KeyValueCache(max_bytes=0, folder=folder, max_disk_bytes=room)
    for number in cycle([*range(start, 40), *range(start)]):
        cache.put(str(number), [(torch.full((2, 4000, 8), float(number)), torch.zeros(2, 4000, 8))])


def test_a_store_whose_writers_are_killed_serves_intact_entries_and_keeps_to_its_room(tmp_path):
    """Twenty kills, of two processes that write at the same time."""
    room = 5 * len(write_entry([(torch.ones(2, 4000, 8), torch.zeros(2, 4000, 8))], "x")) + 1000
    draw, processes, served = random.Random(0), multiprocessing.get_context("fork"), 0
    for _ in range(10):
        writers = [processes.Process(target=_write_for_ever, args=(tmp_path, start, room)) for start in (0, 7)]
        for writer in writers:
            writer.start()
        time.sleep(draw.uniform(0.005, 0.05))
        for writer in writers:
            writer.kill()
            writer.join()
        assert size_of(tmp_path) <= room
        cache = KeyValueCache(folder=tmp_path)
        for number in range(40):
            found = cache.get(str(number))
            assert found is None or torch.equal(found[0][0], torch.full((2, 4000, 8), float(number)))
        assert cache.stats().damaged == 0
        served += cache.stats().disk_hits
    assert served


@pytest.mark.skipif(not hasattr(os, "fork") or os.getuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user_holds_nothing_for_this_one():
    with TemporaryDirectory() as outside:  # those of pytest lie in a folder that other users cannot enter
        Path(outside).chmod(0o755)
        folder = Path(outside) / "cache"
        file_of(folder, "x")
        child = os.fork()
        if not child:
            os.setuid(65534)
            try:
                found = has(folder, "x")[0]
            except BaseException:  # noqa: BLE001 - nothing of the parent's test may run on here
                os._exit(2)
            os._exit(int(found))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert has(folder, "x") == [True]
