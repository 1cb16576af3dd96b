"""Two dozen simulated systems of known behaviour (worlds.toml): how an audit of them should end.

No model is asked: the outcomes of a screen and of a remedy are drawn as a system would give them, and go through the
functions that a real audit decides with. `calibrate.py` simulates many audits, `tests/audit/test_statistics.py` a few.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from invariant_rag.audit.plan import SLOTS
from invariant_rag.audit.result import worst_slot
from invariant_rag.audit.sequential_test import (
    ANOTHER,
    FIRST,
    OTHER,
    PLACEBO,
    REPEATED,
    STOPPED_TAIL,
    Screen,
    disagreements,
    looks,
    screen,
)
from invariant_rag.audit.statistics import Estimate, mean_difference, mean_interval

Floats = NDArray[np.float64]
DOCUMENTS = 10
MARGIN = 0.05
WRONG, RIGHT, FAILED = 0, 1, 2
READS: dict[str, Callable[[Floats], NDArray[np.bool_]]] = {  # where a system finds the gold document: 0 first, 1 last
    "first": lambda place: place == 0,
    "last": lambda place: place == 1,
    "late": lambda place: place > 2 / 3,
    "ends": lambda place: (place < 0.25) | (place > 0.75),
}


@dataclass(frozen=True)
class World:
    """A system, its retriever, and what grades its answers."""

    name: str
    reads: str = ""
    share: float = 0.25  # of the questions where the order matters; others are right 4 times of 5, in every order
    noise: float = 0.0  # chance that a draw is turned around
    coins: float = 0.0  # share of the questions whose answer is a coin, whatever the order
    fails: float = 0.0  # chance that a call fails
    copies: bool = False  # an equal call gets an equal answer: a cache, or a fixed seed
    first: float = 0.9  # how often the retriever lists the gold document first; else anywhere
    last: bool = False  # that is last instead
    wordings: int = 0  # that a system without gold answers draws from; 0: answers are right or wrong
    merged: float = 1.0  # share of different wordings that the judge says mean the same
    two: bool = False  # each question has two documents only


TABLE = tomllib.loads((Path(__file__).parent / "worlds.toml").read_text("utf-8"))
BLIND, DEPENDS = ([World(**each) for each in TABLE[name]] for name in ("blind", "depends"))
WORLDS = {each.name: each for each in (*BLIND, *DEPENDS)}


@dataclass(frozen=True)
class Draws:
    """Outcomes of a screen `[questions, 5]`, and of two draws with the documents reversed.

    `places` are the relative places of the gold document in the two other orders `[questions, 2]`.
    """

    classes: NDArray[np.int64]
    remedy: NDArray[np.int64]
    places: Floats

    @property
    def slots(self) -> NDArray[np.int64]:
        """Part of the prompt with the gold document, in the two other orders."""
        return np.minimum(SLOTS - 1, (self.places * SLOTS).astype(np.int64))


def draw(world: World, questions: int, source: np.random.Generator) -> Draws:
    """Draw the outcomes of an audit."""
    documents = 2 if world.two else DOCUMENTS
    top = source.random((questions, 1)) < world.first
    rank = np.where(top, 0, source.integers(0, documents, (questions, 1)))
    rank = documents - 1 - rank if world.last else rank
    others = np.hstack([1 - rank, 1 - rank]) if world.two else source.integers(0, documents, (questions, 2))
    places = np.hstack([rank, rank, rank, others, documents - 1 - rank, documents - 1 - rank]) / (documents - 1)
    hardness = source.random((questions, 1))
    right = np.broadcast_to(hardness < 0.8, places.shape)
    if world.reads:
        easy = (hardness - world.share) < 0.8 * (1 - world.share)
        right = np.where(hardness < world.share, READS[world.reads](places), easy)
    coin = source.random((questions, 1)) < world.coins
    turned = source.random(places.shape) < np.where(coin, 0.5, world.noise)
    classes = np.where(turned, ~right, right).astype(np.int64)
    if world.wordings:  # some of which a judge holds for another answer
        wording = source.integers(0, world.wordings, places.shape)
        kept = source.random((questions, world.wordings)) >= world.merged
        classes = np.where(np.take_along_axis(kept, wording, axis=1), wording + 1, 0)
    classes = np.where(source.random(places.shape) < world.fails, FAILED, classes)
    if world.copies:
        classes[:REPEATED, 1], classes[:, 6] = classes[:REPEATED, 0], classes[:, 5]  # later, a second placebo
        if world.two:
            classes[:, 4] = classes[:, 3]
    return Draws(classes[:, :5], classes[:, 5:], places[:, 3:5])


@cache
def expected(world: World, questions: int = 400_000) -> dict[str, float]:
    """Return what an audit of endlessly many questions would measure."""
    drawn = draw(world, questions, np.random.default_rng(1))
    between, within = disagreements(drawn.classes, np.full(questions, world.two))
    right, slots = drawn.classes[:, [OTHER, ANOTHER]] == RIGHT, drawn.slots
    today, remedy = (float((each == RIGHT).mean()) for each in (drawn.classes[:, :2], drawn.remedy))
    return {
        "net": float((between - within).mean()),
        "today": today,
        "orders": float(right.mean()),
        "slot": min(float(right[slots == each].mean()) for each in range(SLOTS) if (slots == each).any()),
        "errors": float((drawn.classes == FAILED).mean()),
        "gain": remedy - today,
    }


def at_net(world: World, net: float) -> World:
    """Return the same world with a share of sensitive questions that makes its net sensitivity this one."""
    whole = expected(replace(world, share=1.0))["net"]  # of the other questions, it is 0
    return replace(world, name=f"{world.name}, {100 * net:g} points", share=net / whole)


@dataclass(frozen=True)
class Simulated:
    """One simulated audit: what was drawn, and what the screen found when it stopped."""

    drawn: Draws
    screen: Screen

    def estimates(self) -> dict[str, Estimate | None]:
        """Return what the audit measures: after the questions that were asked, and the gain of a remedy after all."""
        asked, right = self.screen.asked, self.drawn.classes == RIGHT
        today, orders, remedy = (
            each.mean(axis=1)
            for each in (right[:, [FIRST, PLACEBO]], right[:, [OTHER, ANOTHER]], self.drawn.remedy == RIGHT)
        )
        errors = (self.drawn.classes[:asked] == FAILED).mean(axis=1)
        pairs = zip(self.drawn.slots[:asked], right[:asked, [OTHER, ANOTHER]], strict=True)
        return {
            "net": self.screen.net,
            "today": mean_interval(today[:asked], tail=STOPPED_TAIL),
            "orders": mean_interval(orders[:asked], tail=STOPPED_TAIL),
            "slot": worst_slot([list(zip(*each, strict=True)) for each in pairs]),
            "errors": mean_interval(errors, tail=STOPPED_TAIL),
            "gain": mean_difference(remedy, today),
        }


def simulate(world: World, questions: int, source: np.random.Generator) -> Simulated:
    """Draw an audit and screen it, with the looks of a real one, until the outcome is known or all was asked."""
    drawn = draw(world, questions, source)
    for count in looks(questions):
        found = screen(drawn.classes[:count], [world.two] * count, MARGIN, questions)
        if found.outcome != "cannot tell yet":
            break
    return Simulated(drawn, found)
