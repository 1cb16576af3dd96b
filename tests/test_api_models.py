"""Orders for models behind an API: a function of the contents, and votes that are counted the same way every time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_rag import Segment
from invariant_rag.api_models import PlainRequests, Turn, answer_key, canonical_parts, drawn_orders, elect, plain_text
from invariant_rag.errors import InvalidChoice, InvalidSegment, UnknownName, UnsupportedCombination
from invariant_rag.orderings import Candidate, Ordering

TEXTS = st.lists(st.text(alphabet="ab \n", max_size=3), max_size=5)


def parts_of(sets: list[list[str]]) -> list[object]:
    return ["Read:", *(part for each in sets for part in (*map(Segment, each), "and"))]


@given(st.lists(TEXTS, max_size=3), st.integers(1, 8), st.integers(0, 3), st.randoms())
def test_orders_are_a_function_of_the_sets(sets: list[list[str]], votes: int, seed: int, chance: random.Random) -> None:
    shuffled = [chance.sample(each, len(each)) for each in sets]
    orders, others = (drawn_orders(canonical_parts(parts_of(each)), votes, seed) for each in (sets, shuffled))
    assert orders == others
    assert orders[0] == canonical_parts(parts_of(sets))
    possible = math.prod(len(set(permutations(each))) for each in sets)
    assert len({"|".join(map(plain_text, order)) for order in orders}) == len(orders) == min(votes, possible)
    for order in orders:  # every set keeps its place
        assert [isinstance(part, Segment) for part in order] == [isinstance(p, Segment) for p in parts_of(sets)]
        assert canonical_parts(order) == orders[0]


def test_rank_0_stands_last() -> None:
    assert canonical_parts([Segment("a"), Segment("b")]) == [Segment("b"), Segment("a")]
    assert canonical_parts([Segment("a"), Segment("b")], "lexical-reversed") == [Segment("a"), Segment("b")]
    scored = [Segment("a", score=1.0), Segment("b", score=2.0)]
    assert canonical_parts(scored[::-1], "score") == scored


def test_white_space_does_not_part_a_set_and_text_does() -> None:
    first, second, third = map(Segment, "abc")
    assert canonical_parts([first, "\n", second, third]) == [third, "\n", second, first]
    assert canonical_parts([first, "or", second]) == [first, "or", second]
    wall = object()
    assert canonical_parts([first, wall, second]) == [first, wall, second]


@given(st.lists(st.sampled_from("abc"), min_size=1))
def test_the_winner_is_the_first_of_the_most_frequent(answers: list[str]) -> None:
    vote = elect(answers)
    assert (vote.calls, vote.agreed) == (len(answers), answers.count(answers[vote.winner]))
    assert all(vote.agreed >= answers.count(each) for each in answers)
    assert not any(answers.count(each) == vote.agreed for each in answers[: vote.winner])


def test_answers_agree_on_words_and_tool_calls() -> None:
    assert answer_key(" At\nnoon") == answer_key("at Noon") != answer_key("at noon.")
    assert answer_key("", [("go", {"x": 1, "y": 2})]) == answer_key("", [("go", {"y": 2, "x": 1})])
    assert answer_key("", [("go", {"x": 1})]) != answer_key("", [("go", {"x": 2})]) != answer_key("")


def test_what_cannot_be_ordered_by_content_is_refused() -> None:
    with pytest.raises(UnsupportedCombination, match="given"):
        canonical_parts([Segment("a")], "given")
    with pytest.raises(UnknownName, match="lexical"):
        canonical_parts([Segment("a")], "alphabetical")
    with pytest.raises(InvalidSegment, match="token ids"):
        canonical_parts([Segment(token_ids=(1,))])
    with pytest.raises(UnsupportedCombination, match="given"):
        PlainRequests("given")
    with pytest.raises(InvalidChoice, match="votes: expected at least 1, got 0"):
        PlainRequests(votes=0)


# --- conversations --------------------------------------------------------------------------------------------------


def user(*parts: Any) -> Turn:
    return Turn("user", parts)


def written(*turns: Turn, **options: Any) -> list[tuple[Any, ...]]:
    """The parts of every turn of the only request."""
    [request] = PlainRequests(**options).of_turns(turns)
    assert [turn.role for turn in request] == [turn.role for turn in turns]
    return [turn.parts for turn in request]


A, B, C = map(Segment, "abc")


def test_text_and_segments_of_a_turn_become_one_text_and_everything_else_stays() -> None:
    image = object()
    assert written(user("Read: ", B, A, "Which?", image, "!")) == [
        ("Read: Document: b\nDocument: a\nWhich?", image, "!")
    ]
    assert written(user()) == [()]


@pytest.mark.parametrize("order", list(permutations([A, B, C])))
def test_a_set_reaches_across_neighbouring_turns_of_one_role(order: tuple[Segment, ...]) -> None:
    one, two, three = order
    assert written(user(one), user("\n", two, three)) == [("Document: c\n",), ("\nDocument: b\nDocument: a\n",)]


@pytest.mark.parametrize(
    "between",
    [[user("and")], [Turn("assistant", ())], [Turn("system", (" ",))]],
    ids=["a text", "an answer", "another role"],
)
def test_sets_of_other_turns_stay_apart(between: list[Turn]) -> None:
    first, *_, last = written(user(A), *between, user(C, B))
    assert (first, last) == (("Document: a\n",), ("Document: c\nDocument: b\n",))


def test_results_of_tools_are_sets_of_their_own() -> None:
    first, second = written(Turn("tool", (A,)), Turn("tool", (B, C)))
    assert (first, second) == (("Document: a\n",), ("Document: c\nDocument: b\n",))


@pytest.mark.parametrize(
    ("query", "expected"), [(None, "Which mill?"), ("another", "another")], ids=["of the last user turn", "given"]
)
def test_the_ordering_is_given_the_query(query: str | None, expected: str) -> None:
    seen = []

    class Spy(Ordering):
        name = "spy"

        def sort_keys(self, candidates: Sequence[Candidate], query: str) -> list[int]:
            seen.append(query)
            return [0] * len(candidates)

    turns = [user("Hello."), user("Which ", A, "mill? "), Turn("assistant", ()), Turn("system", ("Be brief.",))]
    PlainRequests(Spy()).of_turns(turns, query)
    assert seen == [expected]


def test_votes_are_requests_in_different_orders_and_the_first_is_canonical() -> None:
    requests = PlainRequests(votes=10, seed=3).of_text(["Read: ", A, B, C])
    assert requests[0] == "Read: Document: c\nDocument: b\nDocument: a\n"
    assert len(set(requests)) == len(requests) == math.factorial(3)
    assert requests == PlainRequests(votes=10, seed=3).of_text(["Read: ", C, A, B])
