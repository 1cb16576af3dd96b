"""Find and read the data files of benchmarks: at a path, in the folder INVARIANT_RAG_DATA, or by download."""

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
"""`hub://owner/name/path` is a file of a dataset on the Hugging Face Hub."""


@dataclass
class DataSource:
    """Finds the data files of one benchmark, and records which of them were read.

    Attributes:
        path: A file, or a folder of files under the names that the loader asks for. None: the folder of the environment
            variable INVARIANT_RAG_DATA, then the public URL.
        digests: SHA-256 of every file that was read, by name; part of the key of a run.
    """

    path: Path | None = None
    digests: dict[str, str] = field(default_factory=dict)

    def file(self, name: str, public: str | None) -> Path:
        """Return the path itself if it is a file, else the file of that name.

        Args:
            name: Name of the file, or its path within a folder.
            public: URL to download it from. None: there is none.

        Raises:
            DatasetUnavailable: The file is not here and cannot be downloaded.
        """
        if self.path is not None and self.path.is_file():
            return self._with_digest(self.path, self.path.name)
        folder = self.path or (Path(os.environ["INVARIANT_RAG_DATA"]) if os.environ.get("INVARIANT_RAG_DATA") else None)
        if folder is not None and (folder / name).is_file():
            return self._with_digest(folder / name, name)
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
        return self._with_digest(download(public), name)

    def file_beside(self, path: Path) -> Path:
        """Record the digest of a further file, and return the file."""
        return self._with_digest(path, f"{path.parent.name}/{path.name}")

    def _with_digest(self, path: Path, name: str) -> Path:
        with path.open("rb") as file:
            self.digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        return path


def cache_folder() -> Path:
    """Return the folder of downloaded files: INVARIANT_RAG_CACHE, or `invariant-rag` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    default = (Path(base) if base else Path.home() / ".cache") / "invariant-rag"
    return Path(os.environ.get("INVARIANT_RAG_CACHE") or default) / "benchmarks"


def download(url: str) -> Path:
    """Return a local copy of a public file, which is downloaded once.

    Raises:
        DatasetUnavailable: The download failed.
    """
    if url.startswith(HUB):
        from huggingface_hub import hf_hub_download

        owner, name, inner = url.removeprefix(HUB).split("/", 2)
        try:
            return Path(hf_hub_download(f"{owner}/{name}", inner, repo_type="dataset"))
        except (OSError, ValueError) as error:  # the client's own errors derive from these
            raise DatasetUnavailable(f"{url} cannot be downloaded: {error}") from error
    target = cache_folder() / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rsplit("/", 1)[-1]
    if target.is_file():
        return target
    try:
        if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in {"", "0", "false", "no"}:
            raise OSError("HF_HUB_OFFLINE forbids downloads")
        with urlopen(Request(url), timeout=60) as response:  # noqa: S310 - the URLs are constants of the loaders
            content = response.read()
    except OSError as error:
        raise DatasetUnavailable(f"{url} cannot be downloaded: {error}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    partial.write_bytes(content)
    partial.replace(target)
    return target


def read_examples(path: Path, member: str | None = None) -> list[Any]:
    """Read the examples of a .json, .jsonl, .parquet or .zip file; .gz may follow.

    Args:
        path: The file. A .json file with a single object is one example.
        member: Name of the file within a .zip.

    Raises:
        InvalidDataset: It cannot be read in the format of its suffix.
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


def get_field(example: Any, name: str, where: str) -> Any:
    """Return a field of an example.

    Raises:
        InvalidDataset: There is no such field; the message says in which example.
    """
    if not isinstance(example, dict) or name not in example:
        known = sorted(example) if isinstance(example, dict) else type(example).__name__
        raise InvalidDataset(f"{where}: expected a field {name!r}, got {known}")
    return example[name]
