"""Find and read the data files of benchmarks: at a path, in the folder INVARIANT_RAG_DATA, or by download."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from invariant_rag.errors import DatasetUnavailable, ExtraRequired, InvalidDataset, InvariantRAGError
from invariant_rag.files import check_regular, parse_json, read_bytes

# What Python raises for files that are torn, encrypted, compressed by an unknown method, or no such files at all.
_UNREADABLE = (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile, csv.Error, StopIteration, RuntimeError)

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
            InvalidDataset: The path is a file of another split, as its name says.
        """
        try:
            is_file = self.path is not None and self.path.is_file()
        except OSError as error:  # a path that is too long
            raise DatasetUnavailable(f"{str(self.path)[:200]!r} cannot be read: {error}") from error
        if self.path is not None and is_file:
            _refuse_other_split(self.path.name, name)
            return self._with_digest(self.path, self.path.name)
        folder = self.path or (Path(os.environ["INVARIANT_RAG_DATA"]) if os.environ.get("INVARIANT_RAG_DATA") else None)
        if folder is not None and (folder / name).is_file():
            return self._with_digest(folder / name, name)
        if self.path is not None:
            raise DatasetUnavailable(
                f"expected a file, or a folder with {name!r}, at {str(self.path)!r}",
                hint=f"The file is public: {public}" if public else "Its format is in the benchmark's page.",
            )
        if public is None:
            raise DatasetUnavailable(
                f"expected --data: {name!r} has no public address that is known to us",
                hint="The benchmark's page shows the format.",
            )
        return self._with_digest(download(public), name)

    def folder(self, name: str) -> Path | None:
        """Return the path, or the folder INVARIANT_RAG_DATA, if it is or has a folder of that name with files in it."""
        chosen = self.path or (Path(os.environ["INVARIANT_RAG_DATA"]) if os.environ.get("INVARIANT_RAG_DATA") else None)
        if chosen is None or not chosen.is_dir():
            return None
        return next((each for each in (chosen / name, chosen) if each.name == name and each.is_dir()), None)

    def file_beside(self, path: Path) -> Path:
        """Record the digest of a further file, and return the file."""
        return self._with_digest(path, f"{path.parent.name}/{path.name}")

    def _with_digest(self, path: Path, name: str) -> Path:
        try:
            check_regular(path)
            with path.open("rb") as file:
                self.digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DatasetUnavailable(f"{str(path)!r} cannot be read: {error}") from error
        return path


_SPLITS = {
    "train": "train",
    "dev": "validation",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


def _refuse_other_split(given: str, wanted: str) -> None:
    """Refuse a file whose name says that it is of another split than the settings ask for.

    Raises:
        InvalidDataset: It is.
    """
    words = [re.findall(r"[a-z]+", name.rpartition("/")[2].lower()) for name in (given, wanted)]
    splits = [{_SPLITS[word] for word in each if word in _SPLITS} for each in words]
    if all(splits) and splits[0] != splits[1]:
        raise InvalidDataset(
            f"expected a file for these settings, such as {wanted!r}, got {given!r}",
            hint="Choose the settings of the file with --set, or rename a file whose name is wrong.",
        )


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
    """Read the examples of a .json, .jsonl, .csv (lists of texts), .parquet or .zip file; .gz may follow.

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
        content = read_bytes(path)
        if path.name.endswith(".gz"):
            content = gzip.decompress(content)
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                inner = next(each for each in archive.namelist() if each.endswith(member or ".jsonl"))
                name, content = inner, archive.read(inner)
        text = content.decode("utf-8")
        if name.endswith(".csv"):
            return list(csv.reader(io.StringIO(text, newline="")))
        # Some lists are named .jsonl, and some lines .json, in the repositories of the papers.
        if name.endswith(".jsonl") and not text.lstrip().startswith("["):
            return list(_lines(text))
        if name.endswith(".json") and _is_lines(text):
            return list(_lines(text))
        document = parse_json(text)
    except InvariantRAGError:
        raise
    except _UNREADABLE as error:
        raise InvalidDataset(f"{str(path)!r} cannot be read: {error!r}") from error
    return document if isinstance(document, list) else [document]


def _lines(text: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield parse_json(line)
            except ValueError as error:  # which counts lines within this one
                raise ValueError(f"line {number}: {str(error).partition(': line 1 ')[0]}") from error


def _is_lines(text: str) -> bool:
    """Whether a text is an object on each line: whether its first line, and no more, is an object."""
    first, _, rest = text.strip().partition("\n")
    if not rest.lstrip().startswith("{"):
        return False
    try:
        return isinstance(parse_json(first), dict)
    except ValueError:
        return False


def _parquet(path: Path) -> list[Any]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ExtraRequired("pyarrow", "evaluation") from None
    rows: list[Any] = parquet.read_table(path).to_pylist()
    return rows
