"""The command line `invariant-rag`: one file per command, assembled here."""

from __future__ import annotations

from typing import Annotated

import typer

from invariant_rag import __version__
from invariant_rag.cli import audit, bench, models
from invariant_rag.cli.ask import ask
from invariant_rag.cli.console import accept_any_text, print_text
from invariant_rag.cli.reproduce import reproduce
from invariant_rag.cli.search_dimension import search_dimension
from invariant_rag.cli.serve import serve

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(ask)
app.command()(models.models)
app.command("search-dimension")(search_dimension)
app.add_typer(bench.app, name="bench")
app.command()(reproduce)
app.add_typer(audit.app, name="audit")
app.command()(serve)
for _listing in (models.methods, models.interventions, models.orderings):
    app.command()(_listing)


def _print_version(requested: bool) -> None:
    if requested:
        print_text(f"invariant-rag {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Answers from documents that do not depend on the order in which the documents are listed."""
    del version  # its callback has printed it
    accept_any_text()
