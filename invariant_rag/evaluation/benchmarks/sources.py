"""Where the files of benchmarks come from: a path, the folder INVARIANT_RAG_DATA, or their public addresses."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from invariant_rag.errors import DatasetUnavailable, ExtraRequired, InvalidDataset

HUB = "hub://"
"""`hub://owner/name/path` is a file of a dataset on the model hub."""


@dataclass
class Source:
    """The files of one benchmark, and which of them were read.

    Attributes:
        path: A file, or a folder that holds files under the names that the loader asks for. None: the folder that
            the environment variable INVARIANT_RAG_DATA names, then the public address.
        digests: SHA-256 of every file that was read, by name: part of what identifies a run.
    """

    path: Path | None = None
    digests: dict[str, str] = field(default_factory=dict)

    def file(self, name: str, public: str | None) -> Path:
        """Return the file: the path itself, or the file of that name.

        Args:
            name: Name of the file, or its path within a folder.
            public: Where it can be had from. None: nowhere that is known.

        Raises:
            DatasetUnavailable: It is neither here nor to be had.
        """
        if self.path is not None and self.path.is_file():
            return self._noted(self.path, self.path.name)
        folder = self.path or (Path(os.environ["INVARIANT_RAG_DATA"]) if os.environ.get("INVARIANT_RAG_DATA") else None)
        if folder is not None and (folder / name).is_file():
            return self._noted(folder / name, name)
        if self.path is not None:
            raise DatasetUnavailable(
                f"expected a file, or a folder with {name!r}, at {str(self.path)!r}",
                hint=f"The file is public: {public}" if public else "Its format is in the benchmark's README.",
            )
        if public is None:
            raise DatasetUnavailable(
                f"expected --data: {name!r} has no public address that is known to us",
                hint="The benchmark's README shows the format.",
            )
        return self._noted(fetched(public), name)

    def file_beside(self, path: Path) -> Path:
        """Note that a further file was read, and return it."""
        return self._noted(path, f"{path.parent.name}/{path.name}")

    def _noted(self, path: Path, name: str) -> Path:
        with path.open("rb") as file:
            self.digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        return path


def cache_folder() -> Path:
    """Where downloaded files are kept: INVARIANT_RAG_CACHE, or `invariant-rag` in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    default = (Path(base) if base else Path.home() / ".cache") / "invariant-rag"
    return Path(os.environ.get("INVARIANT_RAG_CACHE") or default) / "benchmarks"


def fetched(address: str) -> Path:
    """Return a local copy of a public file; it is downloaded once.

    Raises:
        DatasetUnavailable: It cannot be reached.
    """
    if address.startswith(HUB):
        from huggingface_hub import hf_hub_download

        owner, name, inner = address.removeprefix(HUB).split("/", 2)
        try:
            return Path(hf_hub_download(f"{owner}/{name}", inner, repo_type="dataset"))
        except (OSError, ValueError) as error:  # the client's own errors derive from these
            raise DatasetUnavailable(f"{address} cannot be had: {error}") from error
    target = cache_folder() / hashlib.sha256(address.encode()).hexdigest()[:16] / address.rsplit("/", 1)[-1]
    if target.is_file():
        return target
    try:
        if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in {"", "0", "false", "no"}:
            raise OSError("HF_HUB_OFFLINE forbids downloads")
        with urlopen(Request(address), timeout=60) as response:  # noqa: S310 - an address of ours
            content = response.read()
    except OSError as error:
        raise DatasetUnavailable(f"{address} cannot be had: {error}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    partial.write_bytes(content)
    partial.replace(target)
    return target


def read_records(path: Path, member: str | None = None) -> list[Any]:
    """Read the records of a .json, .jsonl, .parquet or .zip file; .gz may follow.

    Args:
        path: The file. A .json file that holds one object counts as one record.
        member: Name of the file within a .zip.

    Raises:
        InvalidDataset: It cannot be read as what its name says.
        ExtraRequired: It is a .parquet file, and pyarrow is not installed.
    """
    name = path.name.removesuffix(".gz")
    try:
        if name.endswith(".parquet"):
            return _parquet(path)
        content = path.read_bytes()
        if path.name.endswith(".gz"):
            content = gzip.decompress(content)
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                inner = next(each for each in archive.namelist() if each.endswith(member or ".jsonl"))
                name, content = inner, archive.read(inner)
        text = content.decode("utf-8")
        if name.endswith(".jsonl"):
            return list(_lines(text))
        document = json.loads(text)
    except (ValueError, EOFError, gzip.BadGzipFile, zipfile.BadZipFile, StopIteration) as error:
        raise InvalidDataset(f"{str(path)!r} cannot be read: {error!r}") from error
    return document if isinstance(document, list) else [document]


def _lines(text: str) -> Iterator[Any]:
    for line in text.split("\n"):
        if line.strip():
            yield json.loads(line)


def _parquet(path: Path) -> list[Any]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ExtraRequired("pyarrow", "benchmarks") from None
    rows: list[Any] = parquet.read_table(path).to_pylist()
    return rows


def entry(record: Any, name: str, where: str) -> Any:
    """Return a field of a record.

    Raises:
        InvalidDataset: It has none of that name; the message says which record it is.
    """
    if not isinstance(record, dict) or name not in record:
        known = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise InvalidDataset(f"{where}: expected a field {name!r}, got {known}")
    return record[name]
