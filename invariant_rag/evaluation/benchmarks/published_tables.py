"""The published tables (`published_tables.toml`), and comparisons of a run with their cells."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from invariant_rag.errors import UnknownName
from invariant_rag.evaluation.benchmarks.base import Record
from invariant_rag.evaluation.statistics import mean_interval

_DATA = Path(__file__).with_name("published_tables.toml")


@dataclass(frozen=True)
class PublishedColumn:
    """A column of a published table: the benchmark settings and the records of a run that it is about.

    Attributes:
        label: Name in the table.
        benchmark: Name of the benchmark.
        metric: The score; or `figure: NAME` for one of the benchmark's own figures.
        settings: Settings that the run must have.
        variants: Variants whose records count. Empty: all.
        exclude_variants: Variants whose records do not count.
        groups: Groups whose records count. Empty: all.
    """

    label: str
    benchmark: str
    metric: str
    settings: Mapping[str, Any]
    variants: tuple[str, ...] = ()
    exclude_variants: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def select(self, records: Iterable[Record]) -> list[Record]:
        """Return the records that count."""
        return [
            record
            for record in records
            if (not self.variants or record["variant"] in self.variants)
            and record["variant"] not in self.exclude_variants
            and (not self.groups or record["group"] in self.groups)
        ]


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published table: a model with a method.

    Attributes:
        model: Hub id.
        name: Name of the row in the table.
        method: The method. Empty if a run cannot reproduce the row (hidden-state scaling...).
        ordering: The ordering.
        alpha: Margin of selective routing; None for no routing.
        values: One value per column, in per cent; None if the table has none.
    """

    model: str
    name: str
    method: str
    ordering: str
    alpha: float | None
    values: tuple[float | None, ...]

    @property
    def setup(self) -> tuple[str, str, float | None]:
        """Method, ordering and margin of routing."""
        return self.method, self.ordering, self.alpha


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        id: Name on the command line.
        paper: The paper.
        number: Number of the table in the paper.
        title: What the table shows.
        columns: The columns.
        rows: The rows.
    """

    id: str
    paper: str
    number: str
    title: str
    columns: tuple[PublishedColumn, ...]
    rows: tuple[PublishedRow, ...]

    def rows_of(self, model: str) -> list[PublishedRow]:
        """Return the rows about this model."""
        return [row for row in self.rows if is_same_model(row.model, model)]


@dataclass(frozen=True)
class Comparison:
    """A published number, and ours with its interval, in per cent; None if not published or not measured."""

    source: str
    row: str
    column: str
    published: float | None
    ours: float | None
    low: float | None
    high: float | None

    @property
    def ours_shown(self) -> str:
        """Our number with its interval, as text."""
        if self.ours is None:
            return "not measured"
        return f"{self.ours:.1f}" + ("" if self.low is None else f" ({self.low:.1f} to {self.high:.1f})")

    @property
    def difference_shown(self) -> str:
        """Our number minus the published one, as text; empty if either is missing."""
        return "" if self.ours is None or self.published is None else f"{self.ours - self.published:+.1f}"


@cache
def published_tables() -> dict[str, PublishedTable]:
    """Return every table by its id."""
    with _DATA.open("rb") as file:
        data = tomllib.load(file)
    return {each["id"]: _table(each) for each in data["tables"]}


def resolve_table(name: str) -> PublishedTable:
    """Return the table of that id.

    Raises:
        UnknownName: There is none; the message lists them.
    """
    if name not in published_tables():
        raise UnknownName("published table", name, published_tables())
    return published_tables()[name]


def is_same_model(one: str, other: str) -> bool:
    """Whether two names mean the same model: compare the last part of the path, ignoring case and a leading `Meta-`.

    >>> is_same_model("meta-llama/Meta-Llama-3.1-8B-Instruct", "/models/Llama-3.1-8B-Instruct/")
    True
    """
    return _short_name(one) == _short_name(other)


def comparisons(config: Mapping[str, Any], records: Sequence[Record]) -> list[Comparison]:
    """Compare a run with every published number about its model, method, ordering, routing and settings."""
    found: list[Comparison] = []
    for table in published_tables().values():
        for row in table.rows_of(config["model"]):
            if row.setup == (config["method"], config["ordering"], config["alpha"]):
                found += [
                    compare(table, row, column, value, records)
                    for column, value in zip(table.columns, row.values, strict=True)
                    if value is not None and matches_config(column, config)
                ]
    return found


def matches_config(column: PublishedColumn, config: Mapping[str, Any]) -> bool:
    """Whether a run has the benchmark and the settings that a column is about."""
    settings = config["settings"]
    return column.benchmark == config["benchmark"] and all(
        settings.get(name) == value for name, value in column.settings.items()
    )


def compare(
    table: PublishedTable,
    row: PublishedRow,
    column: PublishedColumn,
    published: float | None,
    records: Iterable[Record],
) -> Comparison:
    """Compare the records of a run with one cell of a published table."""
    ours: float | None = None
    low: float | None = None
    high: float | None = None
    if column.metric.startswith("figure: "):
        from invariant_rag.evaluation.benchmarks import BENCHMARKS

        figures = BENCHMARKS[column.benchmark].figures(records)
        value = figures.get(column.metric.removeprefix("figure: "))
        ours = None if value is None else 100 * value
    else:
        chosen = column.select(records)
        if chosen:
            estimate = mean_interval(question_means(chosen, column.metric))
            ours, low, high = 100 * estimate.value, 100 * estimate.low, 100 * estimate.high
    return Comparison(f"{table.paper}, {table.number}", row.name, column.label, published, ours, low, high)


def question_means(records: Iterable[Record], metric: str) -> list[float]:
    """Return each question's mean over its variants: the variants of a question are not independent observations."""
    scores: dict[str, list[float]] = {}
    for record in records:
        scores.setdefault(record["question"], []).append(record["scores"][metric])
    return [sum(each) / len(each) for each in scores.values()]


def _short_name(name: str) -> str:
    return re.sub(r"^meta-", "", name.rstrip("/").rsplit("/", 1)[-1].lower())


def _table(data: Mapping[str, Any]) -> PublishedTable:
    columns = tuple(
        PublishedColumn(
            label=each["label"],
            benchmark=each.get("benchmark", data.get("benchmark")),
            metric=each.get("metric", data.get("metric")),
            settings={**data.get("settings", {}), **each.get("settings", {})},
            variants=tuple(each.get("variants", ())),
            exclude_variants=tuple(each.get("exclude_variants", ())),
            groups=tuple(each.get("groups", ())),
        )
        for each in data["columns"]
    )
    rows = []
    for each in data["rows"]:
        values = tuple(None if value == "-" else float(value) for value in each["values"].split())
        if len(values) != len(columns):
            raise ValueError(
                f"{data['id']}, {each['model']}, {each['name']}: {len(values)} values, {len(columns)} columns"
            )
        method, ordering, alpha = [*data.get("methods", {}).get(each["name"], "").split("/"), "", ""][:3]
        rows.append(
            PublishedRow(each["model"], each["name"], method, ordering, float(alpha) if alpha else None, values)
        )
    return PublishedTable(data["id"], data["paper"], data["number"], data["title"], columns, tuple(rows))
