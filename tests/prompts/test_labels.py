"""Citations of an answer lead to the documents as the caller numbered them."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from invariant_rag.prompts.labels import labels_of, translate_labels, translate_object, translate_stream
from invariant_rag.segments import Slot

TURNED = {"1": "2", "2": "10", "10": "1"}
LETTERS = {"a": "b", "b": "a"}
SPELLINGS = ["({})", "#{}", "Item {}", "D{}", "doc_{}"]
SPELT = TURNED | {each.format(one): each.format(other) for each in SPELLINGS for one, other in TURNED.items()}
PIECES = [
    "[", "]", "1", "2", "10", "a", "b", " ", "\n", ",", ";", "^", "&", ".", "x", "re", "s", "p", "d", "or", " and ",
    "source", "sources ", "Document ", "Passage 1", "[1]", "[1, 2]", "resource 2", "documents 1, 2 and 10",
]  # fmt: skip
STYLES = [
    "doc #2", "Document no. 2", "Document number 2", "Sources: 2", '{"source": 2}', '"doc_ids": ["1", 2]',
    '"citation":',
    "^2^", "^1,", "^", "<cite>", "</cite>", "<cite>2</cite>", "<doc id=2>", '<source id="', '">', "(2)", "(", ")", "#2",
    "#", "Item 2", "items 1 and", "D2", "doc_1", "As a result 2", "three (2)", "- ", "-", ":", "1-2", '"', "{", "}",
    "_",
    "<", ">", "/", "no. ", "ferries", ".pdf", "=", "*", "\\", "<sup>2</sup>", "km^2^", "2.5", ",000", "Ref. ",
]  # fmt: skip
answers = st.lists(st.sampled_from(PIECES), max_size=14).map("".join) | st.text(max_size=20)
in_any_style = st.lists(st.sampled_from([*STYLES, *STYLES, *PIECES]), max_size=10).map("".join)


@settings(max_examples=500, deadline=None)  # a grammar is compiled once
@given(answers | in_any_style, st.lists(st.integers(0, 60), max_size=8), st.sampled_from([TURNED, LETTERS, SPELT, {}]))
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


@settings(deadline=None)
@given(st.permutations(range(4)), st.permutations(range(4)))
def test_a_citation_leads_to_the_document_that_was_meant(given_order: list[int], placed: list[int]) -> None:
    slots = [Slot((f"[{n}] ",), number=str(n)) for n in range(1, 5)]
    labels = labels_of([(slots, placed)])
    documents = [f"document {n}" for n in given_order]  # as the caller listed them
    for place, index in enumerate(placed):
        cited = translate_labels(f"It says so [{place + 1}].", labels)
        assert documents[int(cited[-3]) - 1] == documents[index]


@settings(deadline=None)
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
        ("doc #2", "doc #10"),
        ("Document no. 2", "Document no. 10"),
        ("Document number 2", "Document number 10"),
        ("Sources: 2", "Sources: 10"),
        ("Source: **2**, then", "Source: **10**, then"),
        ("Chunk 2, context 1, ref. 10", "Chunk 10, context 2, ref. 1"),
        ("search result #2", "search result #10"),
        ("source_id: 2", "source_id: 10"),
        ("[1 and 2]", "[2 and 10]"),
        ("[1-2]", "[2, 10]"),
        ("documents 1-2", "documents 2, 10"),
        ("At noon^2^.", "At noon^10^."),
        ("At noon<sup>1, 2</sup>.", "At noon<sup>2, 10</sup>."),
        ("<cite>2</cite>", "<cite>10</cite>"),
        ("<doc id=2>", "<doc id=10>"),
        ('<source url="a" id="2"/>', '<source url="a" id="10"/>'),
        ("<source_id>2</source_id>", "<source_id>10</source_id>"),
        ('{"source": 2, "year": 2}', '{"source": 10, "year": 2}'),
        ('{"doc_ids": ["1", "2"], "years": [2]}', '{"doc_ids": ["2", "10"], "years": [2]}'),
        ('{"citations": [{"source_id": 2, "quote": "2"}]}', '{"citations": [{"source_id": 10, "quote": "2"}]}'),
        ('{"citedSources": [1, 2]}', '{"citedSources": [2, 10]}'),
    ],
)
def test_the_forms_of_citations(answer: str, expected: str) -> None:
    assert translate_labels(answer, TURNED) == expected


@pytest.mark.parametrize(
    "prose",
    [
        "see page s 3", "I [a] think", "resource 1", "In 1 or 2 days", "1. First\n2. Second", "2024", "[2024]", "[12]",
        "sources", "source of 2 rivers", "[1 2]", "[x1]", "[note]", "[ab]", "(1)", "[10th]", "pages 1 and 2", "[]",
        "[,]", "Document 100", "opensource 1", "#2", "Answer: 2", "2", "2) x", "As a result 2 ferries left",
        "Context: 2 ferries leave", "source 2.txt", "doc-2.pdf", "Source 2.5", "sources 1,200", "2 km^2^",
        "10<sup>2</sup>",
        "a[:2]", "Sources:\n1. Ferry\n2. Mill", '"num_sources": 2', '"result": 2', '"source": "2 ferries"',
        '"source": 2.5', "<cite>2 ferries</cite>", "{2}", "<2>", "Item 2",
    ],
)  # fmt: skip
def test_ordinary_prose_is_left_as_it_is(prose: str) -> None:
    assert translate_labels(prose, TURNED) == prose


def test_letters_are_translated_where_the_prompt_has_letters() -> None:
    assert translate_labels("Yes [a], no [A]; a source b", LETTERS) == "Yes [b], no [A]; a source b"


@pytest.mark.parametrize(
    ("written", "answer", "expected"),
    [
        ("({}) ", "At noon (2).", "At noon (10)."),
        ("({}) ", "(2)", "(10)"),
        ("({}) ", "At noon (1, 2)(10).", "At noon (2, 10)(1)."),
        ("({}) ", "(1) Salt\n  (2) Fish", "(1) Salt\n  (2) Fish"),
        ("({}) ", "two (2) ferries (3)", "two (2) ferries (3)"),
        ("#{} ", "See #1 and #2.", "See #2 and #10."),
        ("#{} ", "#1 Salt", "#1 Salt"),
        ("Item {}: ", "Items 1 and 2, item #2", "Items 2 and 10, item #10"),
        ("D{}: ", "D2 [D1], D2.pdf", "D10 [D2], D2.pdf"),
        ("doc_{} ", "[doc_2], doc_2.pdf", "[doc_10], doc_2.pdf"),
        ("<{}> ", "<2>", "<10>"),
        ("文档{}\n", "见文档2。", "见文档10。"),
        ("{}. ", "2. Salt, (2), 2", "2. Salt, (2), 2"),
        ("<doc id={}>", "<doc id=2>, (2)", "<doc id=10>, (2)"),
    ],
)
def test_a_citation_may_look_as_the_numbers_of_the_prompt_do(written: str, answer: str, expected: str) -> None:
    listed = [Slot((written.format(number),), number=number) for number in ("1", "2", "10")]
    labels = labels_of([(listed, [1, 2, 0])])
    assert translate_labels(answer, labels) == expected
    assert "".join(translate_stream(answer, labels)) == expected


def test_letters_with_a_word_are_capital_letters() -> None:
    listed = [Slot((f"Document {letter}: ",), number=letter) for letter in "AB"]
    labels = labels_of([(listed, [1, 0])])
    assert (
        translate_labels("Documents: Document A, B; a document a", labels) == "Documents: Document B, A; a document a"
    )


class Found(BaseModel):
    source: int
    year: int
    quotes: list[dict[str, Any]]


def test_an_object_is_translated_as_its_json() -> None:
    found = Found(source=2, year=2, quotes=[{"doc_ids": [1, "2"], "text": "See [1].", "pages": [1, 2], "sure": True}])
    translated = translate_object(found, TURNED)
    assert translated == Found.model_validate_json(translate_labels(found.model_dump_json(), TURNED))
    assert (translated.source, translated.year, translated.quotes[0]["doc_ids"]) == (10, 2, [2, "10"])
    assert translate_object({"source": (1, 2), "sources": "2", "text": "2"}, TURNED) == {
        "source": (2, 10), "sources": "10", "text": "2"
    }  # fmt: skip
    assert translate_object(found, {}) is found


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
