"""Simulate audits of systems of known behaviour: how often are they right?

No model is asked: outcomes are drawn as the systems of `tests/audit/worlds.py` would give them, and go
through the functions that a real audit decides with. Writes `cookbook/results/audit_calibration.md`. Run it with `make
calibrate-audit`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "audit"))

from worlds import BLIND, DEPENDS, RIGHT, World, at_net, draw, expected  # noqa: E402

from invariant_rag.audit.screen import CALLS, FIRST, PLACEBO, looks, screen  # noqa: E402
from invariant_rag.audit.statistics import mean_difference, mean_interval  # noqa: E402

PAGE = ROOT / "cookbook" / "results" / "audit_calibration.md"
SIZES = (20, 50, 200)
MARGIN = 0.05

INTRODUCTION = """\
# How often an audit is right

Written by `make calibrate-audit`: {audits} simulated audits of each system at 20, 50 and 200 questions, with a margin
of 5 points and the looks of a real audit. *Matters* and *does not*: per cent of the audits with this outcome; the
others cannot tell yet. *Calls*: on average. *Missed*: per cent of the audits whose 95% interval misses the truth, of
net sensitivity and accuracy today after the questions that were asked, and of the gain of a remedy (the documents in
the reverse order) after all.
"""


@dataclass(frozen=True)
class Cell:
    """What some audits of one system with one number of questions found, as shares."""

    matters: float
    clear: float
    calls: float
    missed: tuple[float, float, float]


def simulate(world: World, questions: int, audits: int, seed: int) -> Cell:
    """Simulate audits of a system."""
    source, truth = np.random.default_rng(seed), expected(world)
    outcomes, asked, missed = [], [], np.zeros(3)
    for _ in range(audits):
        drawn = draw(world, questions, source)
        two = [world.two] * questions
        for count in looks(questions):
            found = screen(drawn.classes[:count], two[:count], MARGIN, questions)
            if found.outcome != "cannot tell yet":
                break
        today, remedy = ((each == RIGHT).mean(axis=1) for each in (drawn.classes[:, [FIRST, PLACEBO]], drawn.remedy))
        estimates = (found.net, mean_interval(today[:count]), mean_difference(remedy, today))
        true = (truth["net"], truth["today"], truth["gain"])
        missed += [not each.low <= one <= each.high for each, one in zip(estimates, true, strict=True)]
        outcomes.append(found.outcome)
        asked.append(count)
    shares = (outcomes.count(each) / audits for each in ("order matters", "order does not matter"))
    return Cell(*shares, CALLS * float(np.mean(asked)), tuple(missed / audits))


def table(worlds: list[World], audits: int) -> tuple[list[str], list[Cell]]:
    """Return the rows of a table, and all cells."""
    rows = [
        "| system | net sensitivity | questions | matters | does not | calls | missed: net | today | gain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    cells = []
    for number, world in enumerate(worlds):
        net = expected(world)["net"]
        for questions in SIZES:
            cell = simulate(world, questions, audits, seed=1000 * number + questions)
            cells.append(cell)
            missed = " | ".join(f"{100 * each:.1f}" for each in cell.missed)
            rows.append(
                f"| {world.name} | {100 * net:.1f} | {questions} | {100 * cell.matters:.1f} | {100 * cell.clear:.1f} | "
                f"{cell.calls:.0f} | {missed} |"
            )
    return rows, cells


def main() -> None:
    """Simulate, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--audits", type=int, default=200)
    chosen = parser.parse_args()
    started = perf_counter()
    blind, blind_cells = table(list(BLIND), chosen.audits)
    some, some_cells = table(list(DEPENDS), chosen.audits)
    ten, ten_cells = table([at_net(world, 0.1) for world in DEPENDS], chosen.audits)
    edge, edge_cells = table([at_net(world, MARGIN) for world in DEPENDS], chosen.audits)
    cleared = max(each.clear for each in edge_cells)
    false = max(each.matters for each in blind_cells)
    power = min(each.matters for each in ten_cells[2::3])
    every = [*blind_cells, *some_cells, *ten_cells, *edge_cells]
    missed = max(max(each.missed[0], each.missed[2]) for each in every)
    today = sum(each.missed[1] for each in every) / len(every)
    pooled = sum(each.matters for each in blind_cells) / len(blind_cells)
    summary = (
        f"False alarms: at most {false:.1%} in any cell, {pooled:.2%} in all. Power at ten points and 200 questions: "
        f"at least {power:.1%}. A system at the margin is cleared in at most {cleared:.1%} of the audits of a cell. "
        f"Intervals of differences miss the truth in at most {missed:.1%} of the audits of a "
        f"cell, those of accuracy in {today:.1%} on average."
    )
    parts = [INTRODUCTION.format(audits=chosen.audits), summary, "", "## Where the order does not matter", "", *blind]
    parts += ["", "## Where it does", "", *some, "", "## Where it does, by ten points", "", *ten, ""]
    parts += ["## Where it does, by as much as the margin", "", *edge, ""]
    PAGE.write_text("\n".join(parts), encoding="utf-8")
    print(f"{summary}\nwrote {PAGE} in {perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
