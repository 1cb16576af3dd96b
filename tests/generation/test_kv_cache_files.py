"""Files of the cache: bound to their keys, private, within room, and nobody else's are touched."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import random
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from invariant_rag.errors import DamagedEntry, UnusableFile
from invariant_rag.generation.digest import digest_of
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.generation.kv_cache_files import FORMAT, checksum, read_entry, to_bytes

FILE_BYTES = len(to_bytes([(torch.ones(1, 20, 1), torch.ones(1, 20, 1))], digest_of("x", "")))
WRITTEN_FOR_EVER = [(torch.ones(2, 4000, 8), torch.zeros(2, 4000, 8))]


def entry(size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """An entry of `8 * size` bytes."""
    return [(torch.full((1, size, 1), 1.0), torch.full((1, size, 1), 2.0))]


def file_of(folder: Path, key: str, namespace: str = "") -> Path:
    return folder / f"{digest_of(key, namespace)}.kv"


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.fixture
def strict_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_only_their_owner_can_read_the_files(tmp_path: Path, strict_umask: None) -> None:
    folder = tmp_path / "a" / "b"
    KeyValueCache(folder=folder).put("x", entry(10))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {"b": 0o700, file_of(folder, "x").name: 0o600, "key-value-cache.lock": 0o600}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_another_program_reads_an_entry_as_the_docstring_says(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = [(torch.randn(2, 5, 3).to(dtype), torch.randn(2, 5, 4).to(dtype)) for _ in range(11)]
    KeyValueCache(folder=tmp_path, namespace="a tenant").put("x", stored)
    path = file_of(tmp_path, "x", "a tenant")
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    for layer, (keys, values) in enumerate(stored):
        assert torch.equal(tensors[f"{layer}.keys"], keys)
        assert torch.equal(tensors[f"{layer}.values"], values)
    namespace = hashlib.sha256(b"a tenant").hexdigest()
    assert metadata == {
        "format": FORMAT,
        "stem": path.stem,
        "namespace": namespace,
        "sha256": checksum(path.stem, namespace, tensors),
    }
    flat = [each for pair in read_entry(path) for each in pair]
    assert all(map(torch.equal, flat, [each for pair in stored for each in pair]))


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "another's", "a header", "metadata", "foreign"])
def test_a_damaged_file_is_a_miss_and_is_removed(damage: str, tmp_path: Path) -> None:
    KeyValueCache(folder=tmp_path).put("x", entry(10))
    path = file_of(tmp_path, "x")
    content = path.read_bytes()
    damaged = {
        "cut": content[:-5],
        "flip": content[:-1] + bytes([content[-1] ^ 1]),
        "empty": b"",
        "another's": to_bytes(entry(10), digest_of("y", "")),
        "a header": content[:8] + b"[" * (len(content) - 8),
        "metadata": content.replace(b'"sha256":"', b'"sha255":"'),
        "foreign": b"%PDF-1.7",
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(DamagedEntry, match=path.name):
        read_entry(path)
    cache = KeyValueCache(folder=tmp_path)
    assert cache.get("x") is None
    assert (cache.stats().damaged, cache.stats().misses) == (1, 1)
    assert not path.exists()


def test_a_file_with_other_tensors_is_damaged(tmp_path: Path) -> None:
    path, namespace = file_of(tmp_path, "x"), hashlib.sha256(b"").hexdigest()
    for names in ([], ["0.keys"], ["0.keys", "1.values"], ["0.keys", "0.values", "0.more"], ["a", "b"]):
        tensors = {name: torch.ones(1, 2, 3) for name in names}
        metadata = {"format": FORMAT, "stem": path.stem, "namespace": namespace}
        save_file(tensors, path, metadata | {"sha256": checksum(path.stem, namespace, tensors)})
        with pytest.raises(DamagedEntry, match="expected keys and values"):
            read_entry(path)


def test_entries_of_one_namespace_are_not_served_to_another(tmp_path: Path) -> None:
    names = ["", "a", "b", "('x', 'a')", "\ud800"]
    for name in names:
        cache = KeyValueCache(folder=tmp_path, namespace=name)
        assert cache.get("x") is None
        cache.put("x", entry(10))
        assert KeyValueCache(folder=tmp_path, namespace=name).get("x") is not None
    assert len(list(tmp_path.glob("*.kv"))) == len(names)
    KeyValueCache(folder=tmp_path, namespace="a").clear()
    assert [KeyValueCache(folder=tmp_path, namespace=each).get("x") is not None for each in names] == [
        each != "a" for each in names
    ]


def somebody_elses(folder: Path) -> dict[Path, bytes]:
    """Files that are not ours, under names that look like it, each larger than the room of the tests."""
    big = b"x" * 5000
    header = json.dumps({"__metadata__": {"format": FORMAT, "stem": "0" * 64}}).encode()
    files = {
        "video.kv": big,
        f"{'a' * 64}.kv": big,
        f"{'b' * 64}.kv": len(header).to_bytes(8, "little") + header + big,  # the name of another
        f"{'c' * 64}.kv": b"",
        f"{'d' * 64}.kv": (1 << 62).to_bytes(8, "little") + big,
        f"{'e' * 64}.safetensors": big,
        "x.unfinished": big,
        "unfinished-notes": big,
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
        os.utime(folder / name, (0, 0))
    (folder / f"{'f' * 64}.kv").mkdir()
    (folder / f"invariant-rag-{'f' * 32}.unfinished").mkdir()
    return {folder / name: content for name, content in files.items()}


def test_clearing_and_making_room_touch_nobody_elses_files(tmp_path: Path) -> None:
    others = somebody_elses(tmp_path)
    cache = KeyValueCache(max_bytes=0, folder=tmp_path, max_disk_bytes=3 * FILE_BYTES)
    for number in range(6):
        cache.put(str(number), entry(20))
        os.utime(file_of(tmp_path, str(number)), (number + 1, number + 1))
    assert [cache.get(str(number)) is not None for number in range(6)] == [False] * 3 + [True] * 3
    cache.clear()
    assert not any(file_of(tmp_path, str(number)).exists() for number in range(6))
    assert [path.name for path, content in others.items() if not path.exists() or path.read_bytes() != content] == []
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2


@pytest.mark.parametrize("room", [0, 1, FILE_BYTES - 1])
def test_an_entry_larger_than_the_room_is_not_written(room: int, tmp_path: Path) -> None:
    cache = KeyValueCache(folder=tmp_path, max_disk_bytes=room)
    cache.put("x", entry(20))
    assert size_of(tmp_path) == 0
    assert (cache.stats().entries, cache.stats().disk_errors) == (1, 0)
    assert KeyValueCache(folder=tmp_path).get("x") is None


def test_the_least_recently_used_files_make_room(tmp_path: Path) -> None:
    cache = KeyValueCache(max_bytes=0, folder=tmp_path, max_disk_bytes=3 * FILE_BYTES)
    for number in range(10):
        cache.put(str(number), entry(20))
        os.utime(file_of(tmp_path, str(number)), (number, number))
        assert size_of(tmp_path) <= 3 * FILE_BYTES
    assert cache.get("7") is not None  # used now
    cache.put("10", entry(20))
    assert [number for number in range(11) if cache.get(str(number)) is not None] == [7, 9, 10]


def test_what_a_dead_writer_left_is_removed_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    left = tmp_path / f"invariant-rag-{'0' * 32}.unfinished"
    for act in (lambda cache: cache.put("x", entry(10)), KeyValueCache.clear):
        left.write_bytes(b"torn")
        act(KeyValueCache(folder=tmp_path))
        assert not left.exists()


@pytest.mark.parametrize("kind", ["a pipe", "a folder"])
def test_what_is_no_file_is_an_error_of_the_disk(kind: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, "x")
    os.mkfifo(path) if kind == "a pipe" else path.mkdir()
    cache = KeyValueCache(max_bytes=0, folder=tmp_path)
    assert cache.get("x") is None
    assert cache.stats().disk_errors == 1
    cache.clear()
    assert path.exists()


def test_a_folder_that_cannot_be_cleared_is_named(tmp_path: Path) -> None:
    cache = KeyValueCache(folder=tmp_path / "a")
    (tmp_path / "a").rmdir()
    (tmp_path / "a").write_text("")
    with pytest.raises(UnusableFile, match="cannot clear"):
        cache.clear()


def test_a_store_that_may_only_be_read_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KeyValueCache(folder=tmp_path).put("x", entry(10))

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "utime", refuse)
    cache = KeyValueCache(folder=tmp_path)
    assert cache.get("x") is not None
    assert (cache.stats().disk_hits, cache.stats().disk_errors) == (1, 0)


def _write_for_ever(folder: Path, start: int, room: int) -> None:
    cache = KeyValueCache(max_bytes=0, folder=folder, max_disk_bytes=room)
    for number in itertools.cycle([*range(start, 40), *range(start)]):
        cache.put(str(number), [(torch.full((2, 4000, 8), float(number)), torch.zeros(2, 4000, 8))])


def test_a_store_whose_writers_are_killed_serves_intact_entries_and_keeps_to_its_room(tmp_path: Path) -> None:
    """Fifty kills, of two processes that write at the same time."""
    room = 5 * len(to_bytes(WRITTEN_FOR_EVER, digest_of("0", ""))) + 100
    draw, processes = random.Random(0), multiprocessing.get_context("fork")
    unfinished = 0
    for _ in range(25):
        writers = [processes.Process(target=_write_for_ever, args=(tmp_path, start, room)) for start in (0, 7)]
        for writer in writers:
            writer.start()
        time.sleep(draw.uniform(0.005, 0.05))
        for writer in writers:
            writer.kill()
            writer.join()
        unfinished += len(list(tmp_path.glob("*.unfinished")))
        assert size_of(tmp_path) <= room
        cache = KeyValueCache(folder=tmp_path)
        found = {number: cache.get(str(number)) for number in range(40)}
        for number, served in found.items():
            assert served is None or torch.equal(served[0][0], torch.full((2, 4000, 8), float(number)))
        assert cache.stats().damaged == 0
    assert any(found.values())
    assert unfinished, "at least one writer was killed while it wrote"


@pytest.mark.skipif(not hasattr(os, "fork") or os.getuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user_holds_nothing_for_this_one(request: pytest.FixtureRequest) -> None:
    outside = TemporaryDirectory()  # those of pytest lie in a folder that other users cannot enter
    request.addfinalizer(outside.cleanup)
    Path(outside.name).chmod(0o755)
    folder = Path(outside.name) / "cache"
    cache = KeyValueCache(folder=folder)
    cache.put("x", entry(10))
    child = os.fork()
    if not child:
        os.setuid(65534)
        try:
            found = KeyValueCache(0, folder=folder).get("x") is not None
        except BaseException:  # noqa: BLE001 - nothing of the parent's test may run on here
            os._exit(2)
        os._exit(int(found))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert KeyValueCache(folder=folder).get("x") is not None
