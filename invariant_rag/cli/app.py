"""The command line `invariant-rag`: one file per command, assembled here.

Commands of other packages are entry points of the group `invariant_rag.commands`, each a `typer.Typer`, loaded when
it is called.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from invariant_rag import __version__
from invariant_rag.cli import models
from invariant_rag.cli.ask import ask
from invariant_rag.cli.audit import audit
from invariant_rag.cli.console import handle_errors, prepare_terminal, print_text
from invariant_rag.cli.serve import serve
from invariant_rag.errors import InvalidChoice

PLUGINS = "invariant_rag.commands"
_OURS = dict.fromkeys(("bench", "reproduce"), "pip install ./benchmarks")
"""Commands of this repository's own packages, and how a clone installs them."""


class _Commands(TyperGroup):
    """The core's commands, and those of other packages; handles the errors of all, of --help and of --version."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the core's commands, then those of packages."""
        return list(dict.fromkeys([*super().list_commands(ctx), *sorted({*_OURS, *entry_points(group=PLUGINS).names})]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the core's command of that name, else the one of a package; None if there is none."""
        return super().get_command(ctx, cmd_name) or _command_of_package(cmd_name)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with handle_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with handle_errors():
            return super().invoke(ctx)

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            with handle_errors():
                return super().main(*args, **extra)
        except typer.Exit as error:
            sys.exit(error.exit_code)


def _command_of_package(name: str) -> Any:
    """Return the command of a package, or one that says how to install it; None if no package has that name."""
    plugins = entry_points(group=PLUGINS, name=name)
    if not plugins and name not in _OURS:
        return None
    loaded: Any = typer.Typer(add_completion=False, rich_markup_mode=None)
    for entry in plugins:
        try:
            loaded = entry.load()
        except (ImportError, AttributeError) as error:
            raise InvalidChoice(f"the command {name!r} of {entry.value!r} cannot be imported: {error}") from error
        if not isinstance(loaded, typer.Typer):
            raise InvalidChoice(f"the command {name!r}: expected a typer.Typer at {entry.value!r}, got {loaded!r}")
    if not plugins:
        taking_all = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

        @loaded.command(context_settings=taking_all, help=f"Not installed: {_OURS[name]}")  # type: ignore[untyped-decorator]
        def say() -> None:
            missing = f"{name} is a command of a package that is not installed"
            raise InvalidChoice(missing, hint=f"In a clone: {_OURS[name]}")

    command = typer.main.get_command(loaded)
    command.name = name
    return command


app = typer.Typer(cls=_Commands, invoke_without_command=True, rich_markup_mode=None, pretty_exceptions_enable=False)
for _command in (ask, models.models, audit, serve, models.methods, models.interventions, models.orderings):
    app.command()(_command)


_GREETING = f"""\
invariant-rag {__version__}: answers that do not depend on the order in which documents are listed.

Try it; these need no network, no GPU and no documents of yours:

  invariant-rag ask --check-order 10   one question over ten documents, in eleven orders: who changes the answer?
  invariant-rag methods                how segments attend to each other, and what each method costs

Then with your own documents and model:

  invariant-rag ask "Who approves travel?" --docs FOLDER --model Qwen/Qwen2.5-7B-Instruct

All commands: invariant-rag --help. For the Tab key: invariant-rag --install-completion"""


def _print_version(requested: bool) -> None:
    if requested:
        print_text(f"invariant-rag {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Answers from documents that do not depend on the order in which the documents are listed."""
    del version  # its callback has printed it
    prepare_terminal()
    if context.invoked_subcommand is None:
        print_text(_GREETING)
