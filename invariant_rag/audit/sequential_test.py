"""The first stage of an audit: does the order matter, does it not, or is it too early to tell?

Each question is asked five times: in the order of today, again, with a placebo (the same order and a change that
cannot matter), and in two other orders. For a system that is blind to the order, the first call, the placebo and the
two other orders are exchangeable, whether answers are random, cached or seeded, so the test is exact. A repeat that a
cache answers is no draw: the first questions show whether repeats come back equal, and the test does not use these;
from then on the repeat is a second placebo, and a draw. See `docs/explanation/audit.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil, inf, log, log1p
from typing import TYPE_CHECKING, Literal

import numpy as np

from invariant_rag.audit.statistics import Estimate, exact_upper_bound, mean_difference

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from invariant_rag.audit.statistics import Floats

    Classes = NDArray[np.int64]

FIRST, AGAIN, PLACEBO, OTHER, ANOTHER = range(5)  # columns of the outcomes of a question
CALLS = 5
FALSE_ALARMS = 0.01  # how often, at most, an order-blind system is said to depend on the order, over all looks
WRONG_CLEARANCES = 0.05  # how often, at most, a system whose net sensitivity is the margin is cleared, over all looks
POWER = 0.9
ALONE = 1.75  # pairs of each kind that are added for the bound of net sensitivity that clears: see `upper_bound`
STOPPED_TAIL = 0.01  # of each bound: who stops at an extreme misses more often than a formula knows
REPEATED = 20  # questions, the first ones, that are asked again without any change
LOOKS = (20, 50, 100)  # after so many questions, then after each doubling, and at the end, a decision is tried

Outcome = Literal["order matters", "order does not matter", "cannot tell yet"]


@dataclass(frozen=True)
class Screen:
    """What the first stage found.

    Attributes:
        outcome, p: The outcome, and the exact p-value of the test that the order matters, over all looks.
        net: Net sensitivity: disagreement between orders minus disagreement within the order of today.
        between, within, repeated: Both, and the disagreement between two equal calls: 0 behind a cache or a fixed seed.
        bound: What net sensitivity stays below, with the confidence that the looks leave (95% in all).
        margin, asked: The margin, and the number of questions.
        more: Questions more that would probably decide; 0 unless it is too early to tell.
        alike: Whether all answers are one, with other documents, too: more questions of this kind do not tell.
    """

    outcome: Outcome
    p: float
    net: Estimate
    between: float
    within: float
    repeated: float
    bound: float
    margin: float
    asked: int
    more: int = 0
    alike: bool = False


def looks(questions: int) -> list[int]:
    """Return after how many questions a decision is tried.

    >>> looks(30), looks(200)
    ([30], [20, 50, 100, 200])
    """
    counts = list(LOOKS)
    while counts[-1] * 2 < questions:
        counts.append(counts[-1] * 2)
    return [*(count for count in counts if count <= 0.6 * questions), questions]


def spent(level: float, share: float) -> float:
    """Return how much of a level may be spent by a share of the questions: little at first (O'Brien and Fleming)."""
    from scipy.stats import norm

    return level if share >= 1 else float(2 * norm.sf(norm.isf(level / 2) / share**0.5))


def screen(classes: Classes, two_orders: Sequence[bool], margin: float, planned: int) -> Screen:
    """Decide after some of the `planned` questions.

    `classes` are those of equal outcomes `[questions, 5]`, in the order of asking. A question of `two_orders` has no
    more, so that the last two columns are one order.
    """
    done = [count for count in looks(planned) if count <= len(classes)]
    p, rejected = _sequential_test(classes, done, planned)
    between, within = disagreements(classes, two_orders)
    bound = upper_bound(between - within, _clearance(done, planned, margin))
    cleared = bound < margin
    outcome: Outcome = "order does not matter" if cleared else "order matters" if rejected else "cannot tell yet"
    net, means = mean_difference(between, within, tail=STOPPED_TAIL), (float(between.mean()), float(within.mean()))
    repeated = float((classes[:REPEATED, FIRST] != classes[:REPEATED, AGAIN]).mean())
    more = 0 if outcome != "cannot tell yet" else max(1, _needed(between - within, margin) - len(classes))
    return Screen(outcome, p, net, *means, repeated, bound, margin, len(classes), more)


def _clearance(done: Sequence[int], planned: int, margin: float) -> float:
    """Return the level of the last look: they share it by questions; one too early leaves its part to the next."""
    used, level = 0.0, WRONG_CLEARANCES
    for count in done:
        level = WRONG_CLEARANCES * count / planned - used
        if upper_bound(np.zeros(count), level) < margin:
            used += level
    return level


def upper_bound(nets: Floats, level: float) -> float:
    """Return what the mean of net sensitivities stays below, but for a share `level` of all audits.

    Neither bound alone keeps its level: the normal one misses too often where an order changes few questions wholly,
    the exact one (which knows shares only) where noise makes nets of both signs.
    """
    total = max(0.0, float(nets.sum()))
    return max(exact_upper_bound(total, len(nets), level), mean_difference(nets, 0 * nets, level, ALONE).high)


def disagreements(classes: Classes, two_orders: Sequence[bool]) -> tuple[Floats, Floats]:
    """Return the share of pairs that disagree, for each question: between orders, and within that of today.

    Within leaves out the pair of two equal calls, which a cache or a seed makes equal. Between gives each pair of
    orders the same weight.
    """
    differ = (classes[:, : PLACEBO + 1, None] != classes[:, None, OTHER:]).mean(axis=1)  # [questions, 2]
    last = (classes[:, OTHER] != classes[:, ANOTHER]).astype(float)
    between = np.where(two_orders, differ.mean(axis=1), (differ.sum(axis=1) + last) / 3)
    pairs = (classes[:, :PLACEBO] != classes[:, PLACEBO, None]).sum(axis=1)
    again = (classes[:, FIRST] != classes[:, AGAIN]).astype(int)
    within = np.where(np.arange(len(classes)) < REPEATED, pairs / 2, (pairs + again) / 3)
    return between, within


def _sequential_test(classes: Classes, done: Sequence[int], planned: int) -> tuple[float, bool]:
    """Return the p-value in the stagewise order of the looks, and whether some look rejects.

    Under the null hypothesis it is random which call gave which of the answers. So the number of pairs that disagree
    within the order of today is a sum of independent numbers of known distributions. Its own distribution, over the
    paths that no earlier look stopped, is carried from look to look, exactly.
    """
    odds, counts = _odds(classes)
    totals = np.cumsum(counts)
    going, used, start, p = np.ones(1), 0.0, 0, 1.0
    for count in done or [len(classes)]:
        for each in odds[start:count]:
            going = np.convolve(going, each)
        start, total = count, int(totals[count - 1])
        tail = np.cumsum(going)
        p = min(1.0, used + float(tail[total]))
        allowed = spent(FALSE_ALARMS, count / planned) if done else 0.0
        critical = int(np.searchsorted(tail, allowed - used, side="right"))  # so many values of the sum reject
        if total < critical:
            return p, True
        used += float(tail[critical - 1]) if critical else 0.0
        going[:critical] = 0.0
    return p, False


def _odds(classes: Classes) -> tuple[Floats, Classes]:
    """Return how likely 0 to 3 disagreeing pairs within the order of today are, `[questions, 4]`, and their number.

    Of the first questions, two calls are draws in the order of today; their disagreement counts as two pairs.
    """
    odds, seen = [], []
    early = classes[:REPEATED, [FIRST, PLACEBO, OTHER, ANOTHER]]
    for drawn, size, weight in ((early, 2, 2), (classes[REPEATED:], PLACEBO + 1, 1)):
        pairs = [
            sum((drawn[:, one] != drawn[:, other]).astype(int) for one, other in combinations(chosen, 2)) * weight
            for chosen in combinations(range(drawn.shape[1]), size)
        ]  # the calls of today come first
        counts = np.stack(pairs, axis=1)
        odds.append(np.stack([(counts == number).mean(axis=1) for number in range(4)], axis=1))
        seen.append(counts[:, 0])
    return np.vstack(odds), np.concatenate(seen)


def _needed(nets: Floats, margin: float) -> int:
    """Return how many questions probably decide, one way or the other, if the next ones are like those asked."""
    from scipy.stats import norm

    mean, gap, variance = float(nets.mean()), margin - max(float(nets.mean()), 0.0), float(nets.var())
    alarm, clearance, power = (float(norm.isf(each)) for each in (FALSE_ALARMS, WRONG_CLEARANCES, 1 - POWER))
    shown = ((alarm + power) / mean) ** 2 * variance if mean > 0 else inf
    cleared = ((clearance + power) / gap) ** 2 * variance if gap > 0 else inf
    return ceil(max(log(WRONG_CLEARANCES) / log1p(-margin), min(shown, cleared)))  # the first: where nothing differs
