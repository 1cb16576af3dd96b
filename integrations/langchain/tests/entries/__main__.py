"""Write the table of entries of README.md anew: `python -m tests.entries`."""

from pathlib import Path

from . import ENTRIES
from .base import fill

README = Path(__file__).parent.parent.parent / "README.md"

if __name__ == "__main__":
    README.write_text(fill(README.read_text(encoding="utf-8"), ENTRIES), encoding="utf-8")
