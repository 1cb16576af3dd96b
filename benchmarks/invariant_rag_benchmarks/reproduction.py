"""Reproduce a published table: run the benchmarks that its cells are about, and compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from invariant_rag.audit.calls import Progress, no_progress
from invariant_rag.errors import InvalidChoice

from invariant_rag_benchmarks.config import BenchmarkConfig, resolve_intervention
from invariant_rag_benchmarks.published_tables import (
    Comparison,
    PublishedColumn,
    PublishedRow,
    PublishedTable,
    Setup,
    compare,
)
from invariant_rag_benchmarks.runner import run_several

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel

_Key: TypeAlias = tuple[Setup | None, str, tuple[tuple[str, Any], ...]]
"""Setup of the row, benchmark, and settings of the column: what a run is made for."""


def rows_to_measure(
    table: PublishedTable,
    model: str | None,
    names: Sequence[str] = (),
    *,
    intervention: str | None = None,
    ensemble: str | None = None,
) -> list[PublishedRow]:
    """Return the rows of a table for a model; if it is not in it, every row that can be measured, without numbers.

    Rows about several models are returned for every model. An ensemble that no row is about is a row of its own over
    the plain model, without numbers. Kept are the rows with these names, this intervention (a file of parameters means
    `hidden-scaling`) and this ensemble; an `InvalidChoice` says that there is none.
    """
    rows = table.rows_of(model) if model else []
    blank = (None,) * len(table.columns)
    if not rows:
        setups = {(row.setup, row.oracle): row for row in reversed(table.rows) if row.setup is not None}
        rows = [replace(row, model=model or "", values=blank) for row in reversed(setups.values())]
    rows += [row for row in table.rows if not row.model]
    if ensemble is not None and not any(row.setup and row.setup.ensemble == ensemble for row in rows):
        alone = Setup("sequential", "given", ensemble=ensemble)
        rows.append(PublishedRow(model or "", ensemble, alone, False, blank))
    known = [row.name for row in rows]
    if unknown := [name for name in names if name not in known]:
        raise InvalidChoice(f"rows: expected names among {', '.join(known)}, got {', '.join(unknown)}")
    kept = [row for row in rows if not names or row.name in names]
    for attribute, wanted in (("intervention", _intervention_name(intervention)), ("ensemble", ensemble)):
        if wanted is not None:
            kept = [row for row in kept if row.setup and getattr(row.setup, attribute) == wanted]
            if not kept:
                raise InvalidChoice(f"{attribute}: expected one of a row of {table.id}, got {wanted!r}")
    return kept


def _intervention_name(described: str | None) -> str | None:
    """Return the name of an intervention; that of `hidden-scaling` for a file of its parameters."""
    resolved = resolve_intervention(described)
    return resolved if resolved is None or isinstance(resolved, str) else resolved.name


def configs_to_run(
    rows: Sequence[PublishedRow], columns: Sequence[PublishedColumn], base: BenchmarkConfig
) -> dict[_Key, BenchmarkConfig]:
    """Return the configs of the runs that these cells need: one per setup, benchmark and settings.

    `base` has what the table does not specify; a file of parameters as its intervention replaces the published ones.
    """
    configs = {}
    for row in rows:
        for column, value in zip(columns, row.values, strict=True):
            blank = value is None and any(each is not None for each in row.values)
            if row.setup is not None and column.metric and not blank:
                setup = asdict(row.setup)
                if row.setup.intervention == _intervention_name(base.intervention):
                    setup["intervention"] = base.intervention
                about: dict[str, Any] = {"benchmark": column.benchmark, "settings": column.settings, **setup}
                configs[_key(row, column)] = replace(base, **about)
    return configs


def reproduce(
    table: PublishedTable,
    base: BenchmarkConfig,
    out: Path,
    *,
    names: Sequence[str] = (),
    resume: bool = False,
    model: InvariantModel | None = None,
    progress: Progress = no_progress,
) -> list[Comparison]:
    """Run what the cells of a published table need, and return its cells with our numbers, row by row.

    `base` has the model, the data, the limit and everything else that the table does not specify; its intervention and
    ensemble choose rows. `names` are those of the rows to measure; empty: all of this model. The rest is as for
    `run_several`.
    """
    rows = rows_to_measure(table, base.model, names, intervention=base.intervention, ensemble=base.ensemble)
    configs = configs_to_run(rows, table.columns, base)
    found = run_several(list(configs.values()), out, resume=resume, model=model, progress=progress)
    runs = dict(zip(configs, found, strict=True))
    cells = []
    for row in rows:
        for column, value in zip(table.columns, row.values, strict=True):
            run = runs.get(_key(row, column)) if column.metric else None
            cells.append(compare(table, row, column, value, run.records if run else []))
    return cells


def _key(row: PublishedRow, column: PublishedColumn) -> _Key:
    return row.setup, column.benchmark, tuple(sorted(column.settings.items()))
