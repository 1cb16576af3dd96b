"""Files that people name, read and written, and JSON: only typed or documented errors come out."""

from __future__ import annotations

import json
import math
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from invariant_rag.errors import UnusableFile
from invariant_rag.shown import reason

MAX_DEPTH = 100
"""Deepest nesting of JSON that is read: what comes after, such as sort keys of metadata, recurses too."""


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file; raise `OSError` for others: a named pipe would make it wait for ever."""
    check_regular(path)
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """Raise `OSError` for what is no regular file."""
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # a null character in the path
        raise OSError(f"no path of a file: {error}") from error
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
        raise OSError(f"expected a file, got {kinds.get(stat.S_IFMT(mode), 'a device')}")


def parse_json(text: str | bytes, *, finite: bool = False) -> Any:
    """Parse JSON; raise ValueError for what is none, is nested too deeply, or holds a number with thousands of digits.

    Args:
        text: The JSON.
        finite: Whether NaN and Infinity, which Python writes and JSON does not know, are refused.
    """
    try:
        document = json.loads(text, parse_constant=_refuse_constant if finite else None)
    except RecursionError:
        raise ValueError(f"expected JSON nested at most {MAX_DEPTH} deep, got far more") from None
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > MAX_DEPTH:  # type: ignore[arg-type]
        _check_depth(document)
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"expected JSON, which has no {name}")


def _check_depth(document: Any) -> None:
    level = [document]
    for _ in range(MAX_DEPTH + 1):
        below = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [inner for each in below for inner in each]
        if not level:
            return
    raise ValueError(f"expected JSON nested at most {MAX_DEPTH} deep, got more")


def encode_json(document: Any, *, indent: int | None = None, default: Any = None) -> bytes:
    r"""Return JSON as UTF-8. Half of a surrogate pair, which UTF-8 cannot hold, is written as its escape.

    >>> encode_json({"a": "\u00e9 \ud800"}).decode()
    '{"a": "é \\ud800"}'
    """
    return json.dumps(document, indent=indent, ensure_ascii=False, default=default).encode("utf-8", "backslashreplace")


def finite(document: Any) -> Any:
    """Return plain data with None for NaN and infinities, which JSON does not have, though Python writes them."""
    if isinstance(document, dict):
        return {key: finite(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [finite(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document


def make_folder(folder: Path) -> Path:
    """Create a folder for output, if it does not exist, and return it; raise `UnusableFile` where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise UnusableFile(
            f"cannot make the folder {str(folder)!r}: {reason(error)}", hint="Choose another folder (--out)."
        ) from error
    return folder


def write_file(path: Path, content: bytes) -> None:
    """Write a file as a whole, or raise `UnusableFile`: a killed process, or a full disk, leaves the one before it."""
    partial = path.parent / f"{path.name}.{os.getpid()}.part"
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):
            partial.unlink(missing_ok=True)
        raise UnusableFile(f"cannot write {str(path)!r}: {reason(error)}") from error
