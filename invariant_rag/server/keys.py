"""Bearer keys: from a file, and from the environment."""

from __future__ import annotations

import os
from pathlib import Path

from invariant_rag.errors import InvalidChoice

KEY_VARIABLE = "INVARIANT_RAG_API_KEY"


OPERATOR_KEY_VARIABLE = "INVARIANT_RAG_OPERATOR_KEY"


def read_operator_key() -> str | None:
    """Return the key of the operator, from the environment; None if there is none."""
    return os.environ.get(OPERATOR_KEY_VARIABLE, "").strip() or None


def read_keys(path: Path | None) -> dict[str, str]:
    """Return the tenant of each key: from a file, and from the environment.

    Raises:
        InvalidChoice: The file cannot be read, a line is no tenant and key, or a key has two tenants.
    """
    keys = {key: "default"} if (key := os.environ.get(KEY_VARIABLE, "").strip()) else {}
    try:
        lines = path.read_text("utf-8").splitlines() if path else []
    except (OSError, ValueError) as error:
        raise InvalidChoice(f"cannot read {path}: {error}", hint="It has a line `TENANT KEY` for each key.") from error
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or keys.get(words[1], words[0]) != words[0]:
            raise InvalidChoice(
                f"{path}, line {number}: expected `TENANT KEY`, with a key that is nobody else's",
                hint="One line for each key; a tenant may have several.",
            )
        keys[words[1]] = words[0]
    return keys
