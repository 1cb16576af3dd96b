"""Two dozen simulated systems of known behaviour: how an audit of them should end.

No model is asked: the outcomes of a screen and of a remedy are drawn as a system would give them, and go through the
functions that a real audit decides with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from invariant_rag.audit.screen import REPEATED, disagreements

Floats = NDArray[np.float64]
DOCUMENTS = 10
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


BLIND = (  # where the order does not matter
    World("order-blind"),
    World("order-blind, 1% noise", noise=0.01),
    World("order-blind, 3% noise", noise=0.03),
    World("order-blind, 10% noise", noise=0.1),
    World("order-blind, cached, 1% noise", noise=0.01, copies=True),
    World("order-blind, cached, 10% noise", noise=0.1, copies=True),
    World("order-blind, a tenth are coins", coins=0.1),
    World("order-blind, a tenth are coins, seeded", coins=0.1, copies=True),
    World("order-blind, 5% of calls fail", fails=0.05),
    World("order-blind, 3% noise, 5% fail", noise=0.03, fails=0.05),
    World("rewords, judged without error", wordings=5),
    World("rewords, judged with 10% error", wordings=5, merged=0.9),
    World("rewords, seeded, judged with 10% error", wordings=5, merged=0.9, copies=True),
    World("order-blind, two documents, 10% noise", noise=0.1, two=True),
)
DEPENDS = (  # where it does
    World("reads the first", "first"),
    World("reads the first, 3% noise", "first", noise=0.03),
    World("reads the last, retriever lists it first", "last"),
    World("reads the last, retriever lists it last", "last", last=True),
    World("recency, 3% noise", "late", noise=0.03),
    World("recency, seeded, 10% noise", "late", noise=0.1, copies=True),
    World("lost in the middle", "ends", first=0.5),
    World("lost in the middle, 10% noise", "ends", first=0.5, noise=0.1),
    World("a tenth of the questions only", "late", share=0.1),
    World("recency, two documents", "last", two=True),
)
WORLDS = (*BLIND, *DEPENDS)


@dataclass(frozen=True)
class Draws:
    """One simulated audit: outcomes of the screen `[questions, 5]`, and of two draws with the documents reversed.

    `places` are the relative places of the gold document in the two other orders `[questions, 2]`.
    """

    classes: NDArray[np.int64]
    remedy: NDArray[np.int64]
    places: Floats


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


def expected(world: World, questions: int = 400_000) -> dict[str, float]:
    """Return what an audit of endlessly many questions would measure."""
    drawn = draw(world, questions, np.random.default_rng(1))
    between, within = disagreements(drawn.classes, np.full(questions, world.two))
    today, remedy = (drawn.classes[:, :2] == RIGHT).mean(), (drawn.remedy == RIGHT).mean()
    return {"net": float((between - within).mean()), "today": float(today), "gain": float(remedy - today)}


def at_net(world: World, net: float) -> World:
    """Return the same world with a share of sensitive questions that makes its net sensitivity this one."""
    whole = expected(replace(world, share=1.0))["net"]  # of the other questions, it is 0
    return replace(world, name=f"{world.name}, {100 * net:g} points", share=net / whole)
