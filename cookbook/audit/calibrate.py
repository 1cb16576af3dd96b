"""Simulate audits of systems of known behaviour: how often do they recommend something, and rightly?

No model is asked: outcomes are drawn as toy systems would give them, and go through the functions that a real audit
decides with. Writes `cookbook/results/audit_calibration.md`. Run it with `make calibrate-audit`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from invariant_rag.evaluation.audit.effects import ORDER_LEVEL, REMEDY_LEVEL, Listing, assess, choose
from invariant_rag.evaluation.audit.outcomes import Outcomes
from invariant_rag.evaluation.statistics import wilson_interval

Floats = NDArray[np.float64]
Reads = Callable[[Floats, Floats, np.random.Generator], Floats]

PAGE = Path(__file__).parents[1] / "results" / "audit_calibration.md"
DOCUMENTS = 10
REPEATS, ORDERS, SLOTS, VOTES = 3, 9, 5, 5  # as an audit asks by default
CALLS = {"sort": 1.0, "rerank": 1.0, "top-3": 1.0, "long-context-reorder": 1.0, "vote": 5.0}
CRITERION, POWER = 0.02, 0.9


@dataclass(frozen=True)
class World:
    """A system and its retriever.

    Attributes:
        name: What it does.
        reads: Says which questions are right, from the relative position of the gold segment (0: first, 1: last), a
            fixed number of each question from 0 to 1, and a source of what the order does besides.
        gold_first: How often the best score is that of the gold segment.
        listed_by_score: Whether the retriever lists by score; else anyhow.
        reranked: Whether the retriever lists by another score, best first, than the one that is known.
        errors: Share of calls whose outcome is turned around by chance.
        crashes: Share of calls without an answer.
        scored: Whether the scores are known, so that remedies by score can be tried.
    """

    name: str
    reads: Reads
    gold_first: float = 0.95
    listed_by_score: bool = True
    reranked: bool = False
    errors: float = 0.0
    crashes: float = 0.0
    scored: bool = True


def blind(position: Floats, hardness: Floats, _: np.random.Generator) -> Floats:
    """Read every order alike: four questions of five are right."""
    return np.broadcast_to(hardness < 0.8, position.shape).astype(float)


def sensitive(where: Callable[[Floats], Floats], share: float, position: Floats, hardness: Floats, _: object) -> Floats:
    """Answer a share of the questions from some positions only; of the others, four of five are right."""
    easy = np.broadcast_to(hardness < 0.8 * (1 - share), position.shape)
    return (easy | ((hardness > 1 - share) & where(position).astype(bool))).astype(float)


def only_first(position: Floats) -> Floats:
    """The first position."""
    return position == 0


def only_last(position: Floats) -> Floats:
    """The last position."""
    return position == 1


def late(position: Floats) -> Floats:
    """The last third."""
    return position > 2 / 3


def ends(position: Floats) -> Floats:
    """All but the middle."""
    return (position < 0.25) | (position > 0.75)


def by_chance_of_order(
    right: float, share: float, position: Floats, hardness: Floats, source: np.random.Generator
) -> Floats:
    """Answer a share of the questions from some orders, whatever the slot; of the others, four of five are right."""
    easy = np.broadcast_to(hardness < 0.8 * (1 - share), position.shape)
    return (easy | ((hardness > 1 - share) & (source.random(position.shape) < right))).astype(float)


def simulate(world: World, questions: int, source: np.random.Generator) -> tuple[Outcomes, dict[str, Outcomes]]:
    """Draw the outcomes of an audit: of the system as it is, and with every remedy."""
    hardness = source.random((questions, 1))
    first = source.random((questions, 1)) < world.gold_first
    rank = np.where(first, 0, source.integers(1, DOCUMENTS, (questions, 1)))  # of the gold segment, by score

    def reads(place: NDArray[np.int64], listed: int = DOCUMENTS) -> Floats:
        return world.reads(place / (listed - 1), hardness, source)

    def said(right: Floats, calls: int = 1) -> Floats:
        """What is answered where the system reads rightly: with errors, and sometimes not at all."""
        repeated = np.repeat(right, calls, axis=1)
        turned = source.random(repeated.shape) < world.errors
        answered = np.where(turned, 1 - repeated, repeated)
        return np.where(source.random(repeated.shape) < world.crashes, np.nan, answered)

    def anywhere(count: int) -> NDArray[np.int64]:
        return source.integers(0, DOCUMENTS, (questions, count))

    def outcomes(given: Floats, orders: Floats, slots: bool) -> Outcomes:
        places = np.linspace(0, DOCUMENTS - 1, SLOTS).round().astype(int)[None, :].repeat(questions, axis=0)
        salted, moved = (said(reads(places)) if slots else np.empty((0, 0)) for _ in range(2))
        return Outcomes(given, orders, salted, given, orders, moved, salted)

    def fixed(right: Floats) -> Outcomes:
        """A remedy that lists every input order alike."""
        asked = said(right, REPEATS)
        return outcomes(asked, asked[:, np.arange(1, ORDERS + 1) % REPEATS], slots=False)

    def vote(starts: NDArray[np.int64]) -> Floats:
        right = [reads((starts + turn * DOCUMENTS // VOTES) % DOCUMENTS) for turn in range(VOTES)]
        rounds = [np.hstack([said(each) for each in right]) for _ in range(REPEATS)]
        with np.errstate(invalid="ignore"):
            return np.column_stack([(np.nanmean(each, axis=1) > 0.5).astype(float) for each in rounds])

    best_first = reads(rank)
    today = best_first if world.listed_by_score or world.reranked else reads(anywhere(1))
    rank = anywhere(1) if world.reranked else rank
    by_score = reads(rank) if world.reranked else best_first
    voted = vote(anywhere(1))
    kept = np.where(rank < 3, reads(rank, 3), 0.0)
    at_ends = np.where(rank % 2 == 0, DOCUMENTS - 1 - rank // 2, rank // 2)  # ten documents: the best is the last
    remedies = {
        "sort": fixed(reads(anywhere(1))),
        "rerank": fixed(by_score),
        "top-3": fixed(kept),
        "long-context-reorder": fixed(reads(at_ends)),
        "vote": outcomes(voted, voted[:, np.arange(1, ORDERS + 1) % REPEATS], slots=False),
    }
    if not world.scored:
        remedies = {name: remedies[name] for name in ("sort", "vote")}
    return outcomes(said(today, REPEATS), said(reads(anywhere(ORDERS))), slots=True), remedies


def audit(world: World, questions: int, seed: int) -> tuple[str, bool]:
    """Return what a simulated audit recommends ("" for nothing), and whether it is for a gain in accuracy."""
    system, remedies = simulate(world, questions, np.random.default_rng([seed, questions]))
    same = ["rerank"] if world.listed_by_score and world.scored else []
    listing = Listing.BY_SCORE if world.listed_by_score else Listing.NOT_BY_SCORE
    effects = assess(system, remedies, CALLS, same, seed, listing if world.scored else Listing.UNKNOWN)
    chosen = choose(effects)
    return ("", False) if chosen is None else (chosen.name, chosen.is_better)


def true_gain(world: World) -> tuple[float, str]:
    """Return the largest gain of a remedy against today, and which it is, over very many questions."""
    system, remedies = simulate(world, 200_000, np.random.default_rng(0))
    gains = {name: float(np.nanmean(each.today) - np.nanmean(system.today)) for name, each in remedies.items()}
    best = max(gains, key=lambda name: gains[name])
    return gains[best], best


def noisy(name: str, errors: float) -> str:
    """Return the name of a world with errors."""
    return f"{name}, {errors:.0%} errors" if errors else name


NULL = [
    World("order-blind", blind),
    *(World(noisy("order-blind", errors), blind, errors=errors) for errors in (0.01, 0.03, 0.1, 0.33)),
    World("order-blind, 5% of calls crash", blind, crashes=0.05),
    World("order-blind, 3% errors, 5% crash", blind, errors=0.03, crashes=0.05),
    World("reads the first, gold is first", partial(sensitive, only_first, 1.0)),
    World("reads the first, gold is first, 3% errors", partial(sensitive, only_first, 1.0), errors=0.03),
    World("reads the first, gold is first, no scores", partial(sensitive, only_first, 1.0), scored=False),
    World("lost in the middle, gold is first", partial(sensitive, ends, 0.3)),
    World("lost in the middle, gold is first, 3% errors", partial(sensitive, ends, 0.3), errors=0.03),
    World("lost in the middle, gold is first, no scores", partial(sensitive, ends, 0.3), scored=False),
    World(
        "lost in the middle, gold is first, reranked",
        partial(sensitive, ends, 0.3),
        listed_by_score=False,
        reranked=True,
    ),
]
"""Nothing should be done: the order does nothing, or today's order is the best one."""

NO_GAIN = [
    World("slot-sensitive, no scores", partial(by_chance_of_order, 0.5, 0.2), 0.1, scored=False),
    World("slot-sensitive, listed anyhow", partial(by_chance_of_order, 0.5, 0.2), 0.1, listed_by_score=False),
    World("reads the first, listed anyhow", partial(sensitive, only_first, 0.3), 0.1, listed_by_score=False),
]
"""The order matters, and no remedy is more accurate than today: steadier answers may be recommended, gains may not.

Steadier answers are recommended only where the scores show that the order is no ranking.
"""


def effects_of_ten_points(errors: float) -> list[World]:
    """Return worlds in which one remedy gains 10 points. Errors by chance make every gain smaller: it is scaled."""
    scale = 0.1 / (1 - 2 * errors)
    listed = {"listed_by_score": False, "errors": errors}
    return [
        World(noisy("reads the first", errors), partial(sensitive, only_first, scale / 0.85), **listed),
        World(noisy("reads the last", errors), partial(sensitive, only_last, scale / 0.85), **listed),
        World(noisy("recency", errors), partial(sensitive, late, scale / 0.63), **listed),
        World(noisy("lost in the middle", errors), partial(sensitive, ends, scale / 0.375), **listed),
    ]


def rows(worlds: list[World], sizes: list[int], audits: int) -> list[tuple[World, int, list[tuple[str, bool]]]]:
    """Simulate audits of every world and size."""
    return [(world, size, [audit(world, size, seed) for seed in range(audits)]) for world in worlds for size in sizes]


def share(count: int, of: int) -> str:
    """Return a share in per cent with its interval."""
    found = wilson_interval(count, of)
    return f"{100 * found.value:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def tally(said: list[tuple[str, bool]]) -> str:
    """Return which remedies were recommended, most frequent first."""
    names = [name for name, _ in said if name]
    return ", ".join(f"{each} {names.count(each)}" for each in sorted(set(names), key=names.count, reverse=True)) or "-"


def page(audits: int) -> str:
    """Simulate everything, and return the page."""
    null = rows(NULL, [20, 200], audits)
    no_gain = rows(NO_GAIN, [200], audits)
    worlds = [world for errors in (0.0, 0.01, 0.03, 0.1) for world in effects_of_ten_points(errors)]
    power = rows(worlds, [200], max(100, audits // 4))
    swapped = World("slot-sensitive", partial(by_chance_of_order, 0.75, 0.69), 0.1, listed_by_score=False)
    power += rows([swapped], [200, 400], max(100, audits // 4))

    lines = [
        *_head(audits),
        "## Where nothing should be done",
        "",
        f"The criterion: at most {CRITERION:.0%}.",
        "",
        "| system | questions | recommends something, % | what |",
        "| --- | --- | --- | --- |",
        *(
            f"| {w.name} | {n} | {share(sum(bool(a) for a, _ in said), len(said))} | {tally(said)} |"
            for w, n, said in null
        ),
        "",
        "## Where no remedy gains accuracy",
        "",
        "Here the order matters. A remedy may be recommended because answers get steadier, but not for a gain; nor",
        "for steadier answers where nothing is known of how the retriever lists.",
        "",
        "| system | questions | claims a gain, % | recommends something, % |",
        "| --- | --- | --- | --- |",
        *(
            f"| {w.name} | {n} | {share(sum(g for _, g in said), len(said))} "
            f"| {share(sum(bool(a) for a, _ in said), len(said))} |"
            for w, n, said in no_gain
        ),
        "",
        "## Where a remedy gains 10 points",
        "",
        f"The criterion: at least {POWER:.0%} of the audits of 200 questions recommend something.",
        "",
        "| system | questions | true gain, points | recommends something, % | what |",
        "| --- | --- | --- | --- | --- |",
    ]
    for world, size, said in power:
        gain, _ = true_gain(world)
        found = share(sum(bool(answer) for answer, _ in said), len(said))
        lines.append(f"| {world.name} | {size} | {100 * gain:.1f} | {found} | {tally(said)} |")
    return "\n".join([*lines, "", *_foot(), ""])


def _head(audits: int) -> list[str]:
    return [
        "# How often an audit is right",
        "",
        f"Written by `make calibrate-audit`: {audits} simulated audits of each system where nothing should be done,",
        f"and {max(100, audits // 4)} where something should, with {DOCUMENTS} documents, {REPEATS} calls in the given",
        f"order, {ORDERS} other orders, {SLOTS} slots and five remedies, as an audit asks by default. The decisions",
        "are those of `invariant_rag.evaluation.audit.effects`: no remedy without an order effect that chance does not",
        f"make (level {ORDER_LEVEL:.0%}), and none that is not better than today (level {REMEDY_LEVEL:.0%} for all",
        "remedies together), or steadier without a loss where the order is known to be no ranking. Shares have 95%",
        "intervals. Other words count as no other outcome, so a system that rephrases is the order-blind one, and so",
        "is a slow one.",
        "",
    ]


def _foot() -> list[str]:
    return [
        "The slot-sensitive system of the last two rows answers from some orders and not from others, whatever the",
        "slot. Voting gains 10 points there, but loses many questions that were right by luck. Of such a gain 200",
        "questions are not always enough evidence: other remedies are then recommended because answers get steadier.",
    ]


def main() -> None:
    """Simulate, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--audits", type=int, default=1000, help="simulated audits of each null system")
    parser.add_argument("--out", type=Path, default=PAGE)
    given = parser.parse_args()
    start = perf_counter()
    text = page(given.audits)
    given.out.write_text(text, encoding="utf-8")
    print(text)
    print(f"{perf_counter() - start:.0f} seconds; written to {given.out}")


if __name__ == "__main__":
    main()
