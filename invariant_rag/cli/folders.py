"""Folders that commands write what they measured into."""

from __future__ import annotations

from pathlib import Path

from invariant_rag.errors import InvariantRAGError


def made(folder: Path) -> Path:
    """Make a folder, before anything is measured, and return it.

    Raises:
        InvariantRAGError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvariantRAGError(
            f"cannot make the folder {str(folder)!r}: {error}", hint="Choose another --out."
        ) from error
    return folder
