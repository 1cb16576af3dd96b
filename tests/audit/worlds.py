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


@dataclass(frozen=True)
class World:
    """A system, its retriever, and what grades its answers."""

    name: str
    finds: Callable[[Floats], NDArray[np.bool_]] | None = None  # the gold document, at a place (0: first, 1: last)
    share: float = 0.0  # of the questions where the order matters; others are right 4 times of 5, in every order
    noise: float = 0.0  # chance that a draw is turned around
    coins: float = 0.0  # share of the questions whose answer is a coin, whatever the order
    fails: float = 0.0  # chance that a call fails
    copies: bool = False  # an equal call gets an equal answer: a cache, or a fixed seed
    first: float = 0.9  # how often the retriever lists the gold document first; else anywhere
    last: bool = False  # that is last instead
    wordings: int = 0  # that a system without gold answers draws from; 0: answers are right or wrong
    merged: float = 1.0  # share of different wordings that the judge says mean the same
    two: bool = False  # each question has two documents only


def only_first(place: Floats) -> NDArray[np.bool_]:
    return place == 0


def only_last(place: Floats) -> NDArray[np.bool_]:
    return place == 1


def late(place: Floats) -> NDArray[np.bool_]:
    return place > 2 / 3


def ends(place: Floats) -> NDArray[np.bool_]:
    return (place < 0.25) | (place > 0.75)


BLIND = (
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
"""Where the order does not matter."""

DEPENDS = (
    World("reads the first", only_first, share=0.25),
    World("reads the first, 3% noise", only_first, share=0.25, noise=0.03),
    World("reads the last, retriever lists it first", only_last, share=0.25),
    World("reads the last, retriever lists it last", only_last, share=0.25, last=True),
    World("recency, 3% noise", late, share=0.25, noise=0.03),
    World("recency, seeded, 10% noise", late, share=0.25, noise=0.1, copies=True),
    World("lost in the middle", ends, share=0.25, first=0.5),
    World("lost in the middle, 10% noise", ends, share=0.25, first=0.5, noise=0.1),
    World("a tenth of the questions only", late, share=0.1),
    World("recency, two documents", only_last, share=0.25, two=True),
)
"""Where it does."""

WORLDS = (*BLIND, *DEPENDS)


@dataclass(frozen=True)
class Draws:
    """One simulated audit.

    Attributes:
        classes: Outcomes of the screen `[questions, 5]`.
        remedy: Outcomes of two draws of the same system with the documents reversed `[questions, 2]`.
        places: Relative place of the gold document in the two other orders `[questions, 2]`.
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
    if world.finds is not None:
        right = np.where(
            hardness < world.share, world.finds(places), (hardness - world.share) < 0.8 * (1 - world.share)
        )
    coin = source.random((questions, 1)) < world.coins
    turned = source.random(places.shape) < np.where(coin, 0.5, world.noise)
    classes = np.where(turned, ~right, right).astype(np.int64)
    if world.wordings:
        wording = source.integers(0, world.wordings, places.shape)
        kept = (
            source.random((questions, world.wordings)) >= world.merged
        )  # wordings that a judge holds for another answer
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
