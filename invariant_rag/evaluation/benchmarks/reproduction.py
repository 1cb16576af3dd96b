"""One published table, measured again: which runs it takes, and its cells beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from invariant_rag.errors import InvalidChoice
from invariant_rag.evaluation.benchmarks.published import Column, Comparison, Row, Table, compared
from invariant_rag.evaluation.benchmarks.runner import Plan, Run, run

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel

_Key: TypeAlias = tuple[tuple[str, str, float | None], str, tuple[tuple[str, Any], ...]]


def rows_to_measure(table: Table, model: str | None, names: Sequence[str] = ()) -> list[Row]:
    """Return the rows of a table for this model; for a model that is not in it, each reader without numbers.

    Args:
        table: The table.
        model: Hub id or folder; None for the embedded model.
        names: Rows to keep, by their names in the table. Empty: all.

    Raises:
        InvalidChoice: The table has no row of that name.
    """
    rows = table.rows_of(model) if model else []
    if not rows:
        readers = {row.reader: row for row in reversed(table.rows) if row.method}
        blank = (None,) * len(table.columns)
        rows = [replace(row, model=model or "", values=blank) for row in reversed(readers.values())]
    known = [row.name for row in rows]
    if unknown := [name for name in names if name not in known]:
        raise InvalidChoice(f"rows: expected names among {', '.join(known)}, got {', '.join(unknown)}")
    return [row for row in rows if not names or row.name in names]


def plans(rows: Sequence[Row], columns: Sequence[Column], base: Plan) -> dict[_Key, Plan]:
    """Return the runs that these cells take: one per reader, benchmark and settings. `base` has everything else."""
    found = {}
    for row in rows:
        for column, value in zip(columns, row.values, strict=True):
            blank = value is None and any(each is not None for each in row.values)
            if row.method and not blank:
                found[_key(row, column)] = replace(
                    base,
                    benchmark=column.benchmark,
                    settings=column.settings,
                    method=row.method,
                    ordering=row.ordering,
                    alpha=row.alpha,
                )
    return found


def reproduce(
    table: Table,
    base: Plan,
    out: Path,
    *,
    names: Sequence[str] = (),
    resume: bool = False,
    model: InvariantModel | None = None,
    actors: int = 0,
    on_run: Callable[[Plan, int, int], None] | None = None,
    on_record: Callable[[], None] | None = None,
) -> list[Comparison]:
    """Run what a published table takes, and return its cells beside ours, row by row.

    Args:
        table: The table.
        base: Model, data, limit and everything else that the table does not prescribe.
        out: Folder of the runs.
        names: Rows to measure. Empty: all of this model.
        resume: Go on with runs of the same settings.
        model: The model, where it is loaded already.
        actors: Ray actors. 0: this process.
        on_run: Called with the plan before each run, with its number of cases and of those answered already.
        on_record: Called after each new record.
    """
    rows = rows_to_measure(table, base.model, names)
    wanted = plans(rows, table.columns, base)
    if model is None and not actors and wanted:
        model = next(iter(wanted.values())).load()
    runs: dict[_Key, Run] = {}
    for key, plan in wanted.items():

        def started(cases: int, done: int, plan: Plan = plan) -> None:
            if on_run:
                on_run(plan, cases, done)

        runs[key] = run(plan, out, resume=resume, model=model, actors=actors, on_start=started, on_record=on_record)
    return [_cell(table, row, place, runs) for row in rows for place in range(len(table.columns))]


def _cell(table: Table, row: Row, place: int, runs: Mapping[_Key, Run]) -> Comparison:
    column = table.columns[place]
    found = runs.get(_key(row, column))
    return compared(table, row, column, row.values[place], found.records if found else [])


def _key(row: Row, column: Column) -> _Key:
    return row.reader, column.benchmark, tuple(sorted(column.settings.items()))
