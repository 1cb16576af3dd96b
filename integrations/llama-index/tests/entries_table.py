"""The table of entries in the README. `python tests/entries_table.py` writes it anew."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from entries import ENTRIES

README = Path(__file__).parent.parent / "README.md"
PLACE = re.compile(r"(<!-- entries: .*? -->\n).*?(<!-- end of entries -->)", re.DOTALL)
INVARIANT = {"invariant": "yes", "warns": "no: warns"}


def table() -> str:
    """Return the entries as a Markdown table: a row for those of a topic that behave alike."""
    rows: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for entry in ENTRIES.values():
        rows[entry.topic, INVARIANT[entry.expected], entry.todo].append(entry.name)
    cells = [["entry", "invariant", "what to do"], ["---"] * 3]
    cells += [[f"{topic}: {'; '.join(names)}", *others] for (topic, *others), names in rows.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def filled(text: str) -> str:
    """Return the README with its table replaced."""
    return PLACE.sub(lambda match: f"{match[1]}\n{table()}\n\n{match[2]}", text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
