"""Keys and values of sets and of single segments, kept for prompts that hold them again, in any order.

What is kept was computed exactly as it would be computed anew, so an answer from the cache equals a cold one bit for
bit. Two kinds of entries exist. A *set* serves prompts with the same texts and the same set before their last text. A
*segment* serves methods whose segments do not see each other: it is read once behind its prefix, and then in any set.
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
"""Keys and values `[H_kv, T, D]` of each layer."""

_SUFFIX = ".kv"
_UNFINISHED = "unfinished-"
_STALE = 3600.0  # seconds

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheStats:
    """What a cache did so far.

    Attributes:
        hits: Entries that were found, in memory or on disk.
        misses: Entries that were not.
        disk_hits: Those of the hits that came from disk.
        evictions: Entries that left memory for want of room.
        damaged: Files on disk that were not what had been written; they were removed and count as misses.
        disk_errors: Reads and writes that the disk refused (no room, no permission...); each is logged. An entry that
            could not be read counts as a miss, and one that could not be written is kept in memory only.
        entries: Entries in memory.
        bytes: Their size.
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
    """A least-recently-used store of keys and values, in memory and, if wanted, on disk. Safe for threads.

    Several models, methods and processes may share one: what an entry belongs to is part of its key.

    Args:
        max_bytes: Room in memory. An entry that is larger than all of it is not kept there.
        device: Where entries are kept. None: where they were computed.
        folder: Folder of a disk store. None: there is none. Several processes may write to it, and be killed meanwhile.
        max_disk_bytes: Room on disk; those that were not used for longest are removed.

    Raises:
        InvalidChoice: A size is negative.
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
            raise InvalidChoice(f"expected sizes of at least 0 bytes, got {max_bytes} and {max_disk_bytes}")
        self._max_bytes = max_bytes
        self._device = device
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._stats = CacheStats()
        self._lock = RLock()
        self._disk = None if folder is None else _Disk(Path(folder), max_disk_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process begins empty, with the same room and the same folder."""
        disk = None if self._disk is None else (self._disk.folder, self._disk.max_bytes)
        return _copied, (self._max_bytes, self._device, disk)

    def get(self, key: str) -> Entry | None:
        """Return an entry, or None. The tensors are shared: they must not be changed."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                self._count(hits=1)
                return entry
        entry, wrong = (None, None) if self._disk is None else self._disk.read(key)
        with self._lock:
            if wrong is not None:
                self._count(**{wrong: 1})
            if entry is None:
                self._count(misses=1)
            else:
                self._count(hits=1, disk_hits=1)
                self._keep(key, entry)
        return entry

    def put(self, key: str, entry: Entry) -> None:
        """Keep an entry."""
        with self._lock:
            self._keep(key, entry)
        if self._disk is not None and not self._disk.write(key, entry):
            with self._lock:
                self._count(disk_errors=1)

    def clear(self) -> None:
        """Forget everything, on disk too."""
        with self._lock:
            self._entries.clear()
            self._stats = replace(self._stats, entries=0, bytes=0)
        if self._disk is not None:
            self._disk.clear()

    def stats(self) -> CacheStats:
        """Return what the cache did so far."""
        with self._lock:
            return self._stats

    def _keep(self, key: str, entry: Entry) -> None:
        if self._device is not None:
            entry = [(keys.to(self._device), values.to(self._device)) for keys, values in entry]
        self._drop(key)
        size = _size(entry)
        if size > self._max_bytes:
            return
        while self._stats.bytes + size > self._max_bytes:
            self._drop(next(iter(self._entries)))
            self._count(evictions=1)
        self._entries[key] = entry
        self._count(entries=1, bytes=size)

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._count(entries=-1, bytes=-_size(entry))

    def _count(self, **changes: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + by for name, by in changes.items()})


def _size(entry: Entry) -> int:
    return sum(tensor.nbytes for pair in entry for tensor in pair)


def _copied(max_bytes: int, device: str | torch.device | None, disk: tuple[Path, int] | None) -> KeyValueCache:
    if disk is None:
        return KeyValueCache(max_bytes, device=device)
    return KeyValueCache(max_bytes, device=device, folder=disk[0], max_disk_bytes=disk[1])


class _Disk:
    """One file for each entry: a checksum, and safetensors. A file appears under its name when it is complete."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.max_bytes = folder, max_bytes

    def read(self, key: str) -> tuple[Entry | None, str | None]:
        """Return the entry, if it is there and intact, and what was wrong, if anything, as `CacheStats` calls it."""
        path = self.folder / (key + _SUFFIX)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None, None
        except OSError as error:
            _logger.warning("%s cannot be read: %s", path, error)
            return None, "disk_errors"
        with suppress(OSError):  # of a folder that others write, entries are read, and age
            os.utime(path)
        checksum, body = content[:32], content[32:]
        try:
            if hashlib.sha256(body).digest() != checksum:
                raise SafetensorError("the checksum does not fit")
            tensors = load(body)
        except SafetensorError:
            with suppress(OSError):  # somebody else may have removed it, or own it
                path.unlink()
            return None, "damaged"
        return [(tensors[f"{layer}.keys"], tensors[f"{layer}.values"]) for layer in range(len(tensors) // 2)], None

    def write(self, key: str, entry: Entry) -> bool:
        """Write an entry; return whether the disk took it."""
        names = ("keys", "values")
        tensors = {
            f"{layer}.{name}": tensor.contiguous().cpu()
            for layer, pair in enumerate(entry)
            for name, tensor in zip(names, pair, strict=True)
        }
        body = save(tensors)
        partial = self.folder / f"{_UNFINISHED}{uuid4().hex}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                file.write(hashlib.sha256(body).digest())
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.folder / (key + _SUFFIX))
            self._make_room()
        except OSError as error:
            _logger.warning("an entry cannot be written to %s: %s", self.folder, error)
            with suppress(OSError):  # it may be the folder that is gone
                partial.unlink()
            return False
        return True

    def clear(self) -> None:
        for path in self.folder.glob("*" + _SUFFIX):
            path.unlink(missing_ok=True)

    def _make_room(self) -> None:
        """Remove the files that were not used for longest, until the others fit; other processes may do so too.

        What a writer that was killed left unfinished goes too, once nobody can still be writing it.
        """
        for path in self.folder.glob(_UNFINISHED + "*"):
            with suppress(FileNotFoundError):
                if time() - path.stat().st_mtime > _STALE:
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
    """Return the key of an entry: a digest of everything that its tensors follow from."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def concatenate(entries: Sequence[Entry], device: torch.device) -> Entry:
    """Concatenate entries along the tokens."""
    layers = zip(*entries, strict=True)
    return [
        (
            torch.cat([keys.to(device) for keys, _ in layer], dim=1),
            torch.cat([values.to(device) for _, values in layer], dim=1),
        )
        for layer in layers
    ]
