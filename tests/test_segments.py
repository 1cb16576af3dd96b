"""Segments, sets and prompts as values; their rows, by the definition of each method; their orders for API models."""

import copy
import json
import math
import pickle
import random
import time
from contextvars import ContextVar
from dataclasses import replace
from datetime import date
from fractions import Fraction
from itertools import count, islice, pairwise, permutations, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TensorType  # whose str() is not its value

from invariant_rag import Prompt, Segment, SegmentSet, errors
from invariant_rag import api_models as api
from invariant_rag.api_models import PlainRequests, Turn, answer_key, ask_all, elect, object_key, set_text
from invariant_rag.arrangement import Arrangement, Layout, Row, Run, arrange_rows
from invariant_rag.errors import InvalidPrompt, InvalidSegment, InvariantRAGError, UnknownName
from invariant_rag.methods import RoToR, Sequential
from invariant_rag.orderings import Ordering
from invariant_rag.remote import content_parts
from invariant_rag.segments import Slot, document_rendering, plain_rendering

texts = st.text(st.characters(codec=None, max_codepoint=0x10FFFF), max_size=8)
metadata = st.dictionaries(texts, st.none() | st.integers() | texts | st.lists(st.booleans(), max_size=2), max_size=3)
scores = st.none() | st.floats(allow_nan=False) | st.integers(-3, 3)
segments = st.one_of(
    st.builds(Segment, texts, title=st.none() | texts, metadata=metadata, score=scores),
    st.lists(st.integers(0, 300), max_size=3).map(Segment.of),
)


@given(st.lists(st.lists(segments, max_size=4), min_size=1, max_size=3), st.randoms())
def test_equality_and_hash_ignore_order_within_each_set_only(sets, shuffle):
    prompt = Prompt.of("start", *(part for each in sets for part in (SegmentSet(each), "between")))
    other = prompt.shuffled(shuffle)
    assert (prompt, hash(prompt)) == (other, hash(other))
    assert len(prompt.segments) == sum(map(len, sets))
    for one, same, listed in zip(prompt.sets, other.sets, sets, strict=True):
        assert (one, hash(one)) == (same, hash(same))
        assert sorted(each.canonical_key for each in listed) == sorted(each.canonical_key for each in same)
        if listed:
            assert len(SegmentSet([*listed, listed[0]])) == len(one) + 1
            assert one != SegmentSet([*listed, listed[0]]), "duplicates are kept and counted"


@given(segments)
def test_segments_survive_pickling_and_copying(segment):
    for same in (pickle.loads(pickle.dumps(segment)), copy.deepcopy(segment), copy.copy(segment), replace(segment)):
        assert (same, hash(same), same.metadata) == (segment, hash(segment), segment.metadata)
        assert same.content_hash == segment.content_hash
    prompt = Prompt.of("a", SegmentSet([segment]), "b", SegmentSet(), query="q", rendering=document_rendering)
    again = pickle.loads(pickle.dumps(prompt))
    assert (again, again.segments[0], again.rendering) == (prompt, segment, document_rendering)


@given(segments, segments)
def test_canonical_keys_are_a_total_order_and_equal_only_for_equal_segments(one, other):
    one_first, other_first = one.canonical_key < other.canonical_key, other.canonical_key < one.canonical_key
    assert one_first + other_first + (one == other) == 1
    if one == other:
        assert one.content_hash == other.content_hash
        assert plain_rendering(one) == plain_rendering(other)


def test_a_segment_has_plain_ints_and_cannot_be_changed_through_its_metadata_or_where_they_came_from():
    ids = Segment.of(np.array([3, 5])).token_ids
    assert ids == (3, 5)
    assert all(type(each) is int for each in ids)
    assert Prompt(prefix=np.array([1, 2])).prefix == (1, 2)
    source = {"page": 1}
    segment = Segment("t", metadata=source)
    source["page"] = 2
    with pytest.raises(TypeError):
        segment.metadata["page"] = 3
    assert segment.metadata["page"] == 1


WRONG = {
    Segment: [
        *((b"bytes",), (None,), {"title": 3}, {"metadata": {1: 2}}, {"metadata": [("a", 1)]}),
        *({"score": math.nan}, {"score": "0.5"}, {"text": "a", "token_ids": (1,)}, {"title": "a", "token_ids": (1,)}),
        *({"token_ids": 5}, {"token_ids": "12"}, {"token_ids": b"ab"}),
    ],
    Segment.of: [([1, -1],), ([1.0],), ([True],), (5,), ({"text": "a"},)],
    SegmentSet: [("one string",), (Segment("one"),), (None,), (b"ab",), ({"text": "a"},), ([None],)],
    SegmentSet(["a", "b"]).permuted: [([0, 0],), ([0],)],
    Prompt: [(None,), (b"ab",), ("a", [], ["b"]), ([-1],), {"query": 3}, {"rendering": "x"}],
    Prompt.of: [("a", Segment("b")), ("a", [1, 2])],
    Prompt("a", ["b"]).with_sets: [([],)],
    lambda number: Segment("a", metadata={"n": number}).canonical_key: [(10**5000,)],
}


@pytest.mark.parametrize(("build", "values"), [(build, each) for build in WRONG for each in WRONG[build]])
def test_what_is_no_segment_and_no_text_of_a_prompt_is_refused_with_a_hint(build, values):
    with pytest.raises((InvalidSegment, InvalidPrompt), match="expected") as caught:
        build(**values) if isinstance(values, dict) else build(*values)
    assert caught.value.__notes__ == [caught.value.hint]


def test_texts_between_two_sets_are_joined_and_sets_are_kept_apart_and_shuffled_to_every_order_of_each():
    prompt = Prompt.of("a", SegmentSet(["b", "c"]), "d", SegmentSet(["e", "f"]))
    shuffled = [prompt.shuffled(random.Random(seed)).segments for seed in range(40)]
    assert {"".join(each.text for each in listed) for listed in shuffled} == {"bcef", "bcfe", "cbef", "cbfe"}
    prompt = Prompt.of("a", "b", SegmentSet(["x"]), SegmentSet(), "c")
    assert (prompt.texts, prompt.prefix, prompt.suffix) == (("ab", "", "c"), "ab", "c")
    assert [len(each) for each in prompt.sets] == [1, 0]
    assert Prompt.of().texts == ("",)
    assert Prompt.of([1], [2], "").texts == ((1, 2),)
    assert SegmentSet(["b", "a", "c"])[1:] == SegmentSet(["c", "a"])
    assert [each.text for each in SegmentSet(["b", "a", "b"])] == ["b", "a", "b"]


def test_errors_survive_pickling_with_message_and_hint_and_an_unknown_name_lists_the_choices():
    unknown = UnknownName("method", "nonsense", ["rotor", "pine"])
    for error in (InvalidSegment("message"), errors.ContextOverflow("message", hint="of its own"), unknown):
        same = pickle.loads(pickle.dumps(error))
        assert type(same) is type(error)
        assert (str(same), same.hint, same.__notes__) == (str(error), error.hint, error.__notes__)
    assert all(each.hint.endswith(".") for each in InvariantRAGError.__subclasses__()), "each says what to do"
    assert str(UnknownName("method", "x", {"rotor", "pine"})) == "unknown method 'x'; choose from 'pine', 'rotor'"
    for name in ("rotr", "RoToR"):
        assert str(UnknownName("method", name, ["pine", "rotor"])).endswith("'rotor'; did you mean 'rotor'?")


class _Odd(float):
    def __str__(self):
        return "odd"


SCORES = [(1, 1.0), (1, True), (0.0, -0.0), (0.5, Fraction(1, 2)), (0.5, _Odd(0.5)), (np.float32(0.5), 0.5)]
VALUES = [
    *((0.0, -0.0), ("pt", TensorType.PYTORCH), (0.5, _Odd(0.5)), ((1,), [1]), ([date(2020, 1, 1)], ["2020-01-01"])),
    *(({"x": 1, "y": 2}, {"y": 2, "x": 1}), ([{"x": 1, "y": 2}], ({"y": 2, "x": 1},)), ({0, 8}, {8, 0})),
    *(({"a", "b"}, frozenset({"b", "a"})), ([1, (2, b"c"), math.nan], (1, [2, b"c"], math.nan))),
    ({1: "x", "y": 2, (1, 2): 3}, {(1, 2): 3, "y": 2, 1: "x"}),  # sets iterate in the order in which they were filled
]
"""Scores and metadata that Python or JSON holds for equal, and that str() does not write alike."""
ALIKE = [({"score": one}, {"score": other}) for one, other in SCORES]
ALIKE += [({"metadata": {"k": one}}, {"metadata": {"k": other}}) for one, other in VALUES]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_odd_fields_give_one_canonical_order_and_equal_segments_are_hashed_and_sent_alike(one, other):
    first, second = Segment("a", **one), Segment("a", **other)
    listed = [SegmentSet(order) for order in permutations([first, second, Segment("b")])]
    ranks = [api.canonical_order(each, api.content_ordering("lexical")) for each in listed]
    assert len({tuple(s[i].canonical_key for i in order) for s, order in zip(listed, ranks, strict=True)}) == 1
    sent = [json.dumps(content_parts([each])[0]["document"]["metadata"], default=repr) for each in (first, second)]
    assert first != second or (hash(first) == hash(second) and sent[0] == sent[1])


DIFFERENT = [
    *(({}, {"title": ""}), ({}, {"score": -math.inf}), ({"text": ""}, {"text": "", "token_ids": ()})),
    *(({"metadata": {"a": 1}}, {"metadata": {"a": 1, "b": 1}}), ({"metadata": {"a": 0.0}}, {"metadata": {"a": -0.0}})),
]


def test_the_order_of_mappings_and_sets_in_metadata_does_not_matter_and_what_looks_alike_may_be_two_things():
    for one, other in VALUES[1:]:
        assert Segment("a", metadata={"k": one, "l": 1}) == Segment("a", metadata={"l": 1, "k": other})
    for one, other in DIFFERENT:
        assert Segment(**{"text": "a", **one}) != Segment(**{"text": "a", **other})
    assert Segment("a", score=np.float32(0.5)) == Segment("a", score=0.5)
    assert SegmentSet(["a"], slots=[Slot("- ")]) != SegmentSet(["a"])


# --- rows and runs against lists of (key, position in the row) written down from the definition of each method ---

sets_of_lengths = st.lists(st.lists(st.integers(0, 4), max_size=5).map(tuple), max_size=3).map(tuple)
layouts = sets_of_lengths.flatmap(
    lambda sets: st.builds(Layout, st.tuples(*[st.integers(0, 3)] * (len(sets) + 1)), st.just(sets))
)


def plain_keys(token):
    return {key: token - key for key in range(token + 1)}


def brute_force(layout, rows):
    """For each token, the keys it sees and how far behind it, by writing its row out from far to near."""
    counter, seen_by_token, before = count(), [], []  # everything before a text and the set behind it, where it lies
    for text, lengths, order in zip(layout.texts, (*layout.sets, ()), (*rows, ()), strict=True):
        before += islice(counter, text)
        seen_by_token += map(plain_keys, before[len(before) - text :])
        segments = [[*islice(counter, length)] for length in lengths]
        for segment, others in zip(segments, order, strict=True):
            row = before + [key for other in others for key in segments[other]]
            for token in segment:
                position = {key: at for at, key in enumerate(row)}
                reader = position[token]
                seen_by_token.append({key: reader - at for key, at in position.items() if at <= reader})
        before += [key for segment in segments for key in segment]
    return seen_by_token


def read_off(arrangement):
    """The same from rows and runs: a key at `k` with shift `s` is seen as if it lay at `k + s`."""
    seen_by_token = []
    for row in arrangement.rows:
        assert row.queries.start == len(seen_by_token), "rows cover the prompt, in memory order"
        for token in range(row.queries.start, row.queries.stop):
            seen = [(key, token - key - run.shift) for run in row.runs for key in range(run.start, run.stop)]
            seen = [(key, distance) for key, distance in seen if distance >= 0]
            assert len(seen) == len(dict(seen)), "a key is in a row once"
            seen_by_token.append(dict(seen))
    return seen_by_token


RULES = {
    "ring": lambda i, n: [*range(i + 1, n), *range(i + 1)],  # RoToR
    "line": lambda i, n: [*range(i + 1)],  # the plain model
    "alone": lambda i, n: [i],
}


def rows_of(layout, rule):
    return [[rule(i, len(each)) for i in range(len(each))] for each in layout.sets]


@st.composite
def rows_that_see(draw, layout):
    """For each segment, itself behind any others in any order; or all segments by one of the rules."""

    def any_others(i, n):
        others = draw(st.permutations([j for j in range(n) if j != i]))
        return [*others[: draw(st.integers(0, n - 1))], i]

    return rows_of(layout, draw(st.none() | st.sampled_from([*RULES.values()])) or any_others)  # the half of them


@given(layouts, st.data())
def test_rows_are_their_definition_and_merged_only_into_rows_that_are_truly_plain(layout, data):
    rotor, sequential = RoToR().arrange(layout), Sequential().arrange(layout)
    for method, rule in ((rotor, "ring"), (sequential, "line")):
        assert method.rows == arrange_rows(layout, rows_of(layout, RULES[rule])).rows
    assert rotor.is_plain == (max(layout.counts, default=0) < 2), "one segment with tokens per set, or none"
    assert sequential.is_plain
    rows = data.draw(rows_that_see(layout))
    arrangement, expected = arrange_rows(layout, rows), brute_force(layout, rows)
    assert read_off(arrangement) == expected
    for row in arrangement.rows:
        of_row = range(row.queries.start, row.queries.stop)
        truly = all(expected[token] == plain_keys(token) for token in of_row)
        assert truly or not row.is_causal
        assert of_row or row is arrangement.rows[-1]
        if of_row:
            assert all(run.start < run.stop for run in row.runs)
            assert row.runs[-1].stop == row.queries.stop, "the last run ends with the span itself"
            apart = [(one.stop, one.shift) != (two.start, two.shift) for one, two in pairwise(row.runs)]
            assert all(apart), "two runs that could be one"
    assert arrangement.is_plain == all(row.is_causal for row in arrangement.rows)
    assert not any(one.is_causal and two.is_causal for one, two in pairwise(arrangement.rows))
    assert arrangement.positions == tuple(range(layout.length))
    shared = arrange_rows(layout, rows_of(layout, RULES["alone"]), slots="shared").positions
    plain = Arrangement(layout, (Row(layout.text_spans[0], (Run(0, layout.texts[0], 0),)),), shared)
    assert plain.is_plain == (shared == arrangement.positions), "other positions are not those of the plain model"
    with pytest.raises(ValueError, match="zip"):
        RoToR().arrange(Layout((*layout.texts, 1), layout.sets))


# --- orders for models behind an API: a function of the contents, and votes that are counted alike every time ---

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
        (lambda: PlainRequests("alphabetical"), UnknownName, "lexical"),
        (lambda: PlainRequests().of_text([Segment(token_ids=(1,))]), InvalidSegment, "token ids"),
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
