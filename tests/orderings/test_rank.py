"""Claims about every ordering: the rank is a function of the multiset of segments, and the published one.

`tests/laws/test_published.py` compares logits and greedy tokens with those of the published code in its orders.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from invariant_rag.errors import InvalidSegment, UnknownName
from invariant_rag.orderings import (
    ORDERINGS,
    Candidate,
    Frequency,
    Given,
    Lexical,
    LexicalReversed,
    Score,
    resolve_ordering,
)
from invariant_rag.segments import Segment

WORDS = ("harbour", "lantern", "river", "salt", "true", "unseen", "\ud800", "زيت")


def candidate(text, score=0.0, source=""):
    return Candidate(Segment(text, score=score, metadata={"source": source}), tuple(map(ord, text)), text)


def ids_only(ids):
    return Candidate(Segment.of(list(ids)), tuple(ids), None)


texts = st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join)
candidates = st.lists(
    st.builds(candidate, texts, st.sampled_from([-1.0, 0.0, 0.5]), st.sampled_from(["a", "b"])), max_size=6
)
PLAIN = {"lexical": Lexical(), "lexical-reversed": LexicalReversed(), "frequency": Frequency(), "score": Score()}
BY_MODEL = {"monot5": "monot5", "cross-encoder": "cross_encoder", "embedding": "embedding"}


def assert_rank_ignores_order(ordering, listed, order):
    permutation = order.sample(range(len(listed)), len(listed))
    shuffled = [listed[index] for index in permutation]
    ranks = [(each, ordering.rank(each, "river salt")) for each in (listed, shuffled)]
    assert sorted(ranks[0][1]) == list(range(len(listed)))
    one, other = ([each[index].tie_breaker for index in rank] for each, rank in ranks)
    assert one == other
    # Not only the rank: every key, to the last bit.
    keys = ordering.sort_keys(listed, "river salt")
    assert list(ordering.sort_keys(shuffled, "river salt")) == [keys[index] for index in permutation]


@pytest.mark.parametrize("name", PLAIN)
@given(listed=candidates, order=st.randoms(use_true_random=False))
def test_rank_ignores_the_order_in_which_segments_are_given(name, listed, order):
    assert_rank_ignores_order(PLAIN[name], listed, order)


@pytest.mark.parametrize("fixture", BY_MODEL.values())
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(listed=candidates, order=st.randoms(use_true_random=False))
def test_scores_of_a_model_ignore_the_order_in_which_segments_are_given(request, fixture, listed, order):
    assert_rank_ignores_order(request.getfixturevalue(fixture), listed, order)


def test_every_invariant_ordering_is_tested_and_resolved_by_its_name_without_loading_a_model():
    assert {name for name, ordering in ORDERINGS.items() if ordering.invariant} == {*PLAIN, *BY_MODEL}
    for name in ORDERINGS:
        ordering = resolve_ordering(name)
        assert type(ordering) is ORDERINGS[name]
        assert ordering.name == name
        assert resolve_ordering(ordering) is ordering
    for wrong in ("lexcal", "", None, 3, Lexical):
        with pytest.raises(UnknownName) as caught:
            resolve_ordering(wrong)
        assert all(repr(name) in str(caught.value) for name in ORDERINGS)


def test_given_and_lexical_rank_as_they_say():
    """Given: the first segment is farthest. Lexical: the smallest ids, and the shorter of two that begin alike."""
    assert Given().rank([candidate(text) for text in ("b", "a", "c", "a")], "")[::-1] == [0, 1, 2, 3]
    assert not Given.invariant
    listed = [ids_only(ids) for ids in ([5, 1], [5], [4, 9, 9], [])]
    assert Lexical().rank(listed, "") == [3, 2, 1, 0]
    assert LexicalReversed().rank(listed, "") == [0, 1, 2, 3]


def test_score_puts_the_best_first_then_text_then_metadata_and_names_segments_without_one():
    listed = [candidate("a", 0.1), candidate("b", 7.0), candidate("c", float("-inf"))]
    assert Score().rank(listed, "") == [1, 0, 2]
    assert Score().rank([candidate("b"), candidate("a", source="y"), candidate("a", source="x")], "") == [2, 1, 0]
    with pytest.raises(InvalidSegment, match=r"2 of 3 have none: 1 \('left'\); 2 \('right'\)"):
        Score().rank([candidate("a", 1.0), candidate("left", None), candidate("right", None)], "")


# --- the published code ---


def padded_frequency_rank(rows):
    """Rank as the published code does it: pad, count the padding, and read whatever has its count as padding."""
    longest = max(map(len, rows))
    padded = [row + [-1] * (longest - len(row)) for row in rows]
    tokens = [-1] + [token for row in padded for token in row]
    values = [[1 / tokens.count(token) for token in row] for row in padded]
    keys = [[0.0 if value == 1 / tokens.count(-1) else value for value in row] for row in values]
    return sorted(range(len(rows)), key=lambda index: (keys[index], len(rows[index]), rows[index]))


@given(st.lists(st.lists(st.integers(0, 6), max_size=5), min_size=1, max_size=6))
def test_frequency_ranks_as_the_published_code_does_up_to_its_ties(rows):
    rank = Frequency().rank([ids_only(row) for row in rows], "")
    assert [rows[index] for index in rank] == [rows[index] for index in padded_frequency_rank(rows)]
