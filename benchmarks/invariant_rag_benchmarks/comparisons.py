"""Cells of the published tables, read from the records of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from invariant_rag.audit.statistics import Estimate, mean_interval

from invariant_rag_benchmarks import BENCHMARKS
from invariant_rag_benchmarks.base import Record
from invariant_rag_benchmarks.published_tables import (
    PublishedColumn,
    PublishedRow,
    PublishedTable,
    Setup,
    Unit,
    published_tables,
)
from invariant_rag_benchmarks.tasks.lost_in_the_middle import ORACLE

_SCALES: dict[Unit, float] = {"%": 100.0, "s": 1.0, "min": 1 / 60, "": 1.0}


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
    def ours_shown(self) -> str:
        """Our number with its interval, as text."""
        if self.ours is None:
            return "not measured"
        interval = "" if self.low is None else f" ({self.low:.{self.digits}f} to {self.high:.{self.digits}f})"
        return f"{self.show(self.ours)}{interval}"

    @property
    def difference_shown(self) -> str:
        """Our number minus the published one, as text; empty if either is missing."""
        if self.ours is None or self.published is None:
            return ""
        return f"{self.ours - self.published:+.{self.digits}f}"

    def show(self, value: float | None) -> str:
        """Return a number with its unit, as text; empty for None."""
        unit = f" {self.unit}" if self.unit in {"s", "min"} else ""
        return "" if value is None else f"{value:.{self.digits}f}{unit}"


def comparisons(config: Mapping[str, Any], records: Sequence[Record], seconds: float | None = None) -> list[Comparison]:
    """Compare a run with every published number about its model, setup and settings.

    Args:
        config: The run's config, as of `resolve_config`.
        records: Its records.
        seconds: Mean time per record; None if it is not known.
    """
    optional = {name: config.get(name) for name in ("alpha", "intervention", "ensemble")}
    setup = Setup(config["method"], config["ordering"], **optional)
    return [
        compare(table, row, column, value, records, seconds)
        for table in published_tables().values()
        for row in table.rows_of(config["model"])
        if row.setup == setup
        for column, value in zip(table.columns, row.values, strict=True)
        if value is not None and matches_config(column, config)
    ]


def matches_config(column: PublishedColumn, config: Mapping[str, Any]) -> bool:
    """Whether a run has the benchmark and the settings that a column is about, and the column can be measured."""
    settings = config["settings"]
    same = all(settings.get(name) == value for name, value in column.settings.items())
    # Distractors that were drawn from the oracle file are much easier than those of the papers.
    easier = bool(settings.get("documents")) and ORACLE in config.get("data", {})
    return bool(column.metric) and column.benchmark == config["benchmark"] and same and not easier


def compare(
    table: PublishedTable,
    row: PublishedRow,
    column: PublishedColumn,
    published: float | None,
    records: Sequence[Record],
    seconds: float | None = None,
) -> Comparison:
    """Compare the records of a run with one cell of a published table; `seconds` as for `comparisons`."""
    found, scale = read_cell(column, records, seconds, oracle=row.oracle), _SCALES[column.unit]
    ours, low, high = (
        (None, None, None) if found is None else (scale * each for each in (found.value, found.low, found.high))
    )
    if low is not None and math.isnan(low):
        low = high = None
    digits = 2 if column.unit == "" or column.metric.startswith("deviation: ") else 1
    source = f"{table.paper}, {table.number}"
    return Comparison(source, row.name, column.label, published, ours, low, high, column.unit, digits)


def read_cell(
    column: PublishedColumn, records: Sequence[Record], seconds: float | None = None, *, oracle: bool = False
) -> Estimate | None:
    """Return what a column is about, with an interval where there is one (else NaN); None if it was not measured.

    The metric of a column is one of:

    - the name of a score, or `routed` (whether the invariant answer was kept): the mean over the questions;
    - `deviation: SCORE`: the standard deviation of its means over the variants (of these, not of a population);
    - `figure: NAME`: one of the benchmark's own figures;
    - `perplexity` or `collisions`: the mean over the records of what they have under that name;
    - `seconds`: the mean time per record, times the number of prompts that the published time is about.

    With `oracle`, the better branch of every routed answer is scored.
    """
    if column.metric == "seconds":
        return None if seconds is None else _without_interval(seconds * column.questions)
    kind, _, name = column.metric.partition(": ") if ": " in column.metric else ("", "", column.metric)
    if kind == "figure":
        figure = BENCHMARKS[column.benchmark].figures(records).get(name)
        return None if figure is None else _without_interval(figure)
    chosen = column.select(records)
    if not chosen or not name:
        return None
    if name in {"perplexity", "collisions"}:
        values = [record[name] for record in chosen if name in record]
        return mean_interval(values) if values else None
    read = oracle_score if oracle else record_score
    if kind == "deviation":
        return _without_interval(float(np.std(means_by("variant", chosen, name, read))))
    return mean_interval(means_by("question", chosen, name, read))


def record_score(record: Record, metric: str) -> float:
    """Return a score of a record; `routed` is 1 where the invariant answer was kept."""
    if metric == "routed":
        return float(record["branch"] == "invariant")
    return float(record["scores"][metric])


def oracle_score(record: Record, metric: str) -> float:
    """Return the score of the better branch: that of a router which always knows it (RoToR, Table 3)."""
    return float(max(record["scores"][metric], record["rejected"]["scores"][metric]))


def means_by(
    field: str, records: Iterable[Record], metric: str, read: Callable[[Record, str], float] = record_score
) -> list[float]:
    """Return the mean score of each `question`, whose variants are not independent observations; or `variant`."""
    scores: dict[str, list[float]] = {}
    for record in records:
        scores.setdefault(record[field], []).append(read(record, metric))
    return [sum(each) / len(each) for each in scores.values()]


def _without_interval(value: float) -> Estimate:
    return Estimate(value, math.nan, math.nan)
