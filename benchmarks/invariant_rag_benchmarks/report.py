"""Summarise a run: means with intervals, and how much they vary over the variants; as plain data, and as Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from invariant_rag.audit.statistics import mean_interval

from invariant_rag_benchmarks.base import Benchmark, Record
from invariant_rag_benchmarks.errors import InvalidRun
from invariant_rag_benchmarks.scores import variations

_FIGURES = ("mean", "worst", "best", "spread", "deviation", "flips")


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
    return [float(np.mean([score(each, metric) for each in part])) for part in _grouped(records, field).values()]


def _grouped(records: Iterable[Record], field: str) -> dict[str, list[Record]]:
    parts: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        parts[record[field]].append(record)
    return parts


def summarize(benchmark: Benchmark[Any], records: Iterable[Record], seed: int = 0) -> dict[str, Any]:
    """Return the figures of a run as plain data.

    Of the benchmark's main score: `mean`, `worst` (each question's worst variant), `best`, `spread` (best variant minus
    worst) and `deviation` (standard deviation over variants), both over the questions that were asked in every variant,
    with the `chance` that noise alone stays below 19 times out of 20; None if there are no such questions. `flips` is
    the share of questions whose answers differ between variants. The `figures` of a routed run say how often the
    invariant answer was kept, and what the better branch scores. Intervals are over questions, of which the variants
    are no independent observations.
    """
    listed = list(records)
    if not listed:
        raise InvalidRun("expected at least one record, got none")
    metric, figures = benchmark.metric, benchmark.figures(listed)
    if routed := [record for record in listed if "rejected" in record]:
        figures["invariant answers kept"] = float(np.mean([record_score(each, "routed") for each in routed]))
        figures["oracle of the two branches"] = float(np.mean(means_by("question", routed, metric, oracle_score)))
    return {
        "benchmark": benchmark.name,
        "metric": metric,
        "questions": len({record["question"] for record in listed}),
        "records": len(listed),
        "scores": _scores(listed, seed),
        **_estimates(listed, metric, seed),
        "variants": _parts(listed, "variant", seed),
        "groups": dict(sorted(_parts(listed, "group", seed).items())),
        "figures": {name: round(value, 6) for name, value in figures.items()},
        "shortened": sum(bool(record["dropped"] or record["trimmed"]) for record in listed),
    }


def _parts(records: Sequence[Record], field: str, seed: int) -> dict[str, dict[str, Any]]:
    """Return the scores of the records with each value of a field, but not of those without one."""
    parts = _grouped(records, field)
    return {name: {"records": len(each), **_scores(each, seed)} for name, each in parts.items() if name}


def _scores(records: Sequence[Record], seed: int) -> dict[str, dict[str, float]]:
    names = sorted(records[0]["scores"])
    return {name: mean_interval(means_by("question", records, name), seed).as_dict() for name in names}


def _estimates(records: Sequence[Record], metric: str, seed: int) -> dict[str, dict[str, float] | None]:
    """Return the figures of a score over questions and their variants."""
    questions, variants = _grouped(records, "question"), list(_grouped(records, "variant"))
    scores = np.full((len(questions), len(variants)), np.nan)  # NaN: the question has no such variant
    for row, repeats in enumerate(questions.values()):
        for record in repeats:
            scores[row, variants.index(record["variant"])] = record["scores"][metric]
    per_question = {
        "mean": np.nanmean(scores, axis=1),
        "worst": np.nanmin(scores, axis=1),
        "best": np.nanmax(scores, axis=1),
        "flips": np.array([float(len({each["answer"] for each in repeats}) > 1) for repeats in questions.values()]),
    }
    intervals = {name: mean_interval(values.tolist(), seed).as_dict() for name, values in per_question.items()}
    return {**intervals, **variations(scores, seed)}


def markdown(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return a run as Markdown: its figures, by variant and by group; `config` is as of `resolve_config`."""
    metric = summary["metric"]
    setup = "" if config["alpha"] is None else f", routed with a margin of {config['alpha']}"
    setup += "".join(f", {config[name]}" for name in ("intervention", "ensemble") if config.get(name))
    lines = [
        f"## {config['benchmark']}: {config['model']}, {config['method']}, ordering {config['ordering']}{setup}",
        "",
        (
            f"{summary['questions']} questions, {summary['records']} records; {metric} in per cent, 95% intervals. "
            f"Settings: {', '.join(f'{name}={value}' for name, value in config['settings'].items())}. "
            f"Data: {', '.join(config['data']) or 'made from the seed'}."
        ),
    ]
    if summary["shortened"]:
        lines.append(f"{summary['shortened']} prompts did not fit and were shortened ({config['overflow']}).")
    tables = [(["figure", metric], [[name, _figure(summary[name])] for name in _FIGURES])]
    for title in ("variants", "groups"):
        rows = [
            [name, str(each["records"]), *(percent(each[score]) for score in summary["scores"])]
            for name, each in summary[title].items()
        ]
        tables.append(([title.removesuffix("s"), "records", *summary["scores"]], rows))
    tables.append((["figure", "per cent"], [[name, f"{100 * each:.1f}"] for name, each in summary["figures"].items()]))
    lines += [line for header, rows in tables if rows for line in ("", *table(header, rows))]
    return "\n".join(lines) + "\n"


def _figure(estimate: Mapping[str, float] | None) -> str:
    """Return an estimate in per cent; of a variation, also whether chance would make as much."""
    if estimate is None:
        return "unknown: no question was asked in all of at least two variants"
    if "chance" not in estimate:
        return percent(estimate)
    more = "more" if estimate["value"] > estimate["chance"] else "no more"
    return f"{percent(estimate)}, {more} than chance (chance alone: up to {100 * estimate['chance']:.1f})"


def percent(estimate: Mapping[str, float]) -> str:
    """Return an estimate in per cent: the value, and its interval in brackets."""
    return f"{100 * estimate['value']:.1f} ({100 * estimate['low']:.1f} to {100 * estimate['high']:.1f})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
