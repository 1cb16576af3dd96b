"""Print the lowest release of each dependency that pyproject.toml allows, and of some extras, as constraints for pip.

`--without NAME` leaves a dependency out.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
EXTRAS = ("retrieval", "plots", "evaluation")
"""Extras whose lowest releases are tested, too."""
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


def main() -> None:
    """Print one line for each dependency."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without", action="append", default=[], metavar="NAME")
    left_out = parser.parse_args().without
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    extras = [each for extra in EXTRAS for each in project["optional-dependencies"][extra]]
    pins = [lowest(each) for each in [*project["dependencies"], *extras] if not each.startswith(project["name"])]
    sys.stdout.write("".join(f"{pin}\n" for pin in pins if pin.partition("==")[0] not in left_out))


if __name__ == "__main__":
    main()
