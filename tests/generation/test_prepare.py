"""What the model reads: physical order, what was dropped and trimmed, and indices that point at what was given."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_rag import Prompt, Segment, SegmentSet
from invariant_rag.errors import ContextOverflow, InvalidPrompt
from invariant_rag.generation.overflow import Overflow, TokenLimits
from invariant_rag.generation.prepare import PreparedPrompt, prepare
from invariant_rag.methods import RoToR
from invariant_rag.orderings import Lexical, LexicalReversed, Ordering, Score, resolve_ordering
from invariant_rag.testing import toy_tokenizer

TOY = toy_tokenizer()
ids = st.lists(st.integers(0, 3), max_size=6)
sets = st.lists(st.lists(ids, max_size=6), min_size=1, max_size=3)
policies = st.sampled_from(["drop_last", "trim_segments"])


def prompt_of(chosen: list[list[list[int]]], text: tuple[int, ...] = (9,)) -> Prompt:
    return Prompt.of(list(text), *(part for each in chosen for part in (SegmentSet(each), list(text))))


def prepared(prompt: Prompt, ordering: Ordering | None = None, new_tokens: int = 0, **budget: Any) -> PreparedPrompt:
    return prepare(prompt, TOY, RoToR(), ordering or Lexical(), TokenLimits(**budget), new_tokens)


@given(sets, st.integers(4, 40), st.none() | st.integers(1, 6), policies, st.randoms())
def test_dropping_and_trimming_are_invariant_and_indices_point_at_what_was_given(
    chosen: list[list[list[int]]], window: int, limit: int | None, overflow: Overflow, shuffle: random.Random
) -> None:
    prompt = prompt_of(chosen)
    shuffled = prompt.shuffled(shuffle)
    options: dict[str, Any] = {"context_window": window, "max_segment_tokens": limit, "overflow": overflow}
    one, other = prepared(prompt, **options), prepared(shuffled, **options)
    assert one.input_ids == other.input_ids
    assert one.arrangement == other.arrangement
    for name in ("order", "dropped", "trimmed"):
        contents = [
            [source.segments[i].token_ids for i in getattr(result, name)]
            for source, result in ((prompt, one), (shuffled, other))
        ]
        assert contents[0] == contents[1] if name == "order" else sorted(contents[0]) == sorted(contents[1])


@given(sets, st.integers(4, 40), st.none() | st.integers(1, 6), policies)
def test_the_input_is_texts_and_segments_in_physical_order_and_every_segment_is_accounted_for(
    chosen: list[list[list[int]]], window: int, limit: int | None, overflow: Overflow
) -> None:
    prompt = prompt_of(chosen)
    result = prepared(prompt, context_window=window, max_segment_tokens=limit, overflow=overflow)
    layout, order = result.arrangement.layout, list(result.order)
    assert sorted([*order, *result.dropped]) == list(range(len(prompt.segments)))
    assert set(result.trimmed) <= set(order)
    assert layout.length == len(result.input_ids) <= window
    assert result.input_ids[0] == 9
    assert result.suffix_length == 1
    for spans in layout.set_spans:
        for span in spans:
            index = order.pop(0)
            whole = prompt.segments[index].token_ids or ()
            assert result.input_ids[span.start : span.stop] == whole[: len(span)]
            assert (len(span) < len(whole)) == (index in result.trimmed)
    assert not order
    for index in result.dropped:
        assert prompt.segments[index].token_ids, "an empty segment is never dropped"


def test_rank_zero_lies_nearest_to_the_suffix() -> None:
    prompt = Prompt([9], [[2], [1], [3]], [9])
    assert prepared(prompt).input_ids == (9, 3, 2, 1, 9)
    assert prepared(prompt).order == (2, 0, 1)
    assert prepared(prompt, LexicalReversed()).input_ids == (9, 1, 2, 3, 9)


def test_the_last_of_the_ordering_is_dropped_first_wherever_it_was_listed() -> None:
    chunks = [Segment(text, score=score) for text, score in (("low", 0.1), ("high", 0.9), ("mid", 0.5))]
    result = prepared(Prompt("p", chunks, "s"), Score(), context_window=10, overflow="drop_last")
    assert (result.order, result.dropped) == ((2, 1), (0,))
    assert TOY.decode(list(result.input_ids)) == "pmidhighs"


def test_the_fullest_of_several_sets_gives_first_and_indices_count_through_all_sets() -> None:
    prompt = Prompt.of("p", SegmentSet(["bb", "aa"]), "m", SegmentSet(["dddd", "cccc"]), "s")
    result = prepared(prompt, context_window=12, overflow="drop_last")
    assert (result.order, result.dropped) == ((0, 1, 3), (2,))
    assert TOY.decode(list(result.input_ids)) == "pbbaamccccs"


@pytest.mark.parametrize("limit", [None, 7])
def test_a_segment_longer_than_the_window_under_each_policy(limit: int | None) -> None:
    prompt = Prompt("p", ["x" * 5000, "short"], "s")
    with pytest.raises(
        ContextOverflow, match=r"max_segment_tokens=7 .* 5000" if limit else r"at most 20 .* 5007 .* 4 "
    ):
        prepared(prompt, new_tokens=4, context_window=20, max_segment_tokens=limit)
    options: dict[str, Any] = {"new_tokens": 4, "context_window": 20, "max_segment_tokens": limit}
    dropped = prepared(prompt, overflow="drop_last", **options)
    assert (dropped.order, dropped.dropped, dropped.trimmed) == ((1,), (0,), ())
    trimmed = prepared(prompt, overflow="trim_segments", **options)
    assert (trimmed.order, trimmed.dropped, trimmed.trimmed) == ((0, 1), (), (0,))
    assert len(trimmed.input_ids) == (14 if limit else 16)


def test_room_is_left_for_the_tokens_to_generate() -> None:
    prompt = Prompt("p", ["aaaa"], "s")
    assert prepared(prompt, new_tokens=4, context_window=10).input_ids
    with pytest.raises(ContextOverflow, match=r"6 in the prompt .* 5 to generate"):
        prepared(prompt, new_tokens=5, context_window=10)


@pytest.mark.parametrize("ordering", ["lexical", "lexical-reversed", "frequency", "given"])
@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([], []),
        ([""], [0]),
        (["", ""], [0, 1]),
        (["one"], [0]),
        (["a", "a", "a"], [0, 1, 2]),
        (["", "a", ""], [0, 1, 2]),
    ],
)
def test_empty_single_and_duplicate_segments_are_kept(chunks: list[str], expected: list[int], ordering: str) -> None:
    result = prepared(Prompt("p", chunks, "s"), resolve_ordering(ordering))
    assert sorted(result.order) == expected
    assert TOY.decode(list(result.input_ids)) == f"p{''.join(chunks)}s"
    assert (result.dropped, result.trimmed) == ((), ())


def test_a_thousand_segments_are_laid_out() -> None:
    chunks = [f"chunk {random.Random(n).random()}" for n in range(1000)]
    one, other = Prompt("p", chunks, "s"), Prompt("p", chunks[::-1], "s")
    assert prepared(one).input_ids == prepared(other).input_ids
    assert [999 - index for index in prepared(other).order] == list(prepared(one).order)
    fitted = prepared(one, context_window=3000, overflow="drop_last")
    assert len(fitted.order) + len(fitted.dropped) == 1000
    assert 2900 < len(fitted.input_ids) <= 3000


@pytest.mark.parametrize(
    "prompt", [Prompt(), Prompt("", [], ""), Prompt([], [[]], []), Prompt("", ["", ""], ""), Prompt.of()]
)
def test_a_prompt_without_any_token_is_refused(prompt: Prompt) -> None:
    with pytest.raises(InvalidPrompt, match="at least one token"):
        prepared(prompt)


ASKED: list[str] = []


class Asked(Lexical):
    """Remembers what relevance was asked for."""

    def sort_keys(self, candidates: Any, query: str) -> Any:
        ASKED.append(query)
        return super().sort_keys(candidates, query)


@pytest.mark.parametrize(
    ("prompt", "query"),
    [
        (Prompt("p", ["a"], "suffix", query="query"), "query"),
        (Prompt("p", ["a"], "suffix", query=""), ""),
        (Prompt("p", ["a"], "suffix"), "suffix"),
        (Prompt("p", ["a"], TOY("ids")["input_ids"]), "ids"),
    ],
)
def test_orderings_are_asked_with_the_query_or_else_the_last_text(prompt: Prompt, query: str) -> None:
    ordering = Asked()
    prepared(prompt, ordering)
    assert ASKED[-1] == query
