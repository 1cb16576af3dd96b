"""A cache of keys and values of sets and of single segments, reused by later prompts in any segment order.

Cached tensors are bitwise identical to recomputed ones, so an answer from a warm cache equals one from a cold cache bit
for bit. (On a GPU, sets that a batch lacks are read together, and are identical up to rounding.) There are two kinds of
entries. A *set* entry serves prompts whose texts and sets before the suffix are equal. A *segment* entry, for methods
whose segments do not see each other, is computed once after its prefix and serves every set with that segment.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from invariant_rag.checks import check_number, check_path, check_text
from invariant_rag.errors import InvalidChoice
from invariant_rag.generation.kv_cache_files import DiskStore, Entry, stem_of
from invariant_rag.generation.kv_cache_redis import RedisStore
from invariant_rag.locks import ForkSafeLock
from invariant_rag.shown import shown

EntryLayout = Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]]
"""What an entry should look like: shape and dtype of the keys and of the values of each layer."""


@dataclass(frozen=True)
class CacheStats:
    """Statistics of a cache.

    Attributes:
        hits: Lookups that found an entry, in memory or on disk.
        misses: Lookups that did not.
        disk_hits: Hits that were loaded from disk, or from Redis.
        evictions: Entries evicted from memory because it was full.
        damaged: Entries that are not what was stored under their key, by checksum, name, shape or dtype; they are
            removed and count as misses.
        disk_errors: Failed reads and writes (disk full, no permission, Redis down...); each is logged. An entry that
            cannot be read counts as a miss, and one that cannot be written is stored in memory only.
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
    """A thread-safe LRU cache of keys and values, in memory and optionally on disk or in Redis.

    Several models, methods and processes may share a cache: the model and its choices are part of each key.

    Keys and values tell the documents they were computed from. Files can be read by their owner alone (0600, in a
    folder of 0700; one that existed keeps its mode). Whoever may write to the folder may change answers.

    Args:
        max_bytes: Capacity in memory. A larger entry is not stored in memory.
        device: Device on which entries are stored. None: the device that computed them.
        folder: Folder for entries on disk. None: memory only. Several processes may write to it, and may be killed
            while writing. Nothing else in it is touched.
        max_disk_bytes: Capacity on disk, with what is being written; the least recently used files are removed. A
            larger entry is not stored on disk; 0: nothing is.
        redis_url: Address of a Redis server for entries that several machines share, instead of a folder; see
            `RedisStore`. How much it stores, and what it removes, is its own business.
        namespace: Such as the name of a tenant. Entries of one namespace are never served to another, so that nobody
            can find out, by asking, what somebody else has asked.

    Raises:
        ExtraRequired: Redis is wanted, and its client is not installed.
        InvalidChoice: A capacity is no whole number of at least 0, another argument has a wrong type, or there are both
            a folder and Redis.
        UnusableFile: The folder cannot be created.
    """

    def __init__(
        self,
        max_bytes: int = 1 << 30,
        *,
        device: str | torch.device | None = None,
        folder: str | Path | None = None,
        max_disk_bytes: int = 10 << 30,
        redis_url: str | None = None,
        namespace: str = "",
    ) -> None:
        if isinstance(max_bytes, str | Path):
            raise InvalidChoice(
                f"max_bytes: expected at least 0, got {shown(max_bytes)}",
                hint="For a folder: KeyValueCache(folder=...).",
            )
        folder = None if folder is None else check_path("folder", folder)
        self._max_bytes = check_number("max_bytes", max_bytes, 0)
        self._device = _as_device(device)
        self._namespace = check_text("namespace", namespace)
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._stats = CacheStats()
        self._lock = ForkSafeLock()
        room = check_number("max_disk_bytes", max_disk_bytes, 0)
        if folder is not None and redis_url is not None:
            raise InvalidChoice("expected a folder or redis_url, got both", hint="Entries are stored in one place.")
        self._store: DiskStore | RedisStore | None = None
        if folder is not None:
            self._store = DiskStore(folder, room, self._namespace)
        elif redis_url is not None:
            self._store = RedisStore(check_text("redis_url", redis_url), self._namespace)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings without the entries: a copy starts empty, with the same capacities and store."""
        settings: dict[str, Any] = {"max_bytes": self._max_bytes, "device": self._device, "namespace": self._namespace}
        if isinstance(self._store, DiskStore):
            settings |= {"folder": self._store.folder, "max_disk_bytes": self._store.max_bytes}
        elif self._store is not None:
            settings["redis_url"] = self._store.url
        return _restore, (settings,)

    def get(self, key: str, layout: EntryLayout | None = None) -> Entry | None:
        """Return an entry, or None. Its tensors are shared and must not be modified.

        Args:
            key: The key.
            layout: What the entry should look like; another one is removed and counts as damaged. None: anything.
        """
        stem = stem_of(check_text("key", key), self._namespace)
        with self._lock:
            entry = self._entries.get(stem)
        failure, from_disk = None, 0
        if entry is None and self._store is not None:
            entry, failure = self._store.read(stem)
            from_disk = int(entry is not None)
        if entry is not None and layout is not None and layout_of(entry) != layout:
            self._discard(stem)
            entry, failure = None, "damaged"
        with self._lock:
            if failure is not None:
                self._count(**{failure: 1})
            if entry is None:
                self._count(misses=1)
            else:
                self._count(hits=1, disk_hits=from_disk)
                if from_disk:
                    self._remember(stem, entry)
                elif stem in self._entries:
                    self._entries.move_to_end(stem)
        return entry

    def is_stored(self, key: str) -> bool:
        """Return whether the folder, or Redis, has an entry, without reading it; it then counts as used now."""
        return self._store is not None and self._store.touch(stem_of(check_text("key", key), self._namespace))

    def discard(self, key: str) -> None:
        """Forget one entry, in memory and in the folder or Redis; nothing happens if there is none."""
        stem = stem_of(check_text("key", key), self._namespace)
        with self._lock:
            self._remove(stem)
        if self._store is not None:
            self._store.discard(stem)

    def put(self, key: str, entry: Entry) -> None:
        """Store an entry.

        Raises:
            InvalidChoice: It has no layer, or a layer is no pair of tensors.
        """
        stem = stem_of(check_text("key", key), self._namespace)
        if not _is_entry(entry):
            raise InvalidChoice(f"expected keys and values of at least one layer, got {shown(entry)}")
        with self._lock:
            self._remember(stem, entry)
        if self._store is not None and not self._store.write(stem, entry):
            with self._lock:
                self._count(disk_errors=1)

    def clear(self) -> None:
        """Remove all entries of the namespace, also from disk or Redis. Nothing else there is removed.

        Raises:
            UnusableFile: Those on disk cannot be removed.
            UnusableStore: Those in Redis cannot be removed.
        """
        with self._lock:
            self._entries.clear()
            self._stats = replace(self._stats, entries=0, bytes=0)
        if self._store is not None:
            self._store.clear()

    def stats(self) -> CacheStats:
        """Return the statistics of the cache."""
        with self._lock:
            return self._stats

    def _discard(self, stem: str) -> None:
        with self._lock:
            self._remove(stem)
        if self._store is not None:
            self._store.discard(stem)

    def _remember(self, stem: str, entry: Entry) -> None:
        """Store an entry in memory, and evict the least recently used ones while it does not fit."""
        if self._device is not None:
            entry = [(keys.to(self._device), values.to(self._device)) for keys, values in entry]
        self._remove(stem)
        size = _size(entry)
        if size > self._max_bytes:
            return
        while self._stats.bytes + size > self._max_bytes:
            self._remove(next(iter(self._entries)))
            self._count(evictions=1)
        self._entries[stem] = entry
        self._count(entries=1, bytes=size)

    def _remove(self, stem: str) -> None:
        entry = self._entries.pop(stem, None)
        if entry is not None:
            self._count(entries=-1, bytes=-_size(entry))

    def _count(self, **changes: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + by for name, by in changes.items()})


def _is_entry(value: Any) -> bool:
    pairs = isinstance(value, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value)
    return pairs and bool(value) and all(isinstance(each, torch.Tensor) for pair in value for each in pair)


def _size(entry: Entry) -> int:
    return sum(tensor.nbytes for pair in entry for tensor in pair)


def _restore(settings: dict[str, Any]) -> KeyValueCache:
    return KeyValueCache(**settings)


def _as_device(device: Any) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidChoice(f"device: expected a device, got {shown(device)}", hint=str(error)) from error


def layout_of(entry: Entry) -> EntryLayout:
    """Return what an entry looks like."""
    return [[(tuple(each.shape), each.dtype) for each in pair] for pair in entry]


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
