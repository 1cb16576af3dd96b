"""Simulate audits of systems of known behaviour: how often are they right?

No model is asked: outcomes are drawn as the systems of `worlds.toml` would give them, and go through the functions that
a real audit decides with. Writes `cookbook/results/audit_calibration.md`. Run it with `make calibrate-audit`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from worlds import BLIND, DEPENDS, MARGIN, World, at_net, expected, simulate

from invariant_rag.audit.sequential_test import CALLS

PAGE = Path(__file__).parents[1] / "results" / "audit_calibration.md"
SIZES = (20, 50, 200)

INTRODUCTION = """\
# How often an audit is right

Written by `make calibrate-audit`: {audits} simulated audits of each system at 20, 50 and 200 questions, with a margin
of 5 points and the looks of a real audit. *Matters* and *does not*: per cent of the audits with this outcome; the
others cannot tell yet. *Calls*: on average. *Missed*: per cent of the audits whose 95% interval misses the truth, of
net sensitivity, accuracy today and over orders, the worst slot and errors after the questions that were asked, and of
the gain of a remedy (the documents in the reverse order) after all.
"""


@dataclass(frozen=True)
class Cell:
    """What some audits of one system with one number of questions found, as shares."""

    matters: float
    clear: float
    calls: float
    missed: tuple[float, ...]


MEASURED = ("net", "today", "orders", "slot", "errors", "gain")


def cell(world: World, questions: int, audits: int, seed: int) -> Cell:
    """Simulate audits of a system."""
    source, truth = np.random.default_rng(seed), expected(world)
    outcomes, asked, missed = [], [], np.zeros(len(MEASURED))
    for _ in range(audits):
        found = simulate(world, questions, source)
        known = [(truth[name], estimate) for name, estimate in found.estimates().items()]
        missed += [each is not None and not each.low <= true <= each.high for true, each in known]
        outcomes.append(found.screen.outcome)
        asked.append(found.screen.asked)
    shares = (outcomes.count(each) / audits for each in ("order matters", "order does not matter"))
    return Cell(*shares, CALLS * float(np.mean(asked)), tuple(missed / audits))


def table(worlds: list[World], audits: int) -> tuple[list[str], list[Cell]]:
    """Return the rows of a table, and all cells."""
    rows = [
        f"| system | net sensitivity | questions | matters | does not | calls | missed: {' | '.join(MEASURED)} |",
        f"|{' --- |' * (6 + len(MEASURED))}",
    ]
    cells = []
    for number, world in enumerate(worlds):
        net = expected(world)["net"]
        for questions in SIZES:
            found = cell(world, questions, audits, seed=1000 * number + questions)
            cells.append(found)
            missed = " | ".join(f"{100 * each:.1f}" for each in found.missed)
            shares = " | ".join(f"{100 * each:.1f}" for each in (found.matters, found.clear))
            rows.append(f"| {world.name} | {100 * net:.1f} | {questions} | {shares} | {found.calls:.0f} | {missed} |")
    return rows, cells


def main() -> None:
    """Simulate, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--audits", type=int, default=200)
    chosen = parser.parse_args()
    started = perf_counter()
    blind, blind_cells = table(BLIND, chosen.audits)
    some, some_cells = table(DEPENDS, chosen.audits)
    ten, ten_cells = table([at_net(world, 0.1) for world in DEPENDS], chosen.audits)
    edge, edge_cells = table([at_net(world, MARGIN) for world in DEPENDS], chosen.audits)
    cleared = max(each.clear for each in edge_cells)
    false = max(each.matters for each in blind_cells)
    power = min(each.matters for each in ten_cells[2::3])
    every = [*blind_cells, *some_cells, *ten_cells, *edge_cells]
    missed = [max(each.missed[place] for each in every) for place in range(len(MEASURED))]
    pooled = sum(each.matters for each in blind_cells) / len(blind_cells)
    summary = (
        f"False alarms: at most {false:.1%} in any cell, {pooled:.2%} in all. Power at ten points and 200 questions: "
        f"at least {power:.1%}. A system at the margin is cleared in at most {cleared:.1%} of the audits of a cell. "
        f"Intervals miss the truth in at most {max(missed):.1%} of the audits of a cell ("
        + ", ".join(f"{name} {each:.1%}" for name, each in zip(MEASURED, missed, strict=True))
        + ")."
    )
    parts = [INTRODUCTION.format(audits=chosen.audits), summary, "", "## Where the order does not matter", "", *blind]
    parts += ["", "## Where it does", "", *some, "", "## Where it does, by ten points", "", *ten, ""]
    parts += ["## Where it does, by as much as the margin", "", *edge, ""]
    PAGE.write_text("\n".join(parts), encoding="utf-8")
    print(f"{summary}\nwrote {PAGE} in {perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
