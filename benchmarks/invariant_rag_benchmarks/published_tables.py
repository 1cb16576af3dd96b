"""The tables of the papers, one file each in `published/`, and their cells, read from the records of a run."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from invariant_rag.audit.statistics import Estimate, mean_interval
from invariant_rag.errors import UnknownName

from invariant_rag_benchmarks import BENCHMARKS
from invariant_rag_benchmarks.base import Record

_FILES = ("rotor", "pine", "hidden_scaling")

Unit: TypeAlias = Literal["%", "s", "min", ""]
_SCALES: dict[Unit, float] = {"%": 100.0, "s": 1.0, "min": 1 / 60, "": 1.0}


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
    variants: tuple[str, ...] = ()  # whose records count; empty: all
    exclude_variants: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()  # whose records count; empty: all
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
        - `perplexity` or `collisions`: the mean over the records of what they have under that name.

        With `oracle`, the better branch of every routed answer is scored.
        """
        kind, _, name = self.metric.partition(": ") if ": " in self.metric else ("", "", self.metric)
        if kind == "figure":
            figure = BENCHMARKS[self.benchmark].figures(records).get(name)
            return None if figure is None else _alone(figure)
        chosen = self.select(records)
        if not chosen or not name:
            return None
        if name in {"perplexity", "collisions"}:
            values = [record[name] for record in chosen if name in record]
            return mean_interval(values) if values else None
        score = oracle_score if oracle else record_score
        if kind == "deviation":
            return _alone(float(np.std(means_by("variant", chosen, name, score))))
        return mean_interval(means_by("question", chosen, name, score))


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
    files = (Path(__file__).with_name("published") / f"{name}.toml" for name in _FILES)
    documents = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files]
    return {each["id"]: _table(each) for document in documents for each in document["tables"]}


def resolve_table(name: str) -> PublishedTable:
    """Return the table of that id; an `UnknownName` lists those there are."""
    if name not in published_tables():
        raise UnknownName("published table", name, published_tables())
    return published_tables()[name]


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
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in each.items()}
        settings = {**data.get("settings", {}), **each.get("settings", {})}
        columns.append(PublishedColumn(**{**shared, **given, "settings": settings}))
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
class Comparison:
    """A published number, and ours with its interval, in the unit; None if not published or not measured."""

    source: str
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
        """Source, row, column, published number, ours with its interval, and the difference, as texts."""
        ours, difference = "not measured", ""
        if self.ours is not None:
            interval = "" if self.low is None else f" ({self.low:.{self.digits}f} to {self.high:.{self.digits}f})"
            ours = f"{self.show(self.ours)}{interval}"
            if self.published is not None:
                difference = f"{self.ours - self.published:+.{self.digits}f}"
        return [self.source, self.row, self.column, self.show(self.published), ours, difference]

    def show(self, value: float | None) -> str:
        """Return a number with its unit, as text; empty for None."""
        unit = f" {self.unit}" if self.unit in {"s", "min"} else ""
        return "" if value is None else f"{value:.{self.digits}f}{unit}"


def compare(
    table: PublishedTable,
    row: PublishedRow,
    column: PublishedColumn,
    published: float | None,
    records: Sequence[Record],
) -> Comparison:
    """Compare the records of a run with one cell of a published table."""
    found, ours, low, high = column.read(records, oracle=row.oracle), None, None, None
    if found is not None:
        ours, low, high = (_SCALES[column.unit] * each for each in (found.value, found.low, found.high))
        low, high = (None, None) if math.isnan(low) else (low, high)
    digits = 2 if column.unit == "" or column.metric.startswith("deviation: ") else 1
    source = f"{table.paper}, {table.number}"
    return Comparison(source, row.name, column.label, published, ours, low, high, column.unit, digits)


def record_score(record: Record, metric: str) -> float:
    """Return a score of a record; `routed` is 1 where the invariant answer was kept."""
    return float(record["branch"] == "invariant" if metric == "routed" else record["scores"][metric])


def oracle_score(record: Record, metric: str) -> float:
    """Return the score of the better branch: that of a router which always knows it (RoToR, Table 3)."""
    return float(max(record["scores"][metric], record["rejected"]["scores"][metric]))


def means_by(
    field: str, records: Iterable[Record], metric: str, score: Callable[[Record, str], float] = record_score
) -> list[float]:
    """Return the mean score of each `question`, whose variants are not independent observations; or `variant`."""
    scores: dict[str, list[float]] = {}
    for record in records:
        scores.setdefault(record[field], []).append(score(record, metric))
    return [sum(each) / len(each) for each in scores.values()]


def _alone(value: float) -> Estimate:
    """Return a number without an interval."""
    return Estimate(value, math.nan, math.nan)
