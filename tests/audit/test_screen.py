"""Claims about the statistics of an audit: exact where they say so, right in simulated worlds, stopped early."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from invariant_rag.audit.screen import (
    ALONE,
    FALSE_ALARMS,
    REPEATED,
    Screen,
    disagreements,
    looks,
    screen,
    spent,
    upper_bound,
)
from invariant_rag.audit.statistics import mean_difference, mean_interval
from tests.audit.worlds import BLIND, DEPENDS, RIGHT, World, at_net, draw, expected

AUDITS = 40


def run(world: World, questions: int, source: np.random.Generator) -> tuple[Screen, int]:
    """Simulate one screen, and return what it found after how many questions."""
    drawn = draw(world, questions, source)
    two = [world.two] * questions
    for count in looks(questions):
        found = screen(drawn.classes[:count], two[:count], 0.05, questions)
        if found.outcome != "cannot tell yet":
            break
    return found, count


@pytest.mark.parametrize("calls", [4, 5])
def test_the_p_value_is_that_of_all_permutations(calls: int) -> None:
    source = np.random.default_rng(calls)
    classes = source.integers(0, 2, (4, 5))
    if calls == 5:  # from here on, the second call is a draw
        classes = np.vstack([np.zeros((REPEATED, 5), dtype=int), classes])
    columns = [0, 2, 3, 4] if calls == 4 else range(5)
    rows = [row[columns] for row in classes[-4:]]

    def pairs(row: tuple[int, ...]) -> int:
        today = row[:2] if calls == 4 else row[:3]
        return sum(one != other for index, one in enumerate(today) for other in today[:index])

    sums = np.ones(1)
    for row in rows:
        counts = np.bincount([pairs(each) for each in permutations(row)], minlength=4)
        sums = np.convolve(sums, counts / counts.sum())
    seen = sum(pairs(tuple(row)) for row in rows)
    found = screen(classes, [False] * len(classes), 0.05, len(classes))
    assert found.p == pytest.approx(min(1.0, sums[: seen + 1].sum()))


def test_disagreement_gives_each_pair_of_orders_one_weight_and_leaves_out_equal_calls() -> None:
    rows = np.array([[0, 0, 0, 1, 1], [0, 1, 0, 0, 0]])
    between, within = disagreements(rows, [False, False])
    assert (between.round(3).tolist(), within.tolist()) == ([0.667, 0.222], [0.0, 0.5])


def test_what_was_spent_at_earlier_looks_is_not_spent_again() -> None:
    shares = [count / 200 for count in looks(200)]
    assert spent(FALSE_ALARMS, shares[0]) < 1e-9
    assert [spent(FALSE_ALARMS, each) for each in shares] == sorted(spent(FALSE_ALARMS, each) for each in shares)
    assert spent(FALSE_ALARMS, 1.0) == FALSE_ALARMS
    classes = np.array([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1, 0], [0, 1, 1, 0, 0]] * 25)
    early, whole = (screen(classes, [False] * 100, 0.05, planned) for planned in (200, 100))
    assert early.p == pytest.approx(whole.p, rel=0.2)  # paths that an earlier look stopped are counted once


@pytest.mark.parametrize("world", BLIND, ids=lambda world: world.name)
def test_a_blind_system_is_not_said_to_depend_on_the_order(world: World) -> None:
    source = np.random.default_rng(3)
    found = [run(world, questions, source)[0] for questions in (20, 50, 200) for _ in range(AUDITS)]
    assert sum(each.outcome == "order matters" for each in found) <= 0.04 * len(found)  # `make calibrate-audit`: 2%


@pytest.mark.parametrize("world", DEPENDS, ids=lambda world: world.name)
def test_ten_points_at_200_questions_are_found(world: World) -> None:
    source, sensitive = np.random.default_rng(4), at_net(world, 0.1)
    found = [run(sensitive, 200, source)[0].outcome for _ in range(AUDITS)]
    assert found.count("order matters") >= 0.82 * len(found)  # 90% and more in calibrate-audit, with 200 audits
    assert "order does not matter" not in found


@pytest.mark.parametrize("world", [BLIND[5], DEPENDS[0]], ids=lambda world: world.name)
def test_intervals_hold_the_truth(world: World) -> None:
    source, truth = np.random.default_rng(5), expected(world, 100_000)
    missed = {"net": 0, "today": 0, "gain": 0}
    for _ in range(2 * AUDITS):
        drawn = draw(world, 100, source)
        today, remedy = ((each == RIGHT).mean(axis=1) for each in (drawn.classes[:, [0, 2]], drawn.remedy))
        net = screen(drawn.classes, [world.two] * 100, 0.05, 100).net
        for name, estimate in {
            "net": net,
            "today": mean_interval(today),
            "gain": mean_difference(remedy, today),
        }.items():
            missed[name] += not estimate.low <= truth[name] <= estimate.high
    assert max(missed.values()) <= 0.11 * 2 * AUDITS, missed


def test_the_bound_that_clears_is_exact_where_nothing_differs_and_not_below_the_normal_one() -> None:
    assert [upper_bound(np.zeros(count), 0.05) < 0.05 for count in (58, 59)] == [False, True]  # 0.95**59 < 0.05
    ones = np.array([1.0] * 3 + [0.0] * 97)
    assert upper_bound(ones, 0.05) == pytest.approx(0.0757, abs=1e-4)  # Clopper and Pearson, 3 of 100
    noisy = np.array([1.0, -1.0] * 20 + [0.0] * 60)
    assert upper_bound(noisy, 0.05) == mean_difference(noisy, 0 * noisy, 0.05, ALONE).high > 0.1


@pytest.mark.parametrize("world", [DEPENDS[0], DEPENDS[1], DEPENDS[9]], ids=lambda world: world.name)
def test_a_system_at_the_margin_is_cleared_by_one_audit_in_twenty_at_most(world: World) -> None:
    """The last is all or nothing: a question has two orders, and either both agree or none does."""
    source, sensitive = np.random.default_rng(7), at_net(world, 0.05)
    found = [run(sensitive, 200, source)[0].outcome for _ in range(200)]
    assert found.count("order does not matter") <= 16  # of 200 at 5%, more come once in 50; with exact bounds, 2% here


def test_a_cache_hides_no_noise() -> None:
    cached = next(each for each in BLIND if each.copies and each.noise == 0.1)
    found, _ = run(cached, 200, np.random.default_rng(0))
    assert found.repeated == 0.0
    assert found.within > 0.1
    assert found.outcome != "order matters"


def test_a_clear_case_stops_early_and_a_system_without_noise_is_cleared() -> None:
    source = np.random.default_rng(1)
    assert run(DEPENDS[0], 200, source)[1] <= 100
    found, count = run(BLIND[0], 200, source)
    assert (found.outcome, count) == ("order does not matter", 100)
    assert run(BLIND[0], 20, source)[0].outcome == "cannot tell yet"
    classes = draw(
        DEPENDS[8], 200, np.random.default_rng(6)
    ).classes  # a wider margin clears what a narrow one does not
    outcomes = [screen(classes, [False] * 200, margin, 200).outcome for margin in (0.01, 0.2)]
    assert outcomes[1] == "order does not matter" != outcomes[0]


def test_who_cannot_tell_yet_says_how_many_questions_more_and_those_decide() -> None:
    found = screen(draw(BLIND[3], 50, np.random.default_rng(2)).classes, [False] * 50, 0.05, 50)
    assert found.outcome == "cannot tell yet"
    again = [run(BLIND[3], 50 + found.more, np.random.default_rng(seed))[0].outcome for seed in range(10)]
    assert again.count("order does not matter") >= 7
