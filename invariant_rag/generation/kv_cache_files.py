"""Files of keys and values: one entry each, bound to its key, private, within room, and safe from writers that die.

The file of an entry is `FOLDER/STEM.kv`, where the stem is `digest_of(key, namespace)`: 64 hexadecimal digits. It is a
safetensors file, so other programs can read it without a model, and without this library:

- tensors `0.keys`, `0.values`, `1.keys`...: keys and values of each layer, `[H_kv, T, D]`, keys as they were rotated;
- metadata `format` (`FORMAT`), `stem`, `namespace` (the SHA-256 of its name), and `sha256`, which `checksum` computes
  from both and from the name, dtype, shape and bytes of each tensor. An entry that was renamed is as wrong as a damaged
  one.

`read_entry` reads and checks a file. Files get the mode 0600 and a folder that is made gets 0700, since whoever reads
keys and values can tell the documents. A checksum proves that nothing happened to a file by accident; it does not prove
who wrote it.

Writers write to `invariant-rag-RANDOM.unfinished` and rename it, one at a time: they hold the lock
`key-value-cache.lock`. So what is unfinished when a writer gets the lock was left by one that died, and there is never
more than one such file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load, save

from invariant_rag.errors import DamagedEntry, UnusableFile
from invariant_rag.files import parse_json, read_bytes
from invariant_rag.shown import shown

Entry = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, `[H_kv, T, D]` each."""

FORMAT = "invariant-rag key-value cache 1"
_ENTRY = re.compile(r"[0-9a-f]{64}\.kv")
_UNFINISHED = re.compile(r"invariant-rag-[0-9a-f]{32}\.unfinished")
_LOCK = "key-value-cache.lock"
_LOCK_SECONDS = 30.0
_MOST_HEADER_BYTES = 1 << 20

_logger = logging.getLogger(__name__)


def checksum(stem: str, namespace: str, tensors: dict[str, torch.Tensor]) -> str:
    """Return the digest of an entry, in hexadecimal.

    Args:
        stem: The name of its file, without `.kv`.
        namespace: The SHA-256 of the name of its namespace, in hexadecimal.
        tensors: Its tensors by name, contiguous and on the CPU.
    """
    digest = hashlib.sha256(f"{FORMAT}\n{stem}\n{namespace}\n".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def to_bytes(entry: Entry, stem: str, namespace: str = "") -> bytes:
    """Return the content of an entry's file. The namespace is that of the stem."""
    namespace = _sha256(namespace)
    tensors = {
        f"{layer}.{name}": tensor.contiguous().cpu()
        for layer, pair in enumerate(entry)
        for name, tensor in zip(("keys", "values"), pair, strict=True)
    }
    metadata = {"format": FORMAT, "stem": stem, "namespace": namespace, "sha256": checksum(stem, namespace, tensors)}
    return save(tensors, metadata)


def read_entry(path: Path) -> Entry:
    """Read and check the file of an entry, on the CPU.

    Raises:
        OSError: The file does not exist or cannot be read, or is no regular file.
        DamagedEntry: It holds no entry, or not the one that its name says.
    """
    content = read_bytes(path)
    try:
        metadata = _metadata(content)
        tensors = load(content)
    except (SafetensorError, ValueError) as error:
        raise DamagedEntry(f"{path.name}: no safetensors file with metadata: {error}") from error
    if metadata.get("format") != FORMAT or metadata.get("stem") != path.stem:
        raise DamagedEntry(f"{path.name}: expected an entry of this name, got {shown(metadata)}")
    if metadata.get("sha256") != checksum(path.stem, str(metadata.get("namespace")), tensors):
        raise DamagedEntry(f"{path.name}: its checksum is another one")
    names = [(f"{layer}.keys", f"{layer}.values") for layer in range(len(tensors) // 2)]
    if not names or {each for pair in names for each in pair} != set(tensors):
        raise DamagedEntry(f"{path.name}: expected keys and values of each layer, got {sorted(tensors)[:4]}")
    return [(tensors[keys], tensors[values]) for keys, values in names]


def _metadata(content: bytes) -> dict[str, Any]:
    """Return the metadata of a safetensors file from its beginning.

    Raises:
        ValueError: There is none.
    """
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > _MOST_HEADER_BYTES:
        raise ValueError("expected the header of a safetensors file")
    header = parse_json(content[8 : 8 + length])
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise ValueError("expected metadata")
    return metadata


class DiskStore:
    """The entries of a folder.

    Args:
        folder: The folder; created if it does not exist.
        max_bytes: Room for all files of all namespaces, with unfinished ones; the least recently used are removed.
        namespace: The namespace of what is read and written.

    Raises:
        UnusableFile: The folder cannot be created.
    """

    def __init__(self, folder: Path, max_bytes: int, namespace: str) -> None:
        self.folder, self.max_bytes, self._namespace = folder, max_bytes, namespace
        try:
            _make_private(folder)
        except (OSError, ValueError) as error:
            raise UnusableFile(f"cannot make the folder {str(folder)!r}: {error}", hint="Choose another.") from error

    def read(self, stem: str) -> tuple[Entry | None, str | None]:
        """Return the entry, or None, and the field of `CacheStats` that counts a failure, or None."""
        path = self._path(stem)
        try:
            entry = read_entry(path)
        except FileNotFoundError:
            return None, None
        except OSError as error:
            _logger.warning("cannot read %s: %s", path, error)
            return None, "disk_errors"
        except DamagedEntry as error:
            _logger.warning("removing a damaged entry, %s", error)
            self.discard(stem)
            return None, "damaged"
        with suppress(OSError):  # no permission: the file is used, but its age is not updated
            os.utime(path)
        return entry, None

    def write(self, stem: str, entry: Entry) -> bool:
        """Write an entry, unless there is no room for it; return whether nothing failed."""
        content = to_bytes(entry, stem, self._namespace)
        if len(content) > self.max_bytes:
            return True
        partial = self.folder / f"invariant-rag-{uuid4().hex}.unfinished"
        try:
            with self._only_writer():
                self._make_room(len(content))
                try:
                    with open(partial, "wb", opener=_open_private) as file:
                        file.write(content)
                        file.flush()
                        os.fsync(file.fileno())
                    partial.replace(self._path(stem))
                finally:
                    partial.unlink(missing_ok=True)
        except (OSError, NotImplementedError) as error:  # a file system without locks
            _logger.warning("cannot write an entry to %s: %s", self.folder, error)
            return False
        return True

    def discard(self, stem: str) -> None:
        """Remove one file, whatever it holds."""
        with suppress(OSError):  # already removed by another process, or no permission
            self._path(stem).unlink()

    def clear(self) -> None:
        """Remove all entries of the namespace, and what dead writers left.

        Raises:
            UnusableFile: They cannot be removed.
        """
        try:
            with self._only_writer():
                self._remove_unfinished()
                for path in self._entries():
                    if _is_entry(path, self._namespace):
                        path.unlink(missing_ok=True)
        except (OSError, NotImplementedError) as error:
            raise UnusableFile(f"cannot clear {str(self.folder)!r}: {error}") from error

    @contextmanager
    def _only_writer(self) -> Iterator[None]:
        _make_private(self.folder)
        with FileLock(self.folder / _LOCK, timeout=_LOCK_SECONDS, mode=0o600).acquire(poll_interval=0.005):
            yield

    def _make_room(self, size: int) -> None:
        """Remove what dead writers left, and the least recently used entries until there is room."""
        self._remove_unfinished()
        files = []
        for path in self._entries():
            with suppress(FileNotFoundError):
                files.append((path.stat().st_mtime, path.stat().st_size, path))
        if size + sum(each for _, each, _ in files) <= self.max_bytes:
            return
        files = [each for each in files if _is_entry(each[2])]  # reads a file each, so only if it is needed
        total = size + sum(each for _, each, _ in files)
        for _, each, path in sorted(files):
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= each

    def _remove_unfinished(self) -> None:
        for path in self.folder.iterdir():
            if _UNFINISHED.fullmatch(path.name) and not path.is_dir():
                path.unlink(missing_ok=True)

    def _entries(self) -> Sequence[Path]:
        return [path for path in self.folder.iterdir() if _ENTRY.fullmatch(path.name)]

    def _path(self, stem: str) -> Path:
        return self.folder / f"{stem}.kv"


def _is_entry(path: Path, namespace: str | None = None) -> bool:
    """Return whether a file is an entry of ours by its name and its header. None: of any namespace."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            start = file.read(8)
            metadata = _metadata(start + file.read(min(int.from_bytes(start, "little"), _MOST_HEADER_BYTES)))
    except (OSError, ValueError):
        return False
    ours = (metadata.get("format"), metadata.get("stem")) == (FORMAT, path.stem)
    return ours and (namespace is None or metadata.get("namespace") == _sha256(namespace))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_EXCL, 0o600)
