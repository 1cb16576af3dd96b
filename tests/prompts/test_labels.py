"""Citations of an answer lead to the documents as the caller numbered them."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariant_rag.prompts.labels import labels_of, translate_labels, translate_stream
from invariant_rag.segments import Slot

TURNED = {"1": "2", "2": "10", "10": "1"}
LETTERS = {"a": "b", "b": "a"}
PIECES = [
    "[", "]", "1", "2", "10", "a", "b", " ", "\n", ",", ";", "^", "&", ".", "x", "re", "s", "p", "d", "or", " and ",
    "source", "sources ", "Document ", "Passage 1", "[1]", "[1, 2]", "resource 2", "documents 1, 2 and 10",
]  # fmt: skip
answers = st.lists(st.sampled_from(PIECES), max_size=14).map("".join) | st.text(max_size=20)


@settings(max_examples=500)
@given(answers, st.lists(st.integers(0, 60), max_size=8), st.sampled_from([TURNED, LETTERS, {}]))
def test_a_stream_is_translated_as_the_whole(answer: str, cuts: list[int], labels: dict[str, str]) -> None:
    stops = sorted(min(cut, len(answer)) for cut in cuts)
    pieces = [answer[start:stop] for start, stop in zip([0, *stops], [*stops, len(answer)], strict=True)]
    whole = translate_labels(answer, labels)
    assert "".join(translate_stream(pieces, labels)) == whole
    assert "".join(translate_stream(answer, labels)) == whole


def test_text_without_citations_streams_at_once() -> None:
    assert list(translate_stream(["At no", "on. ", "[2", "] it", " leaves."], TURNED)) == [
        "At no", "on. ", "[10] it", " leaves."
    ]  # fmt: skip


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_a_citation_leads_to_the_document_that_was_meant(given_order: list[int], placed: list[int]) -> None:
    slots = [Slot((f"[{n}] ",), number=str(n)) for n in range(1, 5)]
    labels = labels_of([(slots, placed)])
    documents = [f"document {n}" for n in given_order]  # as the caller listed them
    for place, index in enumerate(placed):
        cited = translate_labels(f"It says so [{place + 1}].", labels)
        assert documents[int(cited[-3]) - 1] == documents[index]


@given(answers, st.permutations(["1", "2", "10"]))
def test_translating_back_restores_the_answer(answer: str, numbers: list[str]) -> None:
    there = dict(zip(["1", "2", "10"], numbers, strict=True))
    back = {number: label for label, number in there.items()}
    assert translate_labels(translate_labels(answer, there), back) == answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("At noon [2].", "At noon [10]."),
        ("[1][2]", "[2][10]"),
        ("[1, 2; 10]", "[2, 10; 1]"),
        ("[ 1 ]", "[ 2 ]"),
        ("[^1]", "[^2]"),
        ("See Source 1.", "See Source 2."),
        ("[Document 2]", "[Document 10]"),
        ("Sources 1 and 2", "Sources 2 and 10"),
        ("documents 1, 2, or 10", "documents 2, 10, or 1"),
        ("Passages 1 & 2.", "Passages 2 & 10."),
        ("Source 1, 2 ferries", "Source 2, 2 ferries"),
        ("source\n2", "source\n10"),
    ],
)
def test_the_forms_of_citations(answer: str, expected: str) -> None:
    assert translate_labels(answer, TURNED) == expected


@pytest.mark.parametrize(
    "prose",
    [
        "see page s 3", "I [a] think", "resource 1", "In 1 or 2 days", "1. First\n2. Second", "2024", "[2024]", "[12]",
        "sources", "source of 2 rivers", "[1 2]", "[x1]", "[note]", "[ab]", "(1)", "[10th]", "pages 1 and 2", "[]",
        "[,]", "Document 100", "opensource 1",
    ],
)  # fmt: skip
def test_ordinary_prose_is_left_as_it_is(prose: str) -> None:
    assert translate_labels(prose, TURNED) == prose


def test_letters_are_translated_where_the_prompt_has_letters() -> None:
    assert translate_labels("Yes [a], no [A]; a source b", LETTERS) == "Yes [b], no [A]; a source b"


def slots(*numbers: str | None) -> list[Slot]:
    return [Slot(number=number) for number in numbers]


def test_numbers_that_two_sets_use_for_different_documents_are_not_translated() -> None:
    two = slots("1", "2")
    assert labels_of([(two, [1, 0]), (two, [0, 1])]) == {}
    assert labels_of([(two, [1, 0]), (two, [1, 0])]) == {"1": "2", "2": "1"}
    assert labels_of([(two, [1, 0]), (slots("3", "4"), [0, 1])]) == {"1": "2", "2": "1", "3": "3", "4": "4"}
    assert labels_of([(two, [0, 1])]) == {}
    assert labels_of([(None, [1, 0]), (slots(None, None), [1, 0])]) == {}


def test_labels_are_a_permutation_of_the_numbers() -> None:
    for order in permutations(range(3)):
        labels = labels_of([(slots("1", "2", "3"), order)])
        assert sorted(labels) == sorted(labels.values())
