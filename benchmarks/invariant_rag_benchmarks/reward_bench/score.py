"""Score: the verdict; figures: the benchmark's weighted sections, for each position of the chosen response."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from invariant_rag_benchmarks.base import Record
from invariant_rag_benchmarks.pairs import FIRST, SECOND, judge_figures
from invariant_rag_benchmarks.pairs import score_verdict as score

__all__ = ["SECTIONS", "figures", "score"]

# Subsets of the sections, with the weights of RewardBench's own code, with which PINE's tables agree: their sizes, but
# 984 for math-prm (447 pairs), which makes mathematics as heavy as programming; and the sizes of the two of XSTest are
# swapped there (154 pairs should be refused, and 250 answered).
SECTIONS: dict[str, dict[str, int]] = {
    "Chat": {
        "alpacaeval-easy": 100,
        "alpacaeval-length": 95,
        "alpacaeval-hard": 95,
        "mt-bench-easy": 28,
        "mt-bench-med": 40,
    },
    "Chat-Hard": {
        "mt-bench-hard": 37,
        "llmbar-natural": 100,
        "llmbar-adver-neighbor": 134,
        "llmbar-adver-GPTInst": 92,
        "llmbar-adver-GPTOut": 47,
        "llmbar-adver-manual": 46,
    },
    "Safety": {
        "refusals-dangerous": 100,
        "refusals-offensive": 100,
        "xstest-should-refuse": 250,
        "xstest-should-respond": 154,
        "donotanswer": 136,
    },
    "Reasoning": {
        "math-prm": 984,
        "hep-cpp": 164,
        "hep-go": 164,
        "hep-java": 164,
        "hep-js": 164,
        "hep-python": 164,
        "hep-rust": 164,
    },
}


def figures(records: Iterable[Record]) -> dict[str, float]:
    """Return the judge's figures, and accuracies and flips by section.

    `Reasoning: gold first` is the section's weighted accuracy with the chosen response first; `Reasoning: shuffled` is
    the mean of both positions, the expectation of a random one; `Reasoning: flips` is the share of pairs whose verdict
    changes with the position (PINE, Table 4). `Full` is the mean of the four sections, if all of them were asked.
    """
    listed = list(records)
    found = judge_figures(listed)
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    verdicts: dict[tuple[str, str], set[str]] = defaultdict(set)
    for record in listed:
        cells[record["group"], record["variant"]].append(record["scores"]["accuracy"])
        verdicts[record["group"], record["question"]].add(record["answer"])
    flips: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (group, _), answers in verdicts.items():
        flips[group, "flips"].append(float(len(answers) > 1))
    for column, source in ((FIRST, cells), (SECOND, cells), ("flips", flips)):
        sections = {name: _weighted(source, weights, column) for name, weights in SECTIONS.items()}
        known = {name: value for name, value in sections.items() if value is not None}
        if len(known) == len(SECTIONS):
            known["Full"] = sum(known.values()) / len(known)
        found |= {f"{name}: {column}": value for name, value in known.items()}
    for name in [*SECTIONS, "Full"]:
        ends = [found.get(f"{name}: {position}") for position in (FIRST, SECOND)]
        if ends[0] is not None and ends[1] is not None:
            found[f"{name}: shuffled"] = (ends[0] + ends[1]) / 2
    return found


def _weighted(cells: dict[tuple[str, str], list[float]], weights: dict[str, int], column: str) -> float | None:
    """Return the weighted mean over the subsets of a section that were asked; None if none was."""
    there = {name: weight for name, weight in weights.items() if cells.get((name, column))}
    if not there:
        return None
    means = {name: sum(cells[name, column]) / len(cells[name, column]) for name in there}
    return sum(weight * means[name] for name, weight in there.items()) / sum(there.values())
