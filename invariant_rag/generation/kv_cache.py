"""A cache of keys and values of sets and of single segments, reused by later prompts in any segment order.

Cached tensors are bitwise identical to recomputed ones, so an answer from a warm cache equals one from a cold cache bit
for bit. (On a GPU, the uncached sets of a batch share a forward pass, and are identical up to rounding.) There are two
kinds of entries. A *set* entry serves prompts whose texts and sets before the suffix are equal. A *segment* entry, for
methods whose segments do not attend to each other, is computed once after its prefix and serves every set with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from invariant_rag.checks import check_number, check_path, check_text
from invariant_rag.errors import InvalidChoice
from invariant_rag.generation.digest import digest_of
from invariant_rag.generation.kv_cache_files import DiskStore, Entry
from invariant_rag.locks import ForkSafeLock
from invariant_rag.shown import shown

EntryLayout = Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]]
"""Shape and dtype of the keys and of the values of each layer of an entry."""


@dataclass(frozen=True)
class CacheStats:
    """Statistics of a cache.

    Attributes:
        hits: Lookups that found an entry, in memory or on disk.
        misses: Lookups that did not.
        disk_hits: Hits that were loaded from disk.
        evictions: Entries evicted from memory because it was full.
        damaged: Entries that are not what was stored under their key, by checksum, name, shape or dtype; they are
            removed and count as misses.
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

    Keys and values reveal the documents they were computed from. Files can be read by their owner alone (0600, in a
    folder of 0700; one that existed keeps its mode). Whoever may write to the folder may change answers.

    Args:
        max_bytes: Capacity in memory. A larger entry is not stored in memory.
        device: Device on which entries are stored. None: the device that computed them.
        folder: Folder for entries on disk. None: memory only. Several processes may write to it, and may be killed
            while writing. Nothing else in it is touched.
        max_disk_bytes: Capacity on disk, with what is being written; the least recently used files are removed. A
            larger entry is not stored on disk; 0: nothing is.
        namespace: Such as the name of a tenant. Entries of one namespace are never served to another, so that nobody
            can find out, by asking, what somebody else has asked.

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
        if isinstance(max_bytes, str | Path):
            raise InvalidChoice(
                f"max_bytes: expected at least 0, got {shown(max_bytes)}",
                hint="For a folder: KeyValueCache(folder=...).",
            )
        self._max_bytes = check_number("max_bytes", max_bytes, 0)
        try:
            self._device = None if device is None else torch.device(device)
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidChoice(f"device: expected a device, got {shown(device)}", hint=str(error)) from error
        self._namespace = check_text("namespace", namespace)
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._stats = CacheStats()
        self._lock = ForkSafeLock()
        room = check_number("max_disk_bytes", max_disk_bytes, 0)
        self._store = None if folder is None else DiskStore(check_path("folder", folder), room, self._namespace)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings without the entries: a copy starts empty, with the same capacities and folder."""
        settings: dict[str, Any] = {"max_bytes": self._max_bytes, "device": self._device, "namespace": self._namespace}
        if self._store is not None:
            settings |= {"folder": self._store.folder, "max_disk_bytes": self._store.max_bytes}
        return partial(KeyValueCache, **settings), ()

    def get(self, key: str, layout: EntryLayout | None = None) -> Entry | None:
        """Return an entry, or None. Its tensors are shared and must not be modified.

        Args:
            key: The key.
            layout: Shapes and dtypes of the entry; one with others is removed and counts as damaged. None: any.
        """
        stem = digest_of(check_text("key", key), self._namespace)
        with self._lock:
            entry = self._entries.get(stem)
        counts = {}
        if entry is None and self._store is not None:
            entry, failure = self._store.read(stem)
            counts = {"disk_hits": 1} if entry is not None else {failure: 1} if failure else {}
        if entry is not None and layout is not None and layout_of(entry) != layout:
            entry, counts = None, {"damaged": 1}
            if self._store is not None:
                self._store.discard(stem)
        with self._lock:
            if counts:  # damaged, or read from disk
                self._remove(stem)
            if entry is not None and counts:
                self._remember(stem, entry)
            elif stem in self._entries:
                self._entries.move_to_end(stem)
            self._count(**counts, **{"misses" if entry is None else "hits": 1})
        return entry

    def put(self, key: str, entry: Entry) -> None:
        """Store an entry: keys and values of at least one layer."""
        stem = digest_of(check_text("key", key), self._namespace)
        if not _is_entry(entry):
            raise InvalidChoice(f"expected keys and values of at least one layer, got {shown(entry)}")
        with self._lock:
            self._remove(stem)
            self._remember(stem, entry)
        if self._store is not None and not self._store.write(stem, entry):
            with self._lock:
                self._count(disk_errors=1)

    def clear(self) -> None:
        """Remove all entries of the namespace, also from disk. Nothing else there is removed."""
        with self._lock:
            self._entries.clear()
            self._stats = replace(self._stats, entries=0, bytes=0)
        if self._store is not None:
            self._store.clear()

    def stats(self) -> CacheStats:
        """Return the statistics of the cache."""
        with self._lock:
            return self._stats

    def _remember(self, stem: str, entry: Entry) -> None:
        """Store an entry in memory, and evict the least recently used ones while it does not fit."""
        if self._device is not None:
            entry = [(keys.to(self._device), values.to(self._device)) for keys, values in entry]
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
    if not isinstance(value, list | tuple) or not value:
        return False
    wrong = [pair for pair in value if not isinstance(pair, list | tuple) or len(pair) != 2]
    return not wrong and not [each for pair in value for each in pair if not isinstance(each, torch.Tensor)]


def _size(entry: Entry) -> int:
    return sum([tensor.nbytes for pair in entry for tensor in pair])


def layout_of(entry: Entry) -> EntryLayout:
    """Return shape and dtype of the keys and of the values of each layer."""
    return [[(tuple(each.shape), each.dtype) for each in pair] for pair in entry]
