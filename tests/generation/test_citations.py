"""Claims about which chunks an answer is found in."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from invariant_rag.generation.citations import cite, cite_spans, numbers_of
from invariant_rag.segments import Prompt, Segment, SegmentSet, Slot

CHUNKS = [
    Segment("The ferry to Ostra leaves the harbour at noon.", "Ferry", score=0.9),
    Segment("The mill of Brenn was built by Ada Kolm.", "Mill", score=0.5),
    Segment("Ada Kolm, a builder, lived by the river.", "People", score=0.7),
    Segment("The river is long.", score=0.1),
]
QUESTION = "Who built the mill of Brenn?"


def cited(answer: str, question: str = QUESTION, chunks: list[Segment] = CHUNKS) -> list[tuple[int, bool]]:
    return [(each.index, each.exact) for each in cite(answer, question, chunks)]


def test_a_chunk_with_the_answer_word_for_word_is_cited_best_score_first() -> None:
    assert cited("Ada Kolm") == [(2, True), (1, True)]


def test_case_spacing_and_punctuation_do_not_matter() -> None:
    assert cited(" ada  KOLM.\n") == cited("Ada Kolm")


def test_half_a_word_is_not_a_word() -> None:
    assert cited("Ada Kol") == [(2, False), (1, False)]
    assert cited("da") == []


def test_the_title_counts() -> None:
    assert cited("ferry", "What is it?") == [(0, True)]


def test_an_answer_in_other_words_is_found_by_the_words_that_tell_it_from_others() -> None:
    # "built", "the", "mill" and "of" are in the question; "ada", "kolm" and "it" are left.
    assert cited("It was Ada Kolm who built the mill of Brenn") == [(1, False), (2, False)]


def test_words_of_the_question_and_words_that_are_everywhere_find_nothing() -> None:
    assert cited("The mill of Brenn the") == []


def test_an_answer_that_is_nowhere_is_not_cited() -> None:
    assert cited("Purple elephants") == []


def test_an_empty_answer_is_not_cited() -> None:
    assert cited("") == cited(" .!\n") == []


def test_ideographs_need_no_spaces() -> None:
    chunks = [Segment("塔の高さは三十メートルです。"), Segment("橋は古い。")]
    assert cited("三十メートル", "塔の高さは？", chunks) == [(0, True)]


def test_a_single_chunk_is_cited_by_the_words_that_it_holds() -> None:
    assert cited("Kolm, Ada", chunks=[CHUNKS[1]]) == [(0, False)]
    assert cited("Purple elephants", chunks=[CHUNKS[1]]) == []


def test_chunks_that_were_not_read_are_not_looked_at() -> None:
    def cited_of(answer: str, read: tuple[int, ...]) -> list[tuple[int, bool]]:
        return [(each.index, each.exact) for each in cite(answer, QUESTION, CHUNKS, read)]

    assert cited_of("Ada Kolm", (3, 2, 0)) == [(2, True)]
    assert cited_of("Ada Kolm", (3, 0)) == []
    assert cited_of("Ada Kolm", ()) == []
    # Word for word in a chunk that was not read does not keep one in other words from being cited.
    assert cited_of("built by Ada Kolm", (2, 3)) == [(2, False)]


@given(st.sampled_from(["Ada Kolm", "It was Ada, by the river", "noon", ""]), st.randoms(use_true_random=False))
def test_citations_ignore_the_order_of_the_chunks(answer: str, order: random.Random) -> None:
    # Two of them with equal scores.
    chunks = [*CHUNKS, Segment("Noon: Ada Kolm slept.", score=0.7), Segment("By noon Ada Kolm was gone.", score=0.7)]
    shuffled = order.sample(chunks, len(chunks))
    expected = [(each.segment, each.exact) for each in cite(answer, QUESTION, chunks)]
    assert [(each.segment, each.exact) for each in cite(answer, QUESTION, shuffled)] == expected


def spans(answer: str, chunks: list[Segment] = CHUNKS, **options: Any) -> list[tuple[str, int]]:
    found = cite_spans(answer, QUESTION, chunks, **options)
    assert all(chunks[each.index] == each.segment for each in found)
    return [(answer[each.start : each.end], each.index) for each in found]


def test_every_sentence_is_cited_by_the_chunks_that_contain_it() -> None:
    answer = "By Ada Kolm. She was 3.5 m tall!\nThe river is long"
    assert spans(answer) == [("By Ada Kolm.", 1), ("The river is long", 3)]
    assert spans("Ada Kolm? Ada Kolm.") == [("Ada Kolm?", 2), ("Ada Kolm?", 1), ("Ada Kolm.", 2), ("Ada Kolm.", 1)]
    assert spans("塔は高い。橋は古い。", [Segment("橋は古い")]) == [("橋は古い。", 0)]


def test_numbers_in_an_answer_name_chunks_and_are_no_words_of_a_sentence() -> None:
    numbers = {"1": 3, "2": 1}
    assert spans("By Ada Kolm [2]. See [1, 2], source 1 and [7].", numbers=numbers) == [
        ("By Ada Kolm [2].", 1),
        ("[2]", 1),
        ("[1, 2]", 3),
        ("[1, 2]", 1),
        ("source 1", 3),
    ]
    assert spans("As in [2].") == []


def test_numbers_are_found_as_the_prompt_writes_them() -> None:
    slots = [Slot((f"({number}) ",), number=str(number)) for number in range(1, 5)]
    prompt = Prompt("", SegmentSet(CHUNKS, slots=slots), "")
    assert spans("Ada Kolm (2).", numbers=numbers_of(prompt)) == [
        ("Ada Kolm (2).", 2), ("Ada Kolm (2).", 1), ("(2)", 1)
    ]  # fmt: skip
    assert spans("So it is (2).", numbers={"2": 1}) == []


def test_a_chunk_that_was_not_read_has_no_span_and_an_equal_one_only_one() -> None:
    assert spans("Ada Kolm [2].", included=[2], numbers={"2": 1}) == [("Ada Kolm [2].", 2)]
    assert spans("The river is long", [CHUNKS[3], CHUNKS[3]]) == [("The river is long", 0)]


@given(st.randoms())
def test_spans_ignore_the_order_of_chunks(shuffle: random.Random) -> None:
    answer = "Ada Kolm. The ferry [2] leaves at noon; [1, 2]. The river is long."
    numbered = list(zip(CHUNKS, "1234", strict=True))

    def segments(pairs: list[tuple[Segment, str]]) -> list[tuple[int, int, Segment]]:
        numbers = {number: index for index, (_, number) in enumerate(pairs)}
        found = cite_spans(answer, QUESTION, [chunk for chunk, _ in pairs], numbers=numbers)
        return [(each.start, each.end, each.segment) for each in found]

    expected = segments(numbered)
    assert len(expected) == 6
    shuffle.shuffle(numbered)
    assert segments(numbered) == expected
