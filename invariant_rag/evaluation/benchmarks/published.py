"""The papers' tables as data, and a run's own numbers beside the cells that it can be compared with."""

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
from invariant_rag.evaluation.benchmarks.intervals import of_shares

_DATA = Path(__file__).with_name("published.toml")


@dataclass(frozen=True)
class Column:
    """A column of a table: which runs it is about, and which of their records.

    Attributes:
        label: How the table calls it.
        benchmark: The benchmark.
        metric: The score; or `figure: NAME` for a figure that the benchmark works out itself.
        settings: Settings that the run must have.
        variants: Variants whose records count. Empty: all.
        but: Variants whose records do not count.
        groups: Groups whose records count. Empty: all.
    """

    label: str
    benchmark: str
    metric: str
    settings: Mapping[str, Any]
    variants: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def resolve_option(self, records: Iterable[Record]) -> list[Record]:
        """Return the records that count."""
        return [
            record
            for record in records
            if (not self.variants or record["variant"] in self.variants)
            and record["variant"] not in self.but
            and (not self.groups or record["group"] in self.groups)
        ]


@dataclass(frozen=True)
class Row:
    """A row of a table: a model, read by a method.

    Attributes:
        model: Hub id.
        name: How the table calls the row.
        method: Our method. Empty where it takes more than a method and routing (hidden-state scaling...).
        ordering: Our ordering.
        alpha: Margin of selective routing; None: there is no routing.
        values: One per column, in the table's unit; None where the table has none.
    """

    model: str
    name: str
    method: str
    ordering: str
    alpha: float | None
    values: tuple[float | None, ...]

    @property
    def reader(self) -> tuple[str, str, float | None]:
        """Method, ordering and margin: what reads the model in this row."""
        return self.method, self.ordering, self.alpha


@dataclass(frozen=True)
class Table:
    """A table of a paper."""

    id: str
    paper: str
    number: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def rows_of(self, model: str) -> list[Row]:
        """Return the rows about this model."""
        return [row for row in self.rows if same_model(row.model, model)]


@dataclass(frozen=True)
class Comparison:
    """A published number and ours, both in per cent; one is None where there is no such number."""

    source: str
    row: str
    column: str
    published: float | None
    ours: float | None
    low: float | None
    high: float | None

    @property
    def ours_shown(self) -> str:
        """Our number, with its interval where it has one."""
        if self.ours is None:
            return "not measured"
        return f"{self.ours:.1f}" + ("" if self.low is None else f" ({self.low:.1f} to {self.high:.1f})")

    @property
    def difference_shown(self) -> str:
        """Ours minus the published one."""
        return "" if self.ours is None or self.published is None else f"{self.ours - self.published:+.1f}"


@cache
def published_tables() -> dict[str, Table]:
    """Return every table by its id."""
    with _DATA.open("rb") as file:
        data = tomllib.load(file)
    return {each["id"]: _table(each) for each in data["tables"]}


def resolve_table(name: str) -> Table:
    """Return the table of that id.

    Raises:
        UnknownName: There is none; the message lists them.
    """
    if name not in published_tables():
        raise UnknownName("published table", name, published_tables())
    return published_tables()[name]


def same_model(one: str, other: str) -> bool:
    """Whether two names mean one model: the last part counts, without case and a leading `Meta-`.

    >>> same_model("meta-llama/Meta-Llama-3.1-8B-Instruct", "/models/Llama-3.1-8B-Instruct/")
    True
    """
    return _bare(one) == _bare(other)


def comparisons(config: Mapping[str, Any], records: Sequence[Record]) -> list[Comparison]:
    """Return every published number about the model, the reader and the settings of this run, beside ours."""
    found = []
    for table in published_tables().values():
        for row in table.rows_of(config["model"]):
            if row.reader == (config["method"], config["ordering"], config["alpha"]):
                found += [
                    compared(table, row, column, value, records)
                    for column, value in zip(table.columns, row.values, strict=True)
                    if value is not None and belongs(column, config)
                ]
    return found


def belongs(column: Column, config: Mapping[str, Any]) -> bool:
    """Whether a run has the benchmark and the settings of a column."""
    settings = config["settings"]
    return column.benchmark == config["benchmark"] and all(
        settings.get(name) == value for name, value in column.settings.items()
    )


def compared(table: Table, row: Row, column: Column, published: float | None, records: Iterable[Record]) -> Comparison:
    """Put our number beside a published one."""
    ours: float | None = None
    low: float | None = None
    high: float | None = None
    if column.metric.startswith("figure: "):
        from invariant_rag.evaluation.benchmarks import BENCHMARKS

        known = BENCHMARKS[column.benchmark].figures(records)
        value = known.get(column.metric.removeprefix("figure: "))
        ours = None if value is None else 100 * value
    else:
        chosen = column.resolve_option(records)
        if chosen:
            estimate = of_shares(by_question(chosen, column.metric))
            ours, low, high = 100 * estimate.value, 100 * estimate.low, 100 * estimate.high
    return Comparison(f"{table.paper}, {table.number}", row.name, column.label, published, ours, low, high)


def by_question(records: Iterable[Record], metric: str) -> list[float]:
    """Return each question's mean over its variants, which are no independent observations."""
    scores: dict[str, list[float]] = {}
    for record in records:
        scores.setdefault(record["question"], []).append(record["scores"][metric])
    return [sum(each) / len(each) for each in scores.values()]


def _bare(name: str) -> str:
    return re.sub(r"^meta-", "", name.rstrip("/").rsplit("/", 1)[-1].lower())


def _table(data: Mapping[str, Any]) -> Table:
    columns = tuple(
        Column(
            label=each["label"],
            benchmark=each.get("benchmark", data.get("benchmark")),
            metric=each.get("metric", data.get("metric")),
            settings={**data.get("settings", {}), **each.get("settings", {})},
            variants=tuple(each.get("variants", ())),
            but=tuple(each.get("but", ())),
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
        method, ordering, alpha = [*data.get("readers", {}).get(each["name"], "").split("/"), "", ""][:3]
        rows.append(Row(each["model"], each["name"], method, ordering, float(alpha) if alpha else None, values))
    return Table(data["id"], data["paper"], data["number"], data["title"], columns, tuple(rows))
