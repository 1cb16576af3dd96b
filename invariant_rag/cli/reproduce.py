"""`invariant-rag reproduce TABLE`: measure a published table again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from invariant_rag.cli.bench import (
    Actors,
    BatchSize,
    Data,
    DeviceMap,
    DType,
    Limit,
    Model,
    Out,
    Resume,
    Seed,
    TooLong,
    counting,
)
from invariant_rag.cli.console import errors_in_red, print_json, print_table, say


def reproduce(
    table: Annotated[
        str | None, typer.Argument(help="Id of a published table.", show_default="list the tables")
    ] = None,
    model: Model = None,
    rows: Annotated[
        list[str] | None, typer.Option("--row", help="A row, as the table names it. Repeatable.", show_default="all")
    ] = None,
    data: Data = None,
    limit: Limit = None,
    seed: Seed = 0,
    resume: Resume = False,
    out: Out = Path("runs"),
    batch_size: BatchSize = 8,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest output, in tokens.", show_default="the benchmark's own")
    ] = None,
    overflow: TooLong = "error",
    dtype: DType = "auto",
    device_map: DeviceMap = "auto",
    ray: Actors = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Measure a published TABLE again with MODEL, and print the published numbers beside ours.

    Without TABLE, list the tables. For a model that is not in the table, every reader of the table is measured, and
    there is nothing to print beside. Rows that take more than a method (routing...) are not measured.
    """
    with errors_in_red():
        from invariant_rag.evaluation.benchmarks.published import published_tables, resolve_table

        if table is None:
            print_table(
                [
                    {
                        "table": name,
                        "about": f"{each.paper}, {each.number}: {each.title}",
                        "models": ", ".join(dict.fromkeys(row.model.rsplit("/", 1)[-1] for row in each.rows)),
                    }
                    for name, each in published_tables().items()
                ],
                as_json,
            )
            return
        chosen = resolve_table(table)
        with counting("Loading") as (start, step):
            from transformers.utils.logging import disable_progress_bar

            from invariant_rag.evaluation.benchmarks.report import comparison_table
            from invariant_rag.evaluation.benchmarks.reproduction import reproduce as measure
            from invariant_rag.evaluation.benchmarks.runner import Plan

            disable_progress_bar()  # ours is on screen already
            base = Plan(
                benchmark=chosen.columns[0].benchmark,
                model=model,
                data=data,
                limit=limit,
                seed=seed,
                batch_size=batch_size,
                max_new_tokens=max_new_tokens,
                overflow=overflow,
                dtype=dtype,
                device_map=device_map,
            )
            found = measure(
                chosen,
                base,
                out,
                names=rows or (),
                resume=resume,
                actors=ray,
                on_run=lambda plan, cases, done: start(f"{plan.benchmark}, {plan.method} {plan.ordering}", cases, done),
                on_record=step,
            )
        if as_json:
            print_json([asdict(each) for each in found])
            return
        say(f"## {chosen.paper}, {chosen.number}: {chosen.title}\n")
        say("\n".join(comparison_table(found)))
