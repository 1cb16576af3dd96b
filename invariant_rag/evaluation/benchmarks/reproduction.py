"""Reproduce a published table: run the benchmarks that its cells are about, and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from invariant_rag.errors import InvalidChoice
from invariant_rag.evaluation.benchmarks.config import BenchmarkConfig
from invariant_rag.evaluation.benchmarks.published_tables import (
    Comparison,
    PublishedColumn,
    PublishedRow,
    PublishedTable,
    compare,
)
from invariant_rag.evaluation.benchmarks.runner import BenchmarkRun, run_benchmark
from invariant_rag.evaluation.progress import Progress, no_progress

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel

_Key: TypeAlias = tuple[tuple[str, str, float | None], str, tuple[tuple[str, Any], ...]]
"""Setup of the row, benchmark, and settings of the column: what a run is made for."""


def rows_to_measure(table: PublishedTable, model: str | None, names: Sequence[str] = ()) -> list[PublishedRow]:
    """Return the rows of a table for a model; for a model that is not in it, one row per setup, without numbers.

    Args:
        table: The table.
        model: Hub id or folder; None for the embedded model.
        names: Names of the rows to keep. Empty: all.

    Raises:
        InvalidChoice: The table has no row of that name.
    """
    rows = table.rows_of(model) if model else []
    if not rows:
        setups = {row.setup: row for row in reversed(table.rows) if row.method}
        blank = (None,) * len(table.columns)
        rows = [replace(row, model=model or "", values=blank) for row in reversed(setups.values())]
    known = [row.name for row in rows]
    if unknown := [name for name in names if name not in known]:
        raise InvalidChoice(f"rows: expected names among {', '.join(known)}, got {', '.join(unknown)}")
    return [row for row in rows if not names or row.name in names]


def configs_to_run(
    rows: Sequence[PublishedRow], columns: Sequence[PublishedColumn], base: BenchmarkConfig
) -> dict[_Key, BenchmarkConfig]:
    """Return the configs of the runs that these cells need: one per setup, benchmark and settings.

    Args:
        rows: Rows of the table.
        columns: Its columns.
        base: Model, data, limit and everything else that the table does not specify.
    """
    configs = {}
    for row in rows:
        for column, value in zip(columns, row.values, strict=True):
            blank = value is None and any(each is not None for each in row.values)
            if row.method and not blank:
                configs[_key(row, column)] = replace(
                    base,
                    benchmark=column.benchmark,
                    settings=column.settings,
                    method=row.method,
                    ordering=row.ordering,
                    alpha=row.alpha,
                )
    return configs


def reproduce(
    table: PublishedTable,
    base: BenchmarkConfig,
    out: Path,
    *,
    names: Sequence[str] = (),
    resume: bool = False,
    model: InvariantModel | None = None,
    actors: int = 0,
    progress: Progress = no_progress,
) -> list[Comparison]:
    """Run what the cells of a published table need, and return its cells with our numbers, row by row.

    Args:
        table: The table.
        base: Model, data, limit and everything else that the table does not specify.
        out: Folder of the runs.
        names: Names of the rows to measure. Empty: all of this model.
        resume: Continue runs of the same config.
        model: The model, if it is loaded already.
        actors: Number of Ray actors. 0: run in this process.
        progress: Shows a progress bar for each run.
    """
    rows = rows_to_measure(table, base.model, names)
    configs = configs_to_run(rows, table.columns, base)
    if model is None and not actors and configs:
        with progress("Loading"):
            model = next(iter(configs.values())).load_model()
    runs = {
        key: run_benchmark(config, out, resume=resume, model=model, actors=actors, progress=progress)
        for key, config in configs.items()
    }
    return [_cell(table, row, index, runs) for row in rows for index in range(len(table.columns))]


def _cell(table: PublishedTable, row: PublishedRow, index: int, runs: Mapping[_Key, BenchmarkRun]) -> Comparison:
    column = table.columns[index]
    found = runs.get(_key(row, column))
    return compare(table, row, column, row.values[index], found.records if found else [])


def _key(row: PublishedRow, column: PublishedColumn) -> _Key:
    return row.setup, column.benchmark, tuple(sorted(column.settings.items()))
