"""A cache of keys and values of sets and of single segments, reused by later prompts in any segment order.

Cached tensors are bitwise identical to recomputed ones, so an answer from a warm cache equals one from a cold cache bit
for bit. There are two kinds of entries. A *set* entry serves prompts whose texts and sets before the suffix are equal.
A *segment* entry, for methods whose segments do not see each other, is computed once after its prefix and serves every
set with that segment.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from time import time
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from invariant_rag.errors import InvalidChoice

Entry = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, `[H_kv, T, D]` each."""

_SUFFIX = ".kv"
_TEMPORARY_PREFIX = "unfinished-"
_STALE_SECONDS = 3600.0  # age at which a temporary file belongs to a writer that was killed

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheStats:
    """Statistics of a cache.

    Attributes:
        hits: Lookups that found an entry, in memory or on disk.
        misses: Lookups that did not.
        disk_hits: Hits that were loaded from disk.
        evictions: Entries evicted from memory because it was full.
        damaged: Files on disk with a wrong checksum; they are removed and count as misses.
        disk_errors: Failed reads and writes (disk full, no permission...); each is logged. An entry that cannot be read
            counts as a miss, and one that cannot be written is stored in memory only.
        entries: Entries in memory.
        bytes: Their total size.
    """

    hits: int = 0
    misses: int = 0
    disk_hits: int = 0
    evictions: int = 0
    damaged: int = 0
    disk_errors: int = 0
    entries: int = 0
    bytes: int = 0


class KeyValueCache:
    """A thread-safe LRU cache of keys and values, in memory and optionally on disk.

    Several models, methods and processes may share a cache: the model and its choices are part of each key.

    Args:
        max_bytes: Capacity in memory. A larger entry is not stored in memory.
        device: Device on which entries are stored. None: the device that computed them.
        folder: Folder for entries on disk. None: memory only. Several processes may write to it, and may be killed
            while writing.
        max_disk_bytes: Capacity on disk; the least recently used files are removed.

    Raises:
        InvalidChoice: A capacity is negative.
    """

    def __init__(
        self,
        max_bytes: int = 1 << 30,
        *,
        device: str | torch.device | None = None,
        folder: str | Path | None = None,
        max_disk_bytes: int = 10 << 30,
    ) -> None:
        if min(max_bytes, max_disk_bytes) < 0:
            raise InvalidChoice(f"max_bytes, max_disk_bytes: expected at least 0, got {max_bytes} and {max_disk_bytes}")
        self._max_bytes = max_bytes
        self._device = device
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._stats = CacheStats()
        self._lock = RLock()
        self._disk = None if folder is None else _DiskStore(Path(folder), max_disk_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings without the entries: a copy starts empty, with the same capacities and folder."""
        disk = None if self._disk is None else (self._disk.folder, self._disk.max_bytes)
        return _restore, (self._max_bytes, self._device, disk)

    def get(self, key: str) -> Entry | None:
        """Return an entry, or None. Its tensors are shared and must not be modified."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                self._count(hits=1)
                return entry
        entry, failure = (None, None) if self._disk is None else self._disk.read(key)
        with self._lock:
            if failure is not None:
                self._count(**{failure: 1})
            if entry is None:
                self._count(misses=1)
            else:
                self._count(hits=1, disk_hits=1)
                self._store(key, entry)
        return entry

    def put(self, key: str, entry: Entry) -> None:
        """Store an entry."""
        with self._lock:
            self._store(key, entry)
        if self._disk is not None and not self._disk.write(key, entry):
            with self._lock:
                self._count(disk_errors=1)

    def clear(self) -> None:
        """Remove all entries, also from disk."""
        with self._lock:
            self._entries.clear()
            self._stats = replace(self._stats, entries=0, bytes=0)
        if self._disk is not None:
            self._disk.clear()

    def stats(self) -> CacheStats:
        """Return the statistics of the cache."""
        with self._lock:
            return self._stats

    def _store(self, key: str, entry: Entry) -> None:
        """Store an entry in memory, and evict the least recently used ones while it does not fit."""
        if self._device is not None:
            entry = [(keys.to(self._device), values.to(self._device)) for keys, values in entry]
        self._remove(key)
        size = _size(entry)
        if size > self._max_bytes:
            return
        while self._stats.bytes + size > self._max_bytes:
            self._remove(next(iter(self._entries)))
            self._count(evictions=1)
        self._entries[key] = entry
        self._count(entries=1, bytes=size)

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._count(entries=-1, bytes=-_size(entry))

    def _count(self, **changes: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + by for name, by in changes.items()})


def _size(entry: Entry) -> int:
    return sum(tensor.nbytes for pair in entry for tensor in pair)


def _restore(max_bytes: int, device: str | torch.device | None, disk: tuple[Path, int] | None) -> KeyValueCache:
    if disk is None:
        return KeyValueCache(max_bytes, device=device)
    return KeyValueCache(max_bytes, device=device, folder=disk[0], max_disk_bytes=disk[1])


class _DiskStore:
    """One file per entry: a SHA-256 checksum, then safetensors. Files are written to a temporary name and renamed."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.max_bytes = folder, max_bytes

    def read(self, key: str) -> tuple[Entry | None, str | None]:
        """Return the entry, or None, and the field of `CacheStats` that counts a failure, or None."""
        path = self.folder / (key + _SUFFIX)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None, None
        except OSError as error:
            _logger.warning("cannot read %s: %s", path, error)
            return None, "disk_errors"
        with suppress(OSError):  # no permission: the file is used, but its age is not updated
            os.utime(path)
        checksum, body = content[:32], content[32:]
        try:
            if hashlib.sha256(body).digest() != checksum:
                raise SafetensorError("checksum mismatch")
            tensors = load(body)
        except SafetensorError:
            with suppress(OSError):  # already removed by another process, or no permission
                path.unlink()
            return None, "damaged"
        return [(tensors[f"{layer}.keys"], tensors[f"{layer}.values"]) for layer in range(len(tensors) // 2)], None

    def write(self, key: str, entry: Entry) -> bool:
        """Write an entry; return whether that succeeded."""
        names = ("keys", "values")
        tensors = {
            f"{layer}.{name}": tensor.contiguous().cpu()
            for layer, pair in enumerate(entry)
            for name, tensor in zip(names, pair, strict=True)
        }
        body = save(tensors)
        partial = self.folder / f"{_TEMPORARY_PREFIX}{uuid4().hex}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                file.write(hashlib.sha256(body).digest())
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.folder / (key + _SUFFIX))
            self._evict()
        except OSError as error:
            _logger.warning("cannot write an entry to %s: %s", self.folder, error)
            with suppress(OSError):  # the folder may have been removed
                partial.unlink()
            return False
        return True

    def clear(self) -> None:
        """Remove all entries."""
        for path in self.folder.glob("*" + _SUFFIX):
            path.unlink(missing_ok=True)

    def _evict(self) -> None:
        """Remove the least recently used files until the others fit, and stale temporary files.

        Other processes may do so at the same time.
        """
        for path in self.folder.glob(_TEMPORARY_PREFIX + "*"):
            with suppress(FileNotFoundError):
                if time() - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()
        files = []
        for path in self.folder.glob("*" + _SUFFIX):
            try:
                files.append((path.stat().st_mtime, path.stat().st_size, path))
            except FileNotFoundError:
                continue
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files)[:-1]:
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def key_of(*parts: Any) -> str:
    """Return the key of an entry: a digest of everything that determines its tensors."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def concatenate(entries: Sequence[Entry], device: torch.device) -> Entry:
    """Concatenate entries along the token dimension, on a device."""
    layers = zip(*entries, strict=True)
    return [
        (
            torch.cat([keys.to(device) for keys, _ in layer], dim=1),
            torch.cat([values.to(device) for _, values in layer], dim=1),
        )
        for layer in layers
    ]
