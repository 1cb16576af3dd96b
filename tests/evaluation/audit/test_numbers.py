"""Claims about orders, verdicts and metrics, on cases worked out by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_rag.evaluation.audit.call_plan import common_slots
from invariant_rag.evaluation.audit.orders import find_salt, input_orders, move_gold, salted_order
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.verdicts import parse_verdict
from invariant_rag.evaluation.metrics import best_subspan_em, exact_match, token_f1
from invariant_rag.segments import Segment


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
        moved = move_gold(8, gold, start)
        assert [moved.index(each) for each in gold] == list(range(start, start + len(gold)))
        order = salted_order(segments, find_salt(segments, gold, start, "seed"))
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
def test_a_verdict_is_parsed_from_a_label_or_a_text(answer: str, picked: int | None) -> None:
    assert parse_verdict(answer, [Segment("Yes."), Segment("No.")]) == picked


def test_metrics_on_hand_scored_pairs() -> None:
    assert exact_match("The cat, sat!", ["cat sat"]) == 1.0
    assert exact_match("cat", ["cats"]) == 0.0
    assert best_subspan_em("It was Ann Lee.", ["Bo", "ann lee"]) == 1.0
    assert best_subspan_em("It was An Lee", ["ann lee"]) == 0.0
    assert best_subspan_em("x", []) == 0.0
    assert token_f1("big red dog", ["red dog barks", "x"]) == pytest.approx(2 / 3)
    assert token_f1("the", ["a"]) == 1.0
    assert token_f1("the", ["dog"]) == 0.0
