"""Output of every command: text that is safe for a terminal, tables, JSON, errors; and output folders."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from invariant_rag.errors import InvariantRAGError, OutOfMemory
from invariant_rag.shown import clean, reason

_PROSE = {"about", "cost", "detail", "models", "paper", "settings"}  # columns that are wrapped in a narrow terminal


def prepare_terminal() -> None:
    """Show what the encoding of the terminal lacks as escapes, and nothing of what pypdf logs: errors say it."""
    logging.getLogger("pypdf").addHandler(logging.NullHandler())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_table(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows that share their keys as a table, or as JSON."""
    if as_json:
        print_json(rows)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1 if len(rows[0]) > 6 else 2, 0, 0))
    shown = [{column: _cell(value) for column, value in row.items()} for row in rows]
    for column in rows[0]:
        heading, prose = column.replace("_", "\n"), column in _PROSE
        cells = [*heading.splitlines(), *(row[column] for row in shown)]
        needed = min(16, max(len(word) for cell in cells for word in cell.split())) if prose else max(map(len, cells))
        table.add_column(heading, overflow="fold", no_wrap=not prose, min_width=needed)
    for row in shown:
        table.add_row(*map(Text, row.values()))
    console = Console()
    # In a terminal narrower than the narrowest table, the terminal wraps the lines: nothing is cut off.
    least = console.measure(table, options=console.options.update(max_width=1_000)).minimum
    Console(width=max(console.width, least)).print(table)


def _cell(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else clean(value)


def print_json(document: object) -> None:
    """Print indented JSON to stdout."""
    typer.echo(json.dumps(document, indent=2, default=str))


def print_text(text: str, *, style: str = "", end: str = "\n") -> None:
    """Print text to stdout. Documents are not trusted: markup is literal, and control characters are replaced."""
    Console(soft_wrap=True, highlight=False).print(Text(clean(text), style=style), end=end)


def print_error(message: str, hint: str) -> None:
    """Print an error in red, and its hint, to stderr."""
    print_note(f"error: {message}", style="red")
    if hint:
        print_note(hint, style="")


def print_skipped(error: InvariantRAGError) -> None:
    """Print in yellow, to stderr, which document could not be read."""
    print_warning(f"skipped {error}")


def print_warning(message: str) -> None:
    """Print a warning in yellow, to stderr."""
    print_note(message, style="yellow")


def print_note(message: str, *, style: str = "dim") -> None:
    """Print a note to stderr, so that it is not in the way of what a command prints."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(clean(message), style=style))


_UsageError: Any = typer.BadParameter.__base__  # of click, or of the copy of it in typer
_EXPECTED = {  # of an option, by the kind of pydantic's error
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "float_parsing": "a number",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
}


def _describe_usage(error: Any) -> tuple[str, str]:
    """Return what is wrong with a command line, and where its command is described."""
    hint = f"See `{error.ctx.command_path} --help`." if error.ctx else ""
    errors: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if not errors:  # of the command itself, or of a typer without pydantic
        return error.format_message().removeprefix("Invalid value: "), hint
    choices = getattr(getattr(error.param, "type_descriptor", None), "choices", None)
    expected = _EXPECTED.get(errors[0]["type"], errors[0]["msg"]).format(**errors[0].get("ctx", {}))
    expected = f"one of {', '.join(map(str, choices))}" if choices else expected
    return f"{error.param.opts[0]}: expected {expected}, got {str(errors[0]['input'])[:60]}", hint


@contextmanager
def handle_errors() -> Iterator[None]:
    """Print an error of usage, the library or the file system as one red line with its hint, and exit with code 2."""
    try:
        yield
    except InvariantRAGError as error:
        print_error(str(error), error.hint)
        raise typer.Exit(2) from None
    except _UsageError as error:
        is_help = type(error).__name__ == "NoArgsIsHelpError"
        print_text(error.format_message()) if is_help else print_error(*_describe_usage(error))
        raise typer.Exit(2) from None
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
            raise
        print_error(f"out of memory: {error}", OutOfMemory.hint)
        raise typer.Exit(2) from None
    except BrokenPipeError:
        raise  # the consumer of the output has ended, as in `... | head`
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print_error(f"{where}{reason(error)}", "Look at the permissions and the space of the disk, and at --out.")
        raise typer.Exit(2) from None
