"""The tables of the papers, one file each in `published/`; their cells read from records, and measured again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from invariant_rag.audit.calls import Progress, no_progress
from invariant_rag.audit.statistics import Estimate, mean_interval
from invariant_rag.checks import check_name
from invariant_rag.errors import InvalidChoice

from invariant_rag_benchmarks import BENCHMARKS
from invariant_rag_benchmarks.base import Record, declared
from invariant_rag_benchmarks.config import INTERVENTIONS, BenchmarkConfig
from invariant_rag_benchmarks.report import means_by, oracle_score, record_score

if TYPE_CHECKING:
    from pathlib import Path

    from invariant_rag.generation.model import InvariantModel

_FILES = ("rotor", "pine", "hidden_scaling")
Unit: TypeAlias = Literal["%", "s", "min", ""]


@dataclass(frozen=True)
class Setup:
    """With what a row is measured: fields of a `BenchmarkConfig`."""

    method: str
    ordering: str
    alpha: float | None = None
    intervention: str | None = None
    ensemble: str | None = None


@dataclass(frozen=True)
class PublishedColumn:
    """A column of a published table: the benchmark settings and the records of a run that it is about."""

    label: str
    benchmark: str  # empty if a run cannot measure the column, and the metric, too
    metric: str  # what is read of the records; see `read`
    settings: Mapping[str, Any]  # which the run must have
    variants: Sequence[str] = ()  # whose records count; empty: all
    exclude_variants: Sequence[str] = ()
    groups: Sequence[str] = ()  # whose records count; empty: all
    unit: Unit = "%"

    def select(self, records: Iterable[Record]) -> list[Record]:
        """Return the records that count."""
        return [
            record
            for record in records
            if (not self.variants or record["variant"] in self.variants)
            and record["variant"] not in self.exclude_variants
            and (not self.groups or record["group"] in self.groups)
        ]

    def read(self, records: Sequence[Record], *, oracle: bool = False) -> Estimate | None:
        """Return what this is about, with an interval where there is one (else NaN); None if it was not measured.

        The metric is one of:

        - the name of a score, or `routed` (whether the invariant answer was kept): the mean over the questions;
        - `deviation: SCORE`: the standard deviation of its means over the variants (of these, not of a population);
        - `figure: NAME`: one of the benchmark's own figures;
        - `perplexity` or `collisions`: the mean over the records that have it.

        With `oracle`, the better branch of every routed answer is scored.
        """
        kind, colon, name = self.metric.partition(": ")
        if kind == "figure":
            figure = BENCHMARKS[self.benchmark].figures(records).get(name)
            return None if figure is None else Estimate(figure, math.nan, math.nan)
        chosen = self.select(records)
        if not chosen or not kind:
            return None
        if kind in {"perplexity", "collisions"}:
            values = [record[kind] for record in chosen if kind in record]
            return mean_interval(values) if values else None
        score = oracle_score if oracle else record_score
        if colon:
            deviation = float(np.std(means_by("variant", chosen, name, score)))
            return Estimate(deviation, math.nan, math.nan)
        return mean_interval(means_by("question", chosen, kind, score))


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published table: a model with a method."""

    model: str  # hub id; empty if the row is about several models
    name: str
    setup: Setup | None  # with what it is measured; None if a run cannot measure it
    oracle: bool  # whether it scores the better branch of every routed answer, which no router knows
    values: tuple[float | None, ...]  # one for each column, in its unit; None if the table has none


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper: `id` is its name on the command line, and `note` says what is not measured, and why."""

    id: str
    paper: str
    number: str
    title: str
    note: str
    columns: tuple[PublishedColumn, ...]
    rows: tuple[PublishedRow, ...]

    def rows_of(self, model: str) -> list[PublishedRow]:
        """Return the rows about this model."""
        return [row for row in self.rows if is_same_model(row.model, model)]


@cache
def published_tables() -> dict[str, PublishedTable]:
    """Return every table by its id."""
    return {each["id"]: _table(each) for name in _FILES for each in declared(f"published/{name}")["tables"]}


def resolve_table(name: str) -> PublishedTable:
    """Return the table of that id; an `UnknownName` lists those there are."""
    return published_tables()[check_name("published table", name, published_tables())]


def is_same_model(one: str, other: str) -> bool:
    """Whether two names mean the same model: compare the last part of the path, ignoring case and a leading `Meta-`.

    >>> is_same_model("meta-llama/Meta-Llama-3.1-8B-Instruct", "/models/Llama-3.1-8B-Instruct/")
    True
    """
    first, second = (name.rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-") for name in (one, other))
    return first == second


def _table(data: Mapping[str, Any]) -> PublishedTable:
    shared = {name: data.get(name, "") for name in ("benchmark", "metric")}
    columns = []
    for each in data["columns"]:
        settings = {**data.get("settings", {}), **each.get("settings", {})}
        columns.append(PublishedColumn(**{**shared, **each, "settings": settings}))
    setups = {name: dict(each) for name, each in data.get("setups", {}).items()}
    oracles = {name for name, each in setups.items() if each.pop("oracle", False)}
    rows = []
    for each in data["rows"]:
        values = tuple(None if value == "-" else float(value) for value in each["values"].split())
        name = each["name"]
        if len(values) != len(columns):
            raise ValueError(f"{data['id']}, {each['model']}, {name}: {len(values)} values, {len(columns)} columns")
        setup = Setup(**setups[name]) if name in setups else None
        rows.append(PublishedRow(each["model"], name, setup, name in oracles, values))
    texts = {name: data.get(name, "").strip() for name in ("id", "paper", "number", "title", "note")}
    return PublishedTable(**texts, columns=tuple(columns), rows=tuple(rows))


@dataclass(frozen=True)
class PublishedComparison:
    """A published number, and ours with its interval, in the unit; None if not published or not measured."""

    row: str
    column: str
    published: float | None
    ours: float | None
    low: float | None
    high: float | None
    unit: Unit = "%"
    digits: int = 1

    @property
    def cells(self) -> list[str]:
        """Row, column, published number, ours with its interval, and the difference, as texts."""
        unit, digits = f" {self.unit}" if self.unit in {"s", "min"} else "", f".{self.digits}f"
        published = "" if self.published is None else f"{self.published:{digits}}{unit}"
        ours, difference = "not measured", ""
        if self.ours is not None:
            interval = "" if self.low is None else f" ({self.low:{digits}} to {self.high:{digits}})"
            ours = f"{self.ours:{digits}}{unit}{interval}"
            difference = "" if self.published is None else f"{self.ours - self.published:+{digits}}"
        return [self.row, self.column, published, ours, difference]


def compare(
    row: PublishedRow, column: PublishedColumn, published: float | None, records: Sequence[Record]
) -> PublishedComparison:
    """Compare the records of a run with one cell of a published table."""
    estimate, scale = column.read(records, oracle=row.oracle), 100 if column.unit == "%" else 1
    numbers = (math.nan,) * 3 if estimate is None else (estimate.value, estimate.low, estimate.high)
    ours, low, high = (None if math.isnan(each) else scale * each for each in numbers)
    digits = 2 if column.unit == "" or column.metric.startswith("deviation: ") else 1
    return PublishedComparison(row.name, column.label, published, ours, low, high, column.unit, digits)


# --- a table measured again ---

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

    Rows about several models are of every model. An ensemble that no row is about is a row of its own over the plain
    model. Kept are the rows with these names, this intervention (a file means `hidden-scaling`) and this ensemble.
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
    chosen = [row for row in rows if not names or row.name in names]
    for attribute, value in (("intervention", _intervention_name(intervention)), ("ensemble", ensemble)):
        if value is not None:
            chosen = [row for row in chosen if row.setup and getattr(row.setup, attribute) == value]
            if not chosen:
                raise InvalidChoice(f"{attribute}: expected one of a row of {table.id}, got {value!r}")
    return chosen


def _intervention_name(described: str | None) -> str | None:
    """Return the name of an intervention; that of `hidden-scaling` for a file of its parameters."""
    return described if described in (None, *INTERVENTIONS) else "hidden-scaling"


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
) -> list[PublishedComparison]:
    """Run what the cells of a published table need, and return its cells with our numbers, row by row.

    `base` has the model, the data, the limit and everything else that the table does not specify; its intervention,
    its ensemble and the names choose rows. The rest is as for `run_several`.
    """
    from invariant_rag_benchmarks.runner import run_several

    rows = rows_to_measure(table, base.model, names, intervention=base.intervention, ensemble=base.ensemble)
    configs = configs_to_run(rows, table.columns, base)
    runs = run_several(list(configs.values()), out, resume=resume, model=model, progress=progress)
    records = {key: run.records for key, run in zip(configs, runs, strict=True)}
    return [
        compare(row, column, value, records.get(_key(row, column), ()) if column.metric else ())
        for row in rows
        for column, value in zip(table.columns, row.values, strict=True)
    ]


def _key(row: PublishedRow, column: PublishedColumn) -> _Key:
    return row.setup, column.benchmark, tuple(sorted(column.settings.items()))
