"""Write the generated tables of README.md; with --check, fail if they are not current."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.utils.logging import set_verbosity_error

from invariant_rag.cli.models import intervention_rows, method_rows, ordering_rows
from invariant_rag.testing.families import probe_families

README = Path(__file__).parent.parent / "README.md"


HEADINGS = {
    "fair": "fair by construction",
    "training_free": "training-free",
    "cost": "extra cost",
    "stock_decoding": "stock decoding",
}
"""Column headings in the README of columns in the output of a command."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cell(value: bool | str) -> str:
    """Return yes, no, or the text."""
    return {True: "yes", False: "no"}.get(value, str(value))


def listed(rows: Sequence[Mapping[str, Any]], **headings: str) -> str:
    """Return the table of a registry with the columns of its command; names are code."""
    names = {"method", "intervention", "ordering"}
    header = [{**HEADINGS, **headings}.get(column, column) for column in rows[0]]
    cells = [[f"`{row[column]}`" if column in names else cell(row[column]) for column in row] for row in rows]
    return table(header, cells)


def tables() -> dict[str, str]:
    """Return every generated table by the name of its placeholder."""
    reports = list(probe_families())
    supported = [[report.family, report.detail] for report in reports if report.supported]
    refused = [[report.detail] for report in reports if not report.supported]
    return {
        "methods": listed(method_rows(), ordering="default ordering"),
        "interventions": listed(intervention_rows()),
        "orderings": listed(ordering_rows(), invariant="by content only"),
        "models": table(["supported", "what the probe saw"], supported) + "\n\n" + table(["refused, and why"], refused),
    }


def filled(text: str) -> str:
    """Return the README with its tables replaced."""
    for name, content in tables().items():
        place = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text = place.sub(lambda match, content=content: f"{match[1]}\n{content}\n\n{match[2]}", text)
    return text


if __name__ == "__main__":
    set_verbosity_error()
    current = README.read_text(encoding="utf-8")
    wanted = filled(current)
    if "--check" in sys.argv:
        sys.exit("README.md: its tables are not current; run `make docs`" if wanted != current else 0)
    README.write_text(wanted, encoding="utf-8")
