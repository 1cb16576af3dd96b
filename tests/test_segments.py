"""Segments, sets and prompts as values: equality, order, identity across processes, and what is refused."""

import copy
import json
import math
import pickle
import random
from dataclasses import replace
from datetime import date
from enum import Enum
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_rag import Prompt, Segment, SegmentSet
from invariant_rag.api_models import canonical_order, content_ordering
from invariant_rag.errors import ContextOverflow, InvalidPrompt, InvalidSegment, InvariantRAGError, UnknownName
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
    for error in (InvalidSegment("message"), ContextOverflow("message", hint="of its own"), unknown):
        same = pickle.loads(pickle.dumps(error))
        assert type(same) is type(error)
        assert (str(same), same.hint, same.__notes__) == (str(error), error.hint, error.__notes__)
    assert all(each.hint.endswith(".") for each in InvariantRAGError.__subclasses__()), "each says what to do"
    assert str(UnknownName("method", "x", {"rotor", "pine"})) == "unknown method 'x'; choose from 'pine', 'rotor'"
    for name in ("rotr", "RoToR"):
        assert str(UnknownName("method", name, ["pine", "rotor"])).endswith("'rotor'; did you mean 'rotor'?")


class _Shade(str, Enum):  # noqa: UP042 - its str() is not its value
    RED = "red"


class _Odd(float):
    def __str__(self):
        return "odd"


SCORES = [(1, 1.0), (1, True), (0.0, -0.0), (0.5, Fraction(1, 2)), (0.5, _Odd(0.5)), (np.float32(0.5), 0.5)]
VALUES = [
    *((0.0, -0.0), ("red", _Shade.RED), (0.5, _Odd(0.5)), ((1,), [1]), ([date(2020, 1, 1)], ["2020-01-01"])),
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
    ranks = [canonical_order(each, content_ordering("lexical")) for each in listed]
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
