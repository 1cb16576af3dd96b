"""What every command prints with: text that is safe for a terminal, tables, JSON, errors in red, progress."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from invariant_rag.errors import InvariantRAGError

_PROSE = {"about", "cost", "detail", "models", "paper", "settings"}
"""Columns that are broken into lines where a terminal is narrow."""

# Control characters but tab and newline, halves of surrogate pairs, and what turns the direction of writing around.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def print_table(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows that share their keys as a table, or as JSON."""
    if as_json:
        print_json(rows)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1 if len(rows[0]) > 6 else 2, 0, 0))
    shown = [{column: {True: "yes", False: "no"}.get(value, value) for column, value in row.items()} for row in rows]
    for column in rows[0]:
        heading, prose = column.replace("_", "\n"), column in _PROSE
        cells = [*heading.splitlines(), *(row[column] for row in shown)]
        needed = min(16, max(len(word) for cell in cells for word in cell.split())) if prose else max(map(len, cells))
        table.add_column(heading, overflow="fold", no_wrap=not prose, min_width=needed)
    for row in shown:
        table.add_row(*map(Text, row.values()))
    console = Console()
    # Where a terminal is narrower than the table can be, the terminal breaks the lines: nothing is cut off.
    least = console.measure(table, options=console.options.update(max_width=1_000)).minimum
    Console(width=max(console.width, least)).print(table)


def print_json(document: object) -> None:
    """Print indented JSON to stdout."""
    typer.echo(json.dumps(document, indent=2, default=str))


def say(text: str, *, style: str = "", end: str = "\n") -> None:
    """Print to stdout. Documents are not trusted: neither markup nor control characters reach the terminal."""
    Console(soft_wrap=True, highlight=False).print(Text(_UNSAFE.sub("\ufffd", text), style=style), end=end)


def complain(message: str, hint: str) -> None:
    """Print an error, in red, and what to do about it to stderr."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text(f"error: {message}", style="red"))
    if hint:
        console.print(Text(hint))


@contextmanager
def errors_in_red() -> Iterator[None]:
    """Turn the library's errors into one red line, a hint, and exit code 2."""
    try:
        yield
    except InvariantRAGError as error:
        complain(str(error), error.hint)
        raise typer.Exit(2) from None


@contextmanager
def progress(label: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr; it pulses where the work cannot be counted. Yield what moves it one step."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
        bar.update(task, total=total or 1, completed=total or 1)
