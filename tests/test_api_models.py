"""Orders for models behind an API: a function of the contents, and votes that are counted the same way every time."""

import math
import time
from contextvars import ContextVar
from itertools import permutations, product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_rag import Segment, SegmentSet, errors
from invariant_rag import api_models as api
from invariant_rag.api_models import PlainRequests, Turn, answer_key, ask_all, elect, object_key, set_text
from invariant_rag.orderings import Ordering
from invariant_rag.segments import Slot

A, B, C = map(Segment, "abc")


@given(
    st.lists(st.lists(st.text(alphabet="ab \n", max_size=3), max_size=5), max_size=3),
    st.integers(1, 8),
    st.integers(0, 3),
    st.sampled_from(["lexical", "lexical-reversed"]),
    st.randoms(),
)
def test_orders_are_a_function_of_the_sets_and_rank_0_stands_last(sets, votes, seed, ordering, chance):
    def drawn(listed):
        given_sets = list(map(SegmentSet, listed))
        canonical = [api.canonical_order(each, api.content_ordering(ordering)) for each in given_sets]
        return [
            [[segments[index].text for index in order] for segments, order in zip(given_sets, orders, strict=True)]
            for orders in api.drawn_orders(given_sets, canonical, votes, seed)
        ]

    orders = drawn(sets)
    assert orders == drawn([chance.sample(each, len(each)) for each in sets])
    assert orders[0] == [sorted(each, reverse=ordering == "lexical") for each in sets]
    possible = math.prod(len(set(permutations(each))) for each in sets)
    assert len({repr(order) for order in orders}) == len(orders) == min(votes, possible)
    assert all([sorted(each) for each in order] == [sorted(each) for each in sets] for order in orders)


def test_the_winner_is_the_first_of_the_most_frequent_and_answers_agree_on_words_tool_calls_and_fields():
    for answers in (answers for length in range(1, 7) for answers in product("abc", repeat=length)):
        vote = elect(list(answers))
        assert (vote.calls, vote.agreed) == (len(answers), max(map(answers.count, answers)))
        assert vote.winner == next(n for n, each in enumerate(answers) if answers.count(each) == vote.agreed)
    assert answer_key(" At\nnoon") == answer_key("at Noon") != answer_key("at noon.")
    assert answer_key("", [("go", {"x": 1, "y": 2})]) == answer_key("", [("go", {"y": 2, "x": 1})])
    assert answer_key("", [("go", {"x": 1})]) != answer_key("", [("go", {"x": 2})]) != answer_key("")
    one, other = (SimpleNamespace(model_dump=lambda mode, b=b: {"a": 1, "b": [b]}) for b in (2, 3))
    assert object_key(one) == object_key({"b": [2], "a": 1}) != object_key(other)


def test_what_cannot_be_ordered_by_content_is_refused():
    for call, error, said in (
        (lambda: PlainRequests("alphabetical"), errors.UnknownName, "lexical"),
        (lambda: PlainRequests().of_text([Segment(token_ids=(1,))]), errors.InvalidSegment, "token ids"),
        (lambda: PlainRequests("given"), errors.UnsupportedCombination, "given"),
        (lambda: PlainRequests(votes=0), errors.InvalidChoice, "votes: expected at least 1, got 0"),
    ):
        with pytest.raises(error, match=said):
            call()


def user(*parts):
    return Turn("user", parts)


def written(*turns, **options):
    """The parts of every turn of the only request."""
    [request] = PlainRequests(**options).of_turns(turns)
    assert [turn.role for turn in request.turns] == [turn.role for turn in turns]
    return [turn.parts for turn in request.turns]


def test_text_and_segments_of_a_turn_become_one_text_in_their_slots_or_as_documents_and_everything_else_stays():
    titled = ["a", Segment("b", title="T")]
    assert set_text(SegmentSet(titled)) == "Document: a\nDocument (Title: T): b\n"
    assert set_text(SegmentSet(titled, slots=[Slot("[1] ", "\n", "1"), Slot("[2] ", number="2")])) == "[1] a\n[2] b"
    image, text = object(), "Read: Document: b\nDocument: a\nWhich?"
    assert written(user("Read: ", B, A, "Which?", image, "!")) == [(text, image, "!")]
    assert written(user()) == [()]
    [request] = PlainRequests().of_text(["Rubrics: ", A, B, "Answers: ", SegmentSet([C])])
    assert [[each.text for each in listed] for listed in request.sets] == [["b", "a"], ["c"]]
    assert request.text == "Rubrics: Document: b\nDocument: a\nAnswers: Document: c\n"
    assert request.labels == {}
    apart = ([], [user("and")], [Turn("assistant", ())], [Turn("system", (" ",))])
    for role, between in product(("user", "tool"), apart):
        first, *_, last = written(Turn(role, (A,)), *between, Turn(role, (C, B)))
        assert (first, last) == (("Document: a\n",), ("Document: c\nDocument: b\n",)), "sets of other turns"


def test_the_ordering_is_given_the_query():
    seen = []

    class Spy(Ordering):
        name = "spy"

        def sort_keys(self, candidates, query):
            seen.append(query)
            return [0] * len(candidates)

    turns = [user("Hello."), user("Which ", A, "mill? "), Turn("assistant", ()), Turn("system", ("Be brief.",))]
    PlainRequests(Spy()).of_turns(turns)
    PlainRequests(Spy()).of_turns(turns, "another")
    assert seen == ["Which mill?", "another"]


@pytest.mark.parametrize("votes", [1, 4])
def test_labels_of_a_declared_set_stay_in_place_and_lead_to_the_documents(votes):
    slots = [Slot(f"[{number}] ", "\n", number=str(number)) for number in (1, 2, 3)]
    texts_of_votes = set()
    for order in permutations([A, B, C]):
        requests = PlainRequests(votes=votes).of_text(["Read:", SegmentSet(order, slots=slots), "Which?"])
        texts_of_votes.add(tuple(request.text for request in requests))
        for request in requests:
            assert all(f"[{label}] {order[index].text}\n" in request.text for label, index in request.labels.items())
    (written_texts,) = texts_of_votes
    assert len({*written_texts}) == votes
    lettered = SegmentSet([C], slots=[Slot("[a] ", number="a")]), SegmentSet([B, A], slots=slots[:2])
    (request, *_) = PlainRequests().of_text([lettered[0], "and", lettered[1]])
    assert request.labels == {"a": 0, "1": 1, "2": 2}, "indices among the segments of all sets"


def test_answers_stand_in_the_order_of_the_calls_which_have_this_context():
    variable = ContextVar("variable", default="none")
    variable.set("ours")
    assert ask_all([lambda: "one"]) == ["one"]
    calls = [lambda n=n: (time.sleep(0.01 * (3 - n)), n, variable.get())[1:] for n in range(3)]
    assert ask_all(calls) == [(n, "ours") for n in range(3)]
    with pytest.raises(ZeroDivisionError):
        ask_all([lambda: 1, lambda: 1 // 0])
