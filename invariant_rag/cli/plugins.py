"""Commands of other packages: entry points of the group `invariant_rag.commands`, loaded when they are called."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import typer

from invariant_rag.cli.console import print_error
from invariant_rag.errors import InvalidChoice

GROUP = "invariant_rag.commands"
"""Group of the entry points. Each is a `typer.Typer`; its name is that of the command."""

_KNOWN = dict.fromkeys(("bench", "reproduce"), "pip install ./benchmarks")
"""Commands of this repository's own packages, and how a clone installs them."""


def names_of_packages() -> list[str]:
    """Return the names of the commands of packages that are installed, and of ours that are not."""
    return sorted({*_KNOWN, *entry_points(group=GROUP).names})


def command_of_package(name: str) -> Any:
    """Return the command of a package, or the one that says how to install it; None if no package has that name.

    Raises:
        InvalidChoice: The package's command cannot be imported, or is no `typer.Typer`.
    """
    found = entry_points(group=GROUP, name=name)
    if found:
        command = typer.main.get_command(_load(next(iter(found))))
    elif name in _KNOWN:
        command = typer.main.get_command(_not_installed(name))
    else:
        return None
    command.name = name
    return command


def _load(entry: EntryPoint) -> typer.Typer:
    try:
        loaded = entry.load()
    except (ImportError, AttributeError) as error:
        raise InvalidChoice(f"the command {entry.name!r} of {entry.value!r} cannot be imported: {error}") from error
    if not isinstance(loaded, typer.Typer):
        raise InvalidChoice(f"the command {entry.name!r}: expected a typer.Typer at {entry.value!r}, got {loaded!r}")
    return loaded


def _not_installed(name: str) -> typer.Typer:
    """Return a command that takes any arguments, says how to install the package, and ends with 2."""
    missing = typer.Typer(add_completion=False, rich_markup_mode=None)
    taking_all = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

    @missing.command(context_settings=taking_all, help=f"Not installed: {_KNOWN[name]}")
    def say() -> NoReturn:
        print_error(f"{name} is a command of a package that is not installed", f"In a clone: {_KNOWN[name]}")
        raise typer.Exit(2)

    return missing
