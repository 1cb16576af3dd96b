"""Making prompts fit: what each policy keeps, as a function of lengths in rank order and of nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_rag.errors import ContextOverflow, InvalidChoice, UnknownName
from invariant_rag.generation.overflow import Overflow, TokenLimits

lengths = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=3)
policies = st.sampled_from(["error", "drop_last", "trim_segments"])


@given(lengths, st.integers(0, 9), st.integers(0, 9), st.integers(0, 60), st.none() | st.integers(1, 9), policies)
def test_what_is_kept_fits_and_is_never_longer_than_it_was(
    ranked: list[list[int]], texts: int, new: int, window: int, limit: int | None, overflow: Overflow
) -> None:
    budget = TokenLimits(window, limit, overflow)
    try:
        kept = budget.fit(texts, ranked, new)
    except ContextOverflow:
        too_long = limit is not None and max(map(max, filter(None, ranked)), default=0) > limit
        assert texts + new > window or (overflow == "error" and (too_long or texts + new + total(ranked) > window))
        return
    assert texts + total(kept) + new <= window
    assert [len(each) for each in kept] == [len(each) for each in ranked]
    for before, after in zip(ranked, kept, strict=True):
        assert all(0 <= b <= a for a, b in zip(before, after, strict=True))
        assert limit is None or max(after, default=0) <= limit
    if overflow == "error":
        assert kept == ranked


@given(lengths, st.integers(0, 60))
def test_dropping_keeps_whole_segments_and_drops_no_earlier_one_than_it_must(
    ranked: list[list[int]], window: int
) -> None:
    for before, after in zip(ranked, TokenLimits(window, None, "drop_last").fit(0, ranked, 0), strict=True):
        could_fit = [length if length <= window else 0 for length in before]
        kept = next(count for count in range(len(before), -1, -1) if count == 0 or after[count - 1])
        assert after[:kept] == could_fit[:kept]


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 40))
def test_dropping_from_one_set_keeps_the_longest_beginning_that_fits(ranked: list[int], window: int) -> None:
    possible = [length if length <= window else 0 for length in ranked]
    count = next(n for n in range(len(ranked), -1, -1) if sum(possible[:n]) <= window)
    kept = TokenLimits(window, None, "drop_last").fit(0, [ranked], 0)[0]
    assert kept == possible[:count] + [0] * (len(ranked) - count)


@given(lengths, st.integers(0, 60))
def test_trimming_cuts_to_the_largest_common_length(ranked: list[list[int]], window: int) -> None:
    def cut(length: int) -> list[list[int]]:
        return [[min(each, length) for each in one] for one in ranked]

    largest = next(length for length in range(10, -1, -1) if total(cut(length)) <= window)
    assert TokenLimits(window, None, "trim_segments").fit(0, ranked, 0) == cut(largest)


def test_a_segment_longer_than_the_window_does_not_push_out_those_that_fit() -> None:
    assert TokenLimits(10, None, "drop_last").fit(4, [[9, 2, 1]], 2) == [[0, 2, 1]]


@pytest.mark.parametrize(
    ("overflow", "limit", "expected"),
    [
        ("drop_last", None, [[0, 3]]),
        ("drop_last", 5, [[0, 3]]),
        ("trim_segments", None, [[5, 3]]),
        ("trim_segments", 4, [[4, 3]]),
    ],
)
def test_a_segment_longer_than_the_window_is_dropped_or_trimmed(
    overflow: Overflow, limit: int | None, expected: list[list[int]]
) -> None:
    assert TokenLimits(10, limit, overflow).fit(1, [[100, 3]], 1) == expected


def test_the_message_of_an_overflow_names_every_number() -> None:
    with pytest.raises(ContextOverflow) as caught:
        TokenLimits(100).fit(11, [[60, 7], [30]], 13)
    for number in ("100 tokens", "108 in the prompt", "11 of text", "97 in 3 segments", "13 to generate"):
        assert number in str(caught.value)
    assert "drop_last" in caught.value.hint


@pytest.mark.parametrize("overflow", ["drop_last", "trim_segments"])
def test_text_that_does_not_fit_by_itself_is_an_error_whatever_the_policy(overflow: Overflow) -> None:
    with pytest.raises(ContextOverflow, match=r"at most 5 tokens.*9 in the prompt"):
        TokenLimits(5, None, overflow).fit(6, [[3]], 0)


def test_a_segment_over_its_own_limit_is_an_error_that_names_both_numbers() -> None:
    with pytest.raises(ContextOverflow, match=r"max_segment_tokens=4 .* got 9"):
        TokenLimits(None, 4).fit(0, [[1, 9]], 0)


@given(lengths, st.integers(0, 20), policies)
def test_segments_that_share_positions_take_those_of_the_longest(
    ranked: list[list[int]], window: int, overflow: Overflow
) -> None:
    """Of one set, whatever fits alone fits with all others."""
    alone = [[length if length <= window else 0 for length in each] for each in ranked[:1]]
    try:
        kept = TokenLimits(window, None, overflow).fit(0, ranked, 0, shares_positions=True)
        first = TokenLimits(window, None, overflow).fit(0, ranked[:1], 0, shares_positions=True)
    except ContextOverflow:
        assert overflow == "error"
        assert longest(ranked) > window
        return
    assert longest(kept) <= window
    assert kept == ranked or longest(ranked) > window
    assert overflow != "drop_last" or first == alone
    assert overflow != "trim_segments" or first == [[min(length, window) for length in each] for each in ranked[:1]]


def test_where_positions_are_shared_the_longest_segments_make_room() -> None:
    limits = TokenLimits(10, None, "drop_last")
    assert limits.fit(1, [[7, 2, 7, 3], [5, 1]], 1, shares_positions=True) == [[0, 2, 0, 3], [5, 1]]
    with pytest.raises(
        ContextOverflow, match=r"at most 10 tokens.*13 in the prompt \(1 of text, 12 in the longest of 6"
    ):
        TokenLimits(10).fit(1, [[7, 2, 7, 3], [5, 1]], 1, shares_positions=True)


def test_without_a_window_everything_fits() -> None:
    assert TokenLimits().fit(10**9, [[10**9]], 10**9) == [[10**9]]


def test_choices_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UnknownName, match="'drop_last', 'error', 'trim_segments'"):
        TokenLimits(overflow="drop")  # type: ignore[arg-type]
    with pytest.raises(InvalidChoice, match="at least 1, got 0"):
        TokenLimits(max_segment_tokens=0)


def longest(lengths: list[list[int]]) -> int:
    return sum(max(each, default=0) for each in lengths)


def total(kept: list[list[int]]) -> int:
    return sum(map(sum, kept))
