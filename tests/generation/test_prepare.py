"""What the model reads: physical order, what was dropped and trimmed, and indices that point at what was given."""

import random
from functools import partial
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_rag import Prompt, Segment, SegmentSet
from invariant_rag.attention.sdpa import SDPA
from invariant_rag.errors import ContextOverflow, InvalidPrompt
from invariant_rag.generation.choices import ResolvedChoices
from invariant_rag.generation.prepare import fit_segments, prepare
from invariant_rag.methods import RoToR
from invariant_rag.orderings import Frequency, Given, Lexical, LexicalReversed, Score
from invariant_rag.testing import toy_tokenizer

TOY = toy_tokenizer()
ids = st.lists(st.integers(0, 3), max_size=6)
sets = st.lists(st.lists(ids, max_size=6), min_size=1, max_size=3)
policies = st.sampled_from(["drop_last", "trim_segments"])
lengths = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=3)
strategies = st.sampled_from(["error", "drop_last", "trim_segments"])


def prompt_of(chosen, text=(9,)):
    return Prompt.of(list(text), *(part for each in chosen for part in (SegmentSet(each), list(text))))


def prepared(prompt, ordering=None, new_tokens=0, **limits):
    choices = ResolvedChoices(method=RoToR(), ordering=ordering or Lexical(), backend=SDPA(), **limits)
    return prepare(prompt, TOY, choices, new_tokens)


@given(sets, st.integers(4, 40), st.none() | st.integers(1, 6), policies, st.randoms())
def test_the_input_is_the_same_in_every_order_and_every_segment_is_accounted_for(
    chosen, window, limit, overflow, shuffle
):
    prompt = prompt_of(chosen)
    shuffled = prompt.shuffled(shuffle)
    options = {"context_window": window, "max_segment_tokens": limit, "overflow": overflow}
    result, other = prepared(prompt, **options), prepared(shuffled, **options)
    assert (result.input_ids, result.arrangement) == (other.input_ids, other.arrangement)
    for name, as_listed in (("order", list), ("dropped", sorted), ("trimmed", sorted)):
        pairs = ((prompt, result), (shuffled, other))
        one, two = ([source.segments[i].token_ids for i in getattr(each, name)] for source, each in pairs)
        assert as_listed(one) == as_listed(two)
    layout, order = result.arrangement.layout, list(result.order)
    assert sorted([*order, *result.dropped]) == list(range(len(prompt.segments)))
    assert set(result.trimmed) <= set(order)
    lengths = [len(each.token_ids or ()) for each in prompt.segments]
    if sum(lengths) + len(prompt.texts) <= window and max(lengths, default=0) <= (limit or window):
        assert (result.dropped, result.trimmed) == ((), ()), "there is room for all of them"
    assert layout.length == len(result.input_ids) <= window
    assert (result.input_ids[0], result.suffix_length) == (9, 1)
    for span in (span for spans in layout.set_spans for span in spans):
        index = order.pop(0)
        whole = prompt.segments[index].token_ids or ()
        assert result.input_ids[span.start : span.stop] == whole[: len(span)]
        assert (len(span) < len(whole)) == (index in result.trimmed)
    assert not order
    assert all(prompt.segments[index].token_ids for index in result.dropped), "an empty segment is never dropped"


@pytest.mark.parametrize("ordering", [Lexical(), Frequency(), Given()], ids=lambda each: each.name)
def test_equal_and_empty_segments_are_all_kept(ordering):
    found = set()
    for listed in permutations([[2], [1], [], [2], [1]]):
        result = prepared(Prompt([9], listed, [9]), ordering)
        assert (sorted(result.order), result.dropped, result.trimmed) == ([0, 1, 2, 3, 4], (), ())
        assert list(result.input_ids) == [9, *(token for index in result.order for token in listed[index]), 9]
        found.add(result.input_ids)
    assert len(found) == (1 if ordering.invariant else 6)


def test_rank_zero_lies_nearest_to_the_suffix():
    prompt = Prompt([9], [[2], [1], [3]], [9])
    assert prepared(prompt).input_ids == (9, 3, 2, 1, 9)
    assert prepared(prompt).order == (2, 0, 1)
    assert prepared(prompt, LexicalReversed()).input_ids == (9, 1, 2, 3, 9)


def test_the_last_of_the_ordering_is_dropped_first_wherever_it_was_listed():
    chunks = [Segment(text, score=score) for text, score in (("low", 0.1), ("high", 0.9), ("mid", 0.5))]
    result = prepared(Prompt("p", chunks, "s"), Score(), context_window=10, overflow="drop_last")
    assert (result.order, result.dropped) == ((2, 1), (0,))
    assert TOY.decode(list(result.input_ids)) == "pmidhighs"


def test_the_fullest_of_several_sets_gives_first_and_indices_count_through_all_sets():
    prompt = Prompt.of("p", SegmentSet(["bb", "aa"]), "m", SegmentSet(["dddd", "cccc"]), "s")
    result = prepared(prompt, context_window=12, overflow="drop_last")
    assert (result.order, result.dropped) == ((0, 1, 3), (2,))
    assert TOY.decode(list(result.input_ids)) == "pbbaamccccs"


def test_a_prompt_without_any_token_is_refused():
    for empty in (Prompt(), Prompt("", [], ""), Prompt([], [[]], []), Prompt("", ["", ""], ""), Prompt.of()):
        with pytest.raises(InvalidPrompt, match="at least one token"):
            prepared(empty)


def test_orderings_are_asked_with_the_query_or_else_the_last_text():
    asked = []

    class Asked(Lexical):
        def sort_keys(self, candidates, query):
            asked.append(query)
            return super().sort_keys(candidates, query)

    for suffix, query in (("suffix", "query"), ("suffix", ""), ("suffix", None), (TOY("ids")["input_ids"], None)):
        prepared(Prompt("p", ["a"], suffix, query=query), Asked())
    assert asked == ["query", "", "suffix", "ids"]


@given(lengths, st.integers(0, 9), st.integers(0, 9), st.integers(0, 60), st.integers(1, 9), strategies, st.booleans())
def test_what_is_kept_is_what_fits_by_the_rule_of_the_strategy(
    ranked, texts, new, window, limit, overflow, shares_positions
):
    """The largest common length; or without what is too long alone, and then without the last of the fullest set."""
    room, size = window - texts - new, partial(max, default=0) if shares_positions else sum
    limits = {"window": window, "max_segment_tokens": limit, "text_tokens": texts, "new_tokens": new}
    fit = partial(fit_segments, ranked, overflow, shares_positions=shares_positions, **limits)

    def fits(sets):
        return sum(map(size, sets)) <= room

    def cut(most):
        return [[min(each, most) for each in one] for one in ranked]

    is_whole = fits(ranked) and cut(limit) == ranked
    if room < 0 or (overflow == "error" and not is_whole):
        with pytest.raises(ContextOverflow):
            fit()
    elif is_whole or overflow == "error":
        assert fit() == ranked
    elif overflow == "trim_segments":
        assert fit() == next(filter(fits, map(cut, range(limit, -1, -1))))
    else:
        kept = [[each if each <= limit else 0 for each in one] for one in ranked]
        if not fits(kept):
            kept = [[each if each <= room else 0 for each in one] for one in kept]
        while not fits(kept):
            fullest = max(kept, key=size)
            least = max(fullest) if shares_positions else 1  # of those that count
            fullest[max(index for index, length in enumerate(fullest) if length >= least)] = 0
        assert fit() == kept


NARROW = {"window": 10, "text_tokens": 1, "new_tokens": 1}
SHARED = [[7, 2, 7, 3], [5, 1]]


@pytest.mark.parametrize(
    ("ranked", "overflow", "limits", "expected"),
    [
        ([[100, 3, 2]], "drop_last", NARROW, [[0, 3, 2]]),
        ([[100, 3, 2]], "drop_last", {**NARROW, "max_segment_tokens": 2}, [[0, 0, 2]]),
        ([[100, 3, 2]], "trim_segments", NARROW, [[3, 3, 2]]),
        ([[100, 3, 2]], "trim_segments", {**NARROW, "max_segment_tokens": 2}, [[2, 2, 2]]),
        (SHARED, "drop_last", {"window": 9, "shares_positions": True}, [[0, 2, 0, 3], [5, 1]]),
        (SHARED, "error", {"new_tokens": 10**9}, SHARED),
    ],
)
def test_a_segment_that_is_too_long_does_not_push_out_those_that_fit(ranked, overflow, limits, expected):
    """Where positions are shared, the longest make room; without a window, everything fits."""
    assert fit_segments(ranked, overflow, **limits) == expected


@pytest.mark.parametrize(
    ("ranked", "overflow", "limits", "message"),
    [
        ([[60, 7], [30]], "error", {"window": 100, "text_tokens": 11, "new_tokens": 13},
         r"100 tokens.*108 in the prompt \(11 of text, 97 in 3 segments\) and 13 to generate"),
        ([[3]], "drop_last", {"window": 5, "text_tokens": 6}, r"at most 5 tokens.*9 in the prompt"),
        ([[3]], "trim_segments", {"window": 5, "text_tokens": 6}, r"at most 5 tokens.*9 in the prompt"),
        ([[1, 9]], "error", {"max_segment_tokens": 4}, r"max_segment_tokens=4 .* got 9"),
        (SHARED, "error", {"window": 10, "text_tokens": 1, "shares_positions": True},
         r"at most 10 tokens.*13 in the prompt \(1 of text, 12 in the longest of 6"),
    ],
)  # fmt: skip
def test_the_message_of_an_overflow_names_every_number(ranked, overflow, limits, message):
    with pytest.raises(ContextOverflow, match=message) as caught:
        fit_segments(ranked, overflow, **limits)
    assert "drop_last" in caught.value.hint


def test_a_thousand_segments_are_laid_out():
    chunks = [f"chunk {random.Random(n).random()}" for n in range(1000)]
    one, other = Prompt("p", chunks, "s"), Prompt("p", chunks[::-1], "s")
    assert prepared(one).input_ids == prepared(other).input_ids
    assert [999 - index for index in prepared(other).order] == list(prepared(one).order)
    fitted = prepared(one, context_window=3000, overflow="drop_last")
    assert len(fitted.order) + len(fitted.dropped) == 1000
    assert 2900 < len(fitted.input_ids) <= 3000
