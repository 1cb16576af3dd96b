"""Where a text holds documents that are known."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_rag import Segment
from invariant_rag.prompts import KnownDocument
from invariant_rag.prompts.known_documents import holds_part, holds_several, occurrences

any_text = st.text(st.sampled_from("ab .\n\\\"'é\t{}"), max_size=12)


def known(*texts: str) -> list[KnownDocument]:
    return [KnownDocument.of(Segment(text)) for text in texts]


def found(text: str, *documents: str) -> list[str]:
    return [text[each.start : each.stop] for each in occurrences(text, known(*documents))]


@given(any_text)
def test_every_form_in_which_frameworks_write_a_text_is_found(text: str) -> None:
    document = f"Ferry {text} noon"
    both = f'{document} it\'s "so"'
    for written in (document, json.dumps(document), json.dumps(document, ensure_ascii=False), repr(document)):
        assert len(found(f"Read: {written} Why?", document)) == 1
    for dumped in (repr([document, both]), repr(f"{document}\n\n{both}"), json.dumps({"a": [f"{document}\n{both}"]})):
        assert len(found(dumped, document, both)) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yes", ["yes"]),
        ("- yes\n- no", ["yes", "no"]),
        ("Answer yes or no.", []),
        ("Read: yes no", ["yes", "no"]),
        ("[1] 42\n[2] 1", ["42", "1"]),
        ("1. 42\n2. 1\n", ["42", "1"]),
        ("1) yes (1) no #1", ["yes", "no"]),
        ("yesterday, nor 421 or 142", []),
        ('["yes", "no"]', ['"yes"', '"no"']),
        ("['yes', \"no\"]", ["'yes'", '"no"']),
        ("is it 42 or 1?", []),
        ("see a/1 and no_42, x=1, 1/2", []),
    ],
)
def test_words_are_documents_where_a_document_may_begin(text: str, expected: list[str]) -> None:
    assert found(text, "yes", "no", "42", "1") == expected


def test_line_breaks_at_the_ends_are_found_in_dumps() -> None:
    assert found(json.dumps(["a ferry\n", "\na mill"]), "a ferry\n", "\na mill") == ['"a ferry\\n"', '"\\na mill"']


def test_the_longer_of_two_overlapping_documents_counts() -> None:
    assert found("a b c", "a b", "a b c") == ["a b c"]
    assert found("a b c; a b", "a b", "a b c") == ["a b c", "a b"]


def test_documents_without_a_word_are_not_looked_for() -> None:
    assert found("- a -\n---\n", "-", "---", "", " \n") == []


def test_a_text_of_several_documents_is_dealt_to_each() -> None:
    documents = [KnownDocument.of(Segment("same text", metadata={"n": n})) for n in (2, 1)]
    places = occurrences("same text, same text, same text", documents)
    assert [each.document.segment.metadata["n"] for each in places] == [1, 2, 1]


def test_a_telling_part_is_a_line_or_a_sentence() -> None:
    [document] = known("Short.\nThe ferry to Ostra leaves the harbour at noon. It is never late, not even in winter.\n")
    assert holds_part("... The ferry to Ostra leaves the harbour at noon. And", document)
    assert not holds_part("Short. The ferry to Ostra leaves", document)
    other = known("A copper bridge crosses the river Senn near the old town.")
    both = "It is never late, not even in winter. A copper bridge crosses the river Senn near the old town."
    assert holds_several(both, [document, *other])
    assert not holds_several(both, other * 2), "the same one twice"
    assert not holds_several(both[:60], [document, *other])


def test_the_pieces_of_a_document_with_much_white_space_are_found_at_once() -> None:
    [document] = known("a sentence of thirty characters" + " " * 200_000 + "another sentence of more than thirty")
    assert document.pieces
