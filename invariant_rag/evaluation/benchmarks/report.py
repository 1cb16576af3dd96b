"""Summarise a run: means with intervals, spread over the variants, and published numbers for comparison."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from invariant_rag.errors import InvalidRun
from invariant_rag.evaluation.benchmarks.base import Benchmark, Record
from invariant_rag.evaluation.benchmarks.published_tables import Comparison, comparisons, question_means
from invariant_rag.evaluation.statistics import Estimate, PairedBootstrap, mean_interval, percentile_interval


def summarise(benchmark: Benchmark, records: Iterable[Record], seed: int = 0) -> dict[str, Any]:
    """Return the figures of a run as plain data.

    Of the benchmark's main score: `mean`, `worst` (each question's worst variant), `best`, `spread` (best variant minus
    worst) and `deviation` (standard deviation over variants). `flips` is the share of questions whose answers differ
    between variants. The `figures` of a routed run say how often the invariant answer was kept. Intervals are over
    questions, which are resampled together with all of their variants.

    Raises:
        InvalidRun: There are no records.
    """
    listed = list(records)
    if not listed:
        raise InvalidRun("expected at least one record, got none")
    by_variant: dict[str, list[Record]] = defaultdict(list)
    by_group: dict[str, list[Record]] = defaultdict(list)
    for record in listed:
        by_variant[record["variant"]].append(record)
        by_group[record["group"]].append(record)
    return {
        "benchmark": benchmark.name,
        "metric": benchmark.metric,
        "questions": len({record["question"] for record in listed}),
        "records": len(listed),
        "scores": {
            name: _question_estimates(listed, name, seed)["mean"].as_dict() for name in sorted(listed[0]["scores"])
        },
        **{name: each.as_dict() for name, each in _question_estimates(listed, benchmark.metric, seed).items()},
        "variants": {name: _scores(each, seed) for name, each in by_variant.items()},
        "groups": {name: _scores(each, seed) for name, each in sorted(by_group.items()) if name},
        "figures": {
            name: round(value, 6) for name, value in {**benchmark.figures(listed), **_routing_figures(listed)}.items()
        },
        "shortened": sum(bool(record["dropped"] or record["trimmed"]) for record in listed),
    }


def _routing_figures(records: Sequence[Record]) -> dict[str, float]:
    branches = [record["branch"] for record in records if "branch" in record]
    return {"invariant answers kept": branches.count("invariant") / len(branches)} if branches else {}


def _scores(records: Sequence[Record], seed: int) -> dict[str, Any]:
    columns = {name: question_means(records, name) for name in sorted(records[0]["scores"])}
    return {"records": len(records), **{name: mean_interval(each, seed).as_dict() for name, each in columns.items()}}


def _question_estimates(records: Sequence[Record], metric: str, seed: int) -> dict[str, Estimate]:
    """Return estimates over questions, which are resampled together with all of their variants."""
    questions = {name: row for row, name in enumerate(dict.fromkeys(record["question"] for record in records))}
    variants = {name: column for column, name in enumerate(dict.fromkeys(record["variant"] for record in records))}
    scores = np.full((len(questions), len(variants)), np.nan)  # NaN: the question has no such variant
    answers: dict[str, set[str]] = defaultdict(set)
    for record in records:
        scores[questions[record["question"]], variants[record["variant"]]] = record["scores"][metric]
        answers[record["question"]].add(record["answer"])
    per_question = {
        "mean": np.nanmean(scores, axis=1),
        "worst": np.nanmin(scores, axis=1),
        "best": np.nanmax(scores, axis=1),
        "flips": np.array([float(len(answers[name]) > 1) for name in questions]),
    }
    estimates = {name: mean_interval(values.tolist(), seed) for name, values in per_question.items()}
    bootstrap = PairedBootstrap(len(questions), seed=seed)
    estimates["spread"] = percentile_interval(bootstrap.spread(scores))
    estimates["deviation"] = percentile_interval(bootstrap.deviation(scores))
    return estimates


def markdown(config: Mapping[str, Any], summary: Mapping[str, Any], records: Iterable[Record]) -> str:
    """Return a run as Markdown: its figures, its variants, and every published number for the same settings."""
    metric = summary["metric"]
    described = (
        f"{summary['questions']} questions, {summary['records']} records; {metric} in per cent, 95% intervals. "
        f"Settings: {', '.join(f'{name}={value}' for name, value in config['settings'].items())}. "
        f"Data: {', '.join(config['data']) or 'made from the seed'}."
    )
    routed = "" if config["alpha"] is None else f", routed with a margin of {config['alpha']}"
    lines = [
        f"## {config['benchmark']}: {config['model']}, {config['method']}, ordering {config['ordering']}{routed}",
        "",
        described,
    ]
    if summary["shortened"]:
        lines.append(f"{summary['shortened']} prompts did not fit and were shortened ({config['overflow']}).")
    common = ["mean", "worst", "best", "spread", "deviation", "flips"]
    lines += ["", *_table(["figure", metric], [[name, percent(summary[name])] for name in common])]
    metrics = [name for name in next(iter(summary["variants"].values())) if name != "records"]
    for title in ("variants", "groups"):
        rows = [
            [name, str(each["records"]), *(percent(each[score]) for score in metrics)]
            for name, each in summary[title].items()
        ]
        if rows:
            lines += ["", *_table([title.removesuffix("s"), "records", *metrics], rows)]
    if summary["figures"]:
        rows = [[name, f"{100 * value:.1f}"] for name, value in summary["figures"].items()]
        lines += ["", *_table(["figure", "per cent"], rows)]
    found = comparisons(config, list(records))
    if found:
        lines += ["", "Published numbers are over the papers' own data.", "", *comparison_table(found)]
    return "\n".join(lines) + "\n"


def comparison_table(found: Sequence[Comparison]) -> list[str]:
    """Return comparisons with published numbers as a Markdown table."""
    rows = [
        [
            each.source,
            each.row,
            each.column,
            "" if each.published is None else f"{each.published:.1f}",
            each.ours_shown,
            each.difference_shown,
        ]
        for each in found
    ]
    return _table(["source", "row", "column", "published", "ours", "difference"], rows)


def percent(estimate: Mapping[str, float]) -> str:
    """Return an estimate in per cent: the value, and its interval in brackets."""
    return f"{100 * estimate['value']:.1f} ({100 * estimate['low']:.1f} to {100 * estimate['high']:.1f})"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
