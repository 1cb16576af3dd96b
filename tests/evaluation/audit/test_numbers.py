"""Claims about intervals, orders, picks and metrics, on cases worked out by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_rag.evaluation.audit.bootstrap import Bootstrap, chance_spread, interval
from invariant_rag.evaluation.audit.orders import gold_at, input_orders, salt_for, salted_order
from invariant_rag.evaluation.audit.plan import common_slots
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.systems import read_pick
from invariant_rag.evaluation.metrics import best_subspan_em, exact_match, token_f1
from invariant_rag.segments import Segment


def test_the_interval_of_a_mean_is_that_of_the_binomial_distribution() -> None:
    # 50 of 100 are right: a resample's mean is binomial, with quantiles 0.40 and 0.60.
    values = np.repeat([0.0, 1.0], 50)
    estimate = interval(Bootstrap(100, resamples=20_000).means(values))
    assert estimate.value == 0.5
    assert (estimate.low, estimate.high) == pytest.approx((0.40, 0.60), abs=0.0101)


def test_values_that_are_all_equal_have_no_interval() -> None:
    estimate = interval(Bootstrap(7).means(np.full(7, 0.25)))
    assert (estimate.value, estimate.low, estimate.high) == (0.25, 0.25, 0.25)


def test_differences_are_paired() -> None:
    bootstrap = Bootstrap(50)
    hard = np.random.default_rng(0).random(50)
    difference = interval(bootstrap.means(hard + 0.1) - bootstrap.means(hard))
    assert difference.high - difference.low < 1e-12  # the same questions are drawn for both


def test_unknown_values_are_left_out_of_means() -> None:
    assert Bootstrap(3).means(np.array([1.0, np.nan, 0.0]))[0] == 0.5


def test_spread_and_deviation_over_slots() -> None:
    slots = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    bootstrap = Bootstrap(2)
    assert bootstrap.spread(slots)[0] == 1.0
    assert bootstrap.deviation(slots)[0] == pytest.approx(math.sqrt(1 / 6))


def test_a_spread_is_more_than_chance_only_where_slots_differ() -> None:
    source = np.random.default_rng(1)
    alike = (source.random((200, 5)) < 0.5).astype(float)
    means = alike.mean(axis=0)
    limit = chance_spread(alike)
    assert limit is not None
    assert means.max() - means.min() < limit < 0.25
    favouring = alike.copy()
    favouring[:, 0] = 1.0
    assert favouring.mean(axis=0).max() - favouring.mean(axis=0).min() > (chance_spread(favouring) or 1.0)
    assert chance_spread(np.full((3, 2), np.nan)) is None


def test_up_to_four_segments_are_listed_in_all_orders_and_more_in_different_ones() -> None:
    assert input_orders(4, 5, "") == list(itertools.permutations(range(4)))
    sample = input_orders(6, 9, "seed")
    assert sample[0] == tuple(range(6))
    assert len(set(sample)) == 9
    assert all(sorted(order) == list(range(6)) for order in sample)


@given(st.lists(st.text(max_size=5), max_size=6, unique=True), st.text(max_size=3), st.randoms())
def test_a_salted_order_ignores_how_segments_are_listed(texts: list[str], salt: str, order: object) -> None:
    segments = [Segment(text) for text in texts]
    listed = [segments[index] for index in salted_order(segments, salt)]
    turned = segments[::-1]
    assert [turned[index] for index in salted_order(turned, salt)] == listed


@pytest.mark.parametrize("gold", [(0,), (3,), (2, 5)])
def test_a_salt_puts_the_gold_segments_where_they_are_wanted(gold: tuple[int, ...]) -> None:
    segments = [Segment(f"text {index}") for index in range(8)]
    for start in range(8 - len(gold) + 1):
        moved = gold_at(8, gold, start)
        assert [moved.index(each) for each in gold] == list(range(start, start + len(gold)))
        order = salted_order(segments, salt_for(segments, gold, start, "seed"))
        mean = sum(map(order.index, gold)) / len(gold)
        assert abs(mean - (start + (len(gold) - 1) / 2)) < (1e-9 if len(gold) == 1 else 0.5)


def test_slots_are_as_many_as_most_questions_have_room_for() -> None:
    def sized(*sizes: int) -> list[Question]:
        return [Question("q", (Segment("x"),) * size, gold=(0,)) for size in sizes]

    assert common_slots(sized(10, 10, 10), 5) == 5
    assert common_slots(sized(3, 3, 3, 3, 10), 5) == 3
    assert common_slots(sized(3, 10, 10, 10, 10), 5) == 5


@pytest.mark.parametrize(
    ("answer", "picked"),
    [
        ("B", 1),
        (" (a). ", 0),
        ("Response 2 is", None),
        ("The better response is", None),
        ("Response 2", 1),
        ("second", 1),
        ("The first response", 0),
        ("I weighed A and B. [[B]]", 1),
        ("yes!", 0),
        ("NO", 1),
        ("Response A is better.", 0),
        ("I think B is better", 1),
        ("Winner: B", 1),
        ("The better response is A.", 0),
        ("Response B is much better than response A.", 1),
        ("A is good, but the second response is clearly the better one.", 1),
        ("Assistant A's answer is better", 0),
        ("I would pick the first one.", 0),
        ("neither", None),
        ("Neither is better.", None),
        ("A is not better", None),
        ("Response A is wrong.", None),
        ("A is better. No, B is better.", None),
        ("[[A]] or [[B]]", None),
        ("A better answer would be longer.", None),
        ("", None),
    ],
)
def test_a_pick_is_read_from_a_label_or_a_text(answer: str, picked: int | None) -> None:
    assert read_pick(answer, [Segment("Yes."), Segment("No.")]) == picked


def test_metrics_on_hand_scored_pairs() -> None:
    assert exact_match("The cat, sat!", ["cat sat"]) == 1.0
    assert exact_match("cat", ["cats"]) == 0.0
    assert best_subspan_em("It was Ann Lee.", ["Bo", "ann lee"]) == 1.0
    assert best_subspan_em("It was An Lee", ["ann lee"]) == 0.0
    assert best_subspan_em("x", []) == 0.0
    assert token_f1("big red dog", ["red dog barks", "x"]) == pytest.approx(2 / 3)
    assert token_f1("the", ["a"]) == 1.0
    assert token_f1("the", ["dog"]) == 0.0
