"""A cache of keys and values of sets and of single segments, reused by later prompts in any segment order.

Cached tensors are bitwise identical to recomputed ones, so an answer from a warm cache equals one from a cold cache bit
for bit. (On a GPU, the uncached sets of a batch share a forward pass, and are identical up to rounding.) There are two
kinds of entries. A *set* entry serves prompts whose texts and sets before the suffix are equal. A *segment* entry, for
methods whose segments do not attend to each other, is computed once after its prefix and serves every set with it.

On disk, an entry is a safetensors file `invariant-rag-NAMESPACE-DIGEST.safetensors`, which other programs can read:
tensors `0.keys`, `0.values`, `1.keys`... of each layer, `[H_kv, T, D]`, keys as they were rotated; and the metadata
`sha256`, the `checksum` of name and tensors, so that an entry that was renamed is as wrong as a damaged one. A checksum
proves that nothing happened to a file by accident; it does not prove who wrote it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import mkstemp
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load, save

from invariant_rag.checks import check_number, check_path, check_text
from invariant_rag.errors import DamagedEntry, InvalidChoice, UnusableFile
from invariant_rag.files import make_folder, read_bytes
from invariant_rag.generation.digest import digest_of
from invariant_rag.locks import ForkSafeLock
from invariant_rag.shown import shown

Entry = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each layer, `[H_kv, T, D]` each
EntryLayout = Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]]  # shape and dtype of both, of each layer

_LOCK = "key-value-cache.lock"
_LOCK_SECONDS = 30.0
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheStats:
    """Statistics of a cache.

    A damaged entry is not what was stored under its key, by checksum, name, shape or dtype: it is removed, and a miss.
    Failed reads and writes of the disk are logged: an entry is then a miss, or stored in memory only.
    """

    hits: int = 0  # lookups with an entry, in memory or on disk
    misses: int = 0
    disk_hits: int = 0  # hits that were loaded from disk
    evictions: int = 0  # from memory, because it was full
    damaged: int = 0
    disk_errors: int = 0
    entries: int = 0  # in memory
    bytes: int = 0  # of these


class KeyValueCache:
    """A thread-safe LRU cache of keys and values, in memory and optionally on disk.

    Several models, methods and processes may share a cache: the model and its choices are part of each key.

    Keys and values reveal the documents they were computed from. Files can be read by their owner alone (0600, in a
    folder of 0700; one that existed keeps its mode). Whoever may write to the folder may change answers.

    Args:
        max_bytes: Capacity in memory. A larger entry is not stored in memory.
        device: Device on which entries are stored. None: the device that computed them.
        folder: Folder for entries on disk. None: memory only. Several processes may write to it, and may be killed
            while writing. Nothing else in it is touched.
        max_disk_bytes: Capacity on disk, with what is being written; the least recently used files are removed. A
            larger entry is not stored on disk.
        namespace: Such as the name of a tenant. Entries of one namespace are never served to another.

    Raises:
        UnusableFile: The folder cannot be created.
    """

    def __init__(
        self,
        max_bytes: int = 1 << 30,
        *,
        device: str | torch.device | None = None,
        folder: str | Path | None = None,
        max_disk_bytes: int = 10 << 30,
        namespace: str = "",
    ) -> None:
        self._max_bytes = check_number("max_bytes", max_bytes, 0)
        try:
            self._device = None if device is None else torch.device(device)
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidChoice(f"device: expected a device, got {shown(device)}", hint=str(error)) from error
        self._namespace = check_text("namespace", namespace)
        room = check_number("max_disk_bytes", max_disk_bytes, 0)
        self._disk = None if folder is None else _Folder(check_path("folder", folder), room, namespace)
        settings: dict[str, Any] = {"folder": folder, "max_disk_bytes": room, "namespace": namespace}
        self._settings = {"max_bytes": max_bytes, "device": self._device, **settings}
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._bytes, self._counts = 0, Counter[str]()
        self._lock = ForkSafeLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings without the entries: a copy starts empty, with the same capacities and folder."""
        return partial(KeyValueCache, **self._settings), ()

    def get(self, key: str, layout: EntryLayout | None = None) -> Entry | None:
        """Return an entry, or None. Its tensors are shared and must not be modified.

        With a `layout` of shapes and dtypes, an entry that has others is removed and counts as damaged.
        """
        stem, counts = self._stem(key), list[str]()
        with self._lock:
            entry = self._entries.get(stem)
        try:
            if entry is None and self._disk is not None:
                entry, counts = self._disk.read(stem), ["disk_hits"]
            if entry is not None and layout is not None and layout_of(entry) != layout:
                raise DamagedEntry(f"{stem}: its keys and values have other shapes or dtypes")
        except FileNotFoundError:
            pass
        except OSError as error:
            _logger.warning("cannot read an entry: %s", error)
            counts = ["disk_errors"]
        except DamagedEntry as error:
            _logger.warning("removing a damaged entry, %s", error)
            entry, counts = None, ["damaged"]
            if self._disk is not None:
                with suppress(OSError):  # already removed by another process, or no permission
                    self._disk.file(stem).unlink()
        with self._lock:
            self._counts.update([*counts, "misses" if entry is None else "hits"])
            if entry is None:
                self._remove(stem)
            else:
                self._remember(stem, entry)
        return entry

    def put(self, key: str, entry: Entry) -> None:
        """Store an entry: keys and values of at least one layer."""
        stem = self._stem(key)
        try:
            tensors = [isinstance(each, torch.Tensor) for keys, values in entry for each in (keys, values)]
        except (TypeError, ValueError):
            tensors = []
        if not tensors or not all(tensors):
            raise InvalidChoice(f"expected keys and values of at least one layer, got {shown(entry)}")
        with self._lock:
            self._remember(stem, entry)
        if self._disk is not None:
            try:
                self._disk.write(stem, entry)
            except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
                _logger.warning("cannot write an entry to %s: %s", self._disk.path, error)
                with self._lock:
                    self._counts["disk_errors"] += 1

    def clear(self) -> None:
        """Remove all entries of the namespace, also from disk; UnusableFile if these cannot be removed."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0
        try:
            if self._disk is not None:
                self._disk.clear()
        except (OSError, NotImplementedError) as error:
            raise UnusableFile(f"cannot clear the folder: {error}") from error

    def stats(self) -> CacheStats:
        """Return the statistics of the cache."""
        with self._lock:
            return CacheStats(**self._counts, entries=len(self._entries), bytes=self._bytes)

    def _stem(self, key: str) -> str:
        return digest_of(check_text("key", key), self._namespace)

    def _remember(self, stem: str, entry: Entry) -> None:
        """Store an entry in memory, and evict the least recently used ones while it does not fit."""
        self._remove(stem)
        if self._device is not None:
            entry = [(keys.to(self._device), values.to(self._device)) for keys, values in entry]
        if (size := _size(entry)) > self._max_bytes:
            return
        while self._bytes + size > self._max_bytes:
            self._remove(next(iter(self._entries)))
            self._counts["evictions"] += 1
        self._entries[stem] = entry
        self._bytes += size

    def _remove(self, stem: str) -> None:
        if (entry := self._entries.pop(stem, None)) is not None:
            self._bytes -= _size(entry)


def _size(entry: Entry) -> int:
    return sum([tensor.nbytes for pair in entry for tensor in pair])


def layout_of(entry: Entry) -> EntryLayout:
    """Return shape and dtype of the keys and of the values of each layer."""
    return [[(tuple(each.shape), each.dtype) for each in pair] for pair in entry]


def checksum(name: str, tensors: dict[str, torch.Tensor]) -> str:
    """Return the SHA-256 of the name of a file and of its tensors, contiguous and on the CPU, in hexadecimal."""
    return hashlib.sha256(name.encode() + save(tensors)).hexdigest()


def write_entry(entry: Entry, name: str) -> bytes:
    """Return the content of the file of an entry."""
    tensors = {
        f"{layer}.{side}": tensor.contiguous().cpu()
        for layer, pair in enumerate(entry)
        for side, tensor in zip(("keys", "values"), pair, strict=True)
    }
    return save(tensors, {"sha256": checksum(name, tensors)})


def read_entry(path: Path) -> Entry:
    """Read the file of an entry, on the CPU; DamagedEntry if it holds none, or not the one of its name."""
    content = read_bytes(path)
    try:
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        if header["__metadata__"]["sha256"] != checksum(path.name, tensors):
            raise ValueError("its checksum is another one")
        entry = [(tensors.pop(f"{layer}.keys"), tensors.pop(f"{layer}.values")) for layer in range(len(tensors) // 2)]
        if tensors or not entry:
            raise ValueError(f"expected keys and values of each layer, got {sorted(tensors)[:4]}")
    except (SafetensorError, ValueError, KeyError) as error:
        raise DamagedEntry(f"{path.name}: {error}") from error
    return entry


@dataclass(frozen=True)
class _Folder:
    """The files of a cache. There is one writer at a time: what is unfinished when it begins was left by a dead one."""

    path: Path
    max_bytes: int
    namespace: str

    def __post_init__(self) -> None:
        make_folder(self.path, 0o700)

    def file(self, stem: str) -> Path:
        """Return the path of an entry, or with `*` a pattern for all of the namespace."""
        return self.path / f"invariant-rag-{digest_of(self.namespace)[:16]}-{stem}.safetensors"

    def read(self, stem: str) -> Entry:
        entry = read_entry(self.file(stem))
        with suppress(OSError):  # no permission: the file is used, but its age is not updated
            os.utime(self.file(stem))
        return entry

    def write(self, stem: str, entry: Entry) -> None:
        """Write an entry, unless it is larger than the room; the least recently used ones of all namespaces make it."""
        content = write_entry(entry, self.file(stem).name)
        if len(content) > self.max_bytes:
            return
        with self._only_writer():
            files = []
            for path in self._files("invariant-rag-*.safetensors"):
                with suppress(FileNotFoundError):
                    files.append((path.stat().st_mtime, path.stat().st_size, path))
            total = len(content) + sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if total <= self.max_bytes:
                    break
                path.unlink(missing_ok=True)
                total -= size
            handle, unfinished = mkstemp(".unfinished", "invariant-rag-", self.path)  # has the mode 0600
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
                Path(unfinished).replace(self.file(stem))
            finally:
                Path(unfinished).unlink(missing_ok=True)

    def clear(self) -> None:
        with self._only_writer():
            for path in self._files(self.file("*").name):
                path.unlink(missing_ok=True)

    @contextmanager
    def _only_writer(self) -> Iterator[None]:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(self.path / _LOCK, timeout=_LOCK_SECONDS, mode=0o600).acquire(poll_interval=0.005):
            for path in self._files("invariant-rag-*.unfinished"):
                path.unlink(missing_ok=True)
            yield

    def _files(self, pattern: str) -> list[Path]:
        return [path for path in self.path.glob(pattern) if path.is_file()]
