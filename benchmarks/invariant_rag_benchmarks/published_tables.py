"""The tables of the papers, one file each in `published/`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from invariant_rag.errors import UnknownName

from invariant_rag_benchmarks.base import Record

_FOLDER = Path(__file__).with_name("published")
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
    """A column of a published table: the benchmark settings and the records of a run that it is about.

    Attributes:
        label: Name in the table.
        benchmark: Name of the benchmark. Empty if a run cannot measure the column.
        metric: What is read of the records; see `comparisons.read_cell`. Empty if a run cannot measure the column.
        settings: Settings that the run must have.
        variants: Variants whose records count. Empty: all.
        exclude_variants: Variants whose records do not count.
        groups: Groups whose records count. Empty: all.
        unit: Unit of the values.
        questions: Number of prompts that the published time is about; for the metric `seconds`.
    """

    label: str
    benchmark: str
    metric: str
    settings: Mapping[str, Any]
    variants: tuple[str, ...] = ()
    exclude_variants: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    unit: Unit = "%"
    questions: int = 0

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
        model: Hub id. Empty if the row is about several models.
        name: Name of the row in the table.
        setup: With what it is measured. None if a run cannot measure it.
        oracle: Whether it scores the better branch of every routed answer, which no router knows.
        values: One value per column, in the column's unit; None if the table has none.
    """

    model: str
    name: str
    setup: Setup | None
    oracle: bool
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class PublishedTable:
    """A table of a paper.

    Attributes:
        id: Name on the command line.
        paper: The paper.
        number: Number of the table in the paper.
        title: What the table shows.
        note: What is not measured, and what the paper leaves open. Empty for nothing.
        columns: The columns.
        rows: The rows.
    """

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
    documents = [tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8")) for name in _FILES]
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
    shared = {name: data[name] for name in ("benchmark", "metric") if name in data}
    columns = []
    for each in data["columns"]:
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in each.items()}
        settings = {**data.get("settings", {}), **each.get("settings", {})}
        columns.append(PublishedColumn(**{"benchmark": "", "metric": "", **shared, **given, "settings": settings}))
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
    note = data.get("note", "").strip()
    return PublishedTable(data["id"], data["paper"], data["number"], data["title"], note, tuple(columns), tuple(rows))
