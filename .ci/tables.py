"""Write the generated tables of the documentation; with --check, fail if they are not current."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from invariant_rag_benchmarks.published_tables import PublishedTable, published_tables
from transformers.utils.logging import set_verbosity_error

from invariant_rag.cli.models import intervention_rows, method_rows, ordering_rows
from invariant_rag.testing.families import probe_families

DOCS = Path(__file__).parent.parent / "docs"
GUARANTEES = DOCS.parent / "tests" / "laws" / "guarantees.toml"
PAGES = [
    DOCS / page
    for page in ("explanation/guarantees.md", "reference/methods.md", "reference/models.md", "numbers/published.md")
]

HEADINGS = {
    "fair": "fair by construction",
    "cost": "extra cost",
    "stock_decoding": "stock decoding",
}
"""Column headings on the pages of columns in the output of a command."""


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
        "guarantees": "\n".join(guarantees()),
        "published": "\n\n".join(map(published, published_tables().values())),
        "models": table(["supported", "what the probe saw"], supported) + "\n\n" + table(["refused, and why"], refused),
    }


def guarantees() -> Iterator[str]:
    """Yield the lines of what is guaranteed, with its tests, and of the exceptions with theirs."""
    for number, each in enumerate(tomllib.loads(GUARANTEES.read_text(encoding="utf-8"))["guarantee"], 1):
        yield f"{number}. **{each['name']}.** {each['says']} {', '.join(map(test_name, each['tests']))}"
        for exception in each.get("except", ()):
            yield f"    - *Except:* {exception['says']} {test_name(exception['test'])}"


def test_name(test: str) -> str:
    """Return how a page names a test."""
    path, _, name = test.partition("::")
    return f'<span title="{path}">`{name}`</span>'


def published(printed: PublishedTable) -> str:
    """Return one table of a paper, with its heading and its note."""
    units = ["" if column.unit == "%" else f" ({column.unit or 'number'})" for column in printed.columns]
    head = ["model", "row", *(f"{column.label}{unit}" for column, unit in zip(printed.columns, units, strict=True))]
    rows = [
        [row.model.rpartition("/")[2], row.name, *("" if value is None else f"{value:g}" for value in row.values)]
        for row in printed.rows
    ]
    about = f"{printed.title}. `invariant-rag reproduce {printed.id}` measures it."
    parts = [f"## {printed.paper}, {printed.number}", about, " ".join(printed.note.split()), table(head, rows)]
    return "\n\n".join(part for part in parts if part)


def filled(text: str, contents: Mapping[str, str]) -> str:
    """Return a page with its tables replaced."""
    for name, content in contents.items():
        place = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text = place.sub(lambda match, content=content: f"{match[1]}\n{content}\n\n{match[2]}", text)
    return text


def main() -> None:
    """Write all pages, or check them."""
    contents = tables()
    current = {page: page.read_text(encoding="utf-8") for page in PAGES}
    wanted = {page: filled(text, contents) for page, text in current.items()}
    old = [page.relative_to(DOCS.parent).as_posix() for page in PAGES if wanted[page] != current[page]]
    if "--check" in sys.argv:
        sys.exit(f"tables that are not current: {', '.join(old)}; run `make docs`" if old else 0)
    for page in PAGES:
        page.write_text(wanted[page], encoding="utf-8")


if __name__ == "__main__":
    set_verbosity_error()
    main()
