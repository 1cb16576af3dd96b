"""Print the lowest release of each dependency that pyproject.toml allows, as constraints for pip."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
LOWER_BOUND = re.compile(r"(?P<name>[\w.-]+)(?:\[.*?\])?\s*>=\s*(?P<version>[\w.]+)")


def lowest(requirement: str) -> str:
    """Return `name==version` for a requirement of the form `name>=version`.

    Raises:
        ValueError: The requirement has no lower bound.
    """
    found = LOWER_BOUND.match(requirement)
    if found is None:
        raise ValueError(f"pyproject.toml: expected a lower bound (name>=version), got {requirement!r}")
    return f"{found['name']}=={found['version']}"


if __name__ == "__main__":
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    sys.stdout.write("".join(f"{lowest(each)}\n" for each in project["dependencies"]))
