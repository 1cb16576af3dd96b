"""Find and read the data files of benchmarks: at a path, in the folder INVARIANT_RAG_DATA, or by download."""

from __future__ import annotations

import gzip
import hashlib
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from invariant_rag.errors import InvariantRAGError
from invariant_rag.files import check_regular, make_folder, parse_json, read_bytes, write_file
from invariant_rag.shown import reason

from invariant_rag_benchmarks.errors import DatasetUnavailable, InvalidDataset

HUB = "hub://"
"""`hub://owner/name/path` is a file of a dataset on the Hugging Face Hub."""
# What Python raises for files that are torn, encrypted, compressed by an unknown method, or no such files at all.
_UNREADABLE = (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile, StopIteration, RuntimeError)


@dataclass
class DataSource:
    """Finds the data files of one benchmark, and records which of them were read.

    They are at the path: a file, or a folder of files under the names that the loader asks for, up to two folders deep.
    Without one, in the folder of the environment variable INVARIANT_RAG_DATA, then at the public URL.
    """

    path: Path | None = None
    digests: dict[str, str] = field(default_factory=dict)  # SHA-256 of each file that was read; in the key of a run

    def file(self, name: str, public: str | None, **settings: Iterable[str]) -> Path:
        """Return the path itself if it is a file, else the file of that name, else a download of `public`.

        A file at the path that is named for another value of one of these settings is refused.
        """
        try:
            if (path := self._find(name, settings)) is not None:
                return self.read(path, path.name)
        except OSError as error:
            raise DatasetUnavailable(f"{str(self.path or name)[:200]!r} cannot be read: {error}") from error
        if self.path is None and public is not None:
            return self.read(download(public), name)
        where = f"at {str(self.path)!r}" if self.path else "by --data: it has no public address that is known to us"
        hint = f"The file is public: {public}" if public else "Its format is in the benchmark's page."
        raise DatasetUnavailable(f"expected a file, or a folder with {name!r}, {where}", hint=hint)

    def read(self, path: Path, name: str) -> Path:
        """Record the digest of a file, and return it."""
        check_regular(path)
        with path.open("rb") as file:
            self.digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        return path

    def _find(self, name: str, settings: Mapping[str, Iterable[str]]) -> Path | None:
        if self.path is not None and self.path.is_file():
            for setting, values in settings.items():
                if others := [each for each in values if each in self.path.name and each not in name]:
                    raise InvalidDataset(
                        f"expected a file for these settings, such as {name!r}, got {self.path.name!r}",
                        hint=f"Choose `--set {setting}={others[0]}`.",
                    )
            return self.path
        folder = self.path or os.environ.get("INVARIANT_RAG_DATA")
        patterns = (name, f"*/{name}", f"*/*/{name}") if folder else ()
        return next((path for each in patterns for path in sorted(Path(str(folder)).glob(each))), None)


def download(url: str) -> Path:
    """Return a local copy of a public file, downloaded once: in INVARIANT_RAG_CACHE, or the user's cache folder."""
    try:
        if url.startswith(HUB):
            from huggingface_hub import hf_hub_download

            owner, name, inner = url.removeprefix(HUB).split("/", 2)
            return Path(hf_hub_download(f"{owner}/{name}", inner, repo_type="dataset"))
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "invariant-rag"
        folder = Path(os.environ.get("INVARIANT_RAG_CACHE") or default) / "benchmarks"
        target = folder / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rsplit("/", 1)[-1]
        if target.is_file():
            return target
        if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in {"", "0", "false", "no"}:
            raise OSError("HF_HUB_OFFLINE forbids downloads")
        with urlopen(Request(url), timeout=60) as response:  # noqa: S310 - the URLs are constants of the loaders
            content = response.read()
    except (OSError, ValueError) as error:  # the hub client's own errors derive from these
        raise DatasetUnavailable(f"{url} cannot be downloaded: {error}") from error
    write_file(make_folder(target.parent) / target.name, content)
    return target


def read_examples(path: Path, member: str = ".jsonl") -> list[Any]:
    """Read the examples of a .json (a single object is one example), .jsonl, .parquet or .zip file; .gz may follow.

    `member` is the end of the name of the file within a .zip. An `InvalidDataset` says what cannot be read.
    """
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return list(parquet.read_table(path).to_pylist())
        content = read_bytes(path)
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                content = archive.read(next(each for each in archive.namelist() if each.endswith(member)))
        text = content.decode("utf-8")
        # Some lists are named .jsonl, and some lines .json, in the repositories of the papers.
        if text.lstrip().startswith("{") and "\n{" in text.strip():
            return list(_lines(text))
        document = parse_json(text) if text.strip() else []
    except InvariantRAGError:
        raise
    except _UNREADABLE as error:
        raise InvalidDataset(f"{str(path)!r} cannot be read: {reason(error)}") from error
    return document if isinstance(document, list) else [document]


def _lines(text: str) -> Iterator[Any]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield parse_json(line)
            except ValueError as error:  # which counts lines within this one
                raise ValueError(f"line {number}: {str(error).partition(': line 1 ')[0]}") from error
