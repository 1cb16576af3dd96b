"""`invariant-rag reproduce TABLE`: measure a published table again, or list the tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from invariant_rag.cli import options
from invariant_rag.cli.console import handle_errors, print_json, print_table, print_text
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar

from invariant_rag_benchmarks.commands.bench import Resume, Runs, note_toy
from invariant_rag_benchmarks.config import BenchmarkConfig, RunConfig
from invariant_rag_benchmarks.published_tables import published_tables, reproduce, resolve_table
from invariant_rag_benchmarks.report import table as markdown_table

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command("reproduce")
@options.with_fields(RunConfig)
def reproduce_table(
    *,
    table: Annotated[
        str | None,
        typer.Argument(help="Id of a table.", show_default="list them", autocompletion=lambda: [*published_tables()]),
    ] = None,
    rows: Annotated[
        list[str] | None, typer.Option("--row", help="Name of a row of the table. Repeatable.", show_default="all")
    ] = None,
    resume: Resume = False,
    out: Runs = Path("runs"),
    as_json: options.Json = False,
    **choices: Any,
) -> None:
    """Measure a published TABLE again with MODEL, and print the published numbers beside ours.

    Without TABLE, list the tables. For a model that is not in the table, every method of the table is measured, and
    there are no published numbers. Rows of selective routing, interventions and ensembles are measured too. Cells that
    a run cannot measure are printed as "not measured", and a note under the table says why. With --intervention or
    --ensemble, only rows with it are measured; a file of a search replaces the published parameters, and an
    ensemble that the table does not have is a row without published numbers.
    """
    with handle_errors():
        if table is None:
            listed = [
                {
                    "table": name,
                    "about": f"{each.paper}, {each.number}: {each.title}",
                    "models": ", ".join(dict.fromkeys(row.model.rsplit("/", 1)[-1] for row in each.rows)),
                }
                for name, each in published_tables().items()
            ]
            print_table(listed, as_json)
            return
        chosen = resolve_table(table)
        base = BenchmarkConfig(next((each.benchmark for each in chosen.columns if each.metric), ""), **choices)
        disable_transformers_bars()
        measured = reproduce(chosen, base, out, names=rows or (), resume=resume, progress=progress_bar)
        note_toy(base.model)
        if as_json:
            print_json([asdict(each) for each in measured])
            return
        print_text(f"## {chosen.paper}, {chosen.number}: {chosen.title}\n")
        header = ["row", "column", "published", "ours", "difference"]
        print_text("\n".join(markdown_table(header, [each.cells for each in measured])))
        if chosen.note:
            print_text(f"\n{chosen.note}")
