"""Labels lead to the caller's documents, and answers stay as they are written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from invariant_rag.prompts.labels import find_labels, labels_of, without_labels
from invariant_rag.segments import SegmentSet, Slot


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_a_label_leads_to_the_document_that_has_it(listed: list[int], placed: list[int]) -> None:
    slots = [Slot(f"[{n}] ", number=str(n)) for n in range(1, 5)]
    documents = SegmentSet([f"document {n}" for n in listed], slots=slots)
    labels = labels_of([(SegmentSet(["before"]), [0]), (documents, placed)])
    for place, index in enumerate(placed):
        assert labels[str(place + 1)] == 1 + index


def test_a_label_that_two_documents_have_leads_nowhere() -> None:
    slots = [Slot("[1] ", number="1"), Slot("[2] ", number="2")]
    assert (
        labels_of([(SegmentSet(["a", "b"], slots=slots), [0, 1]), (SegmentSet(["c", "d"], slots=slots), [0, 1])]) == {}
    )


def test_citations_are_found_where_they_stand() -> None:
    found = find_labels("At noon [2][1, 3], see source 2 and [4-6]; row[i] and 3 ferries 【7†source】, [Doc 8].")
    assert [label for *_, label in found] == ["2", "1", "3", "2", "4", "5", "6", "i", "7", "8"]
    assert without_labels("At noon [2], 3 ferries.") == "At noon    , 3 ferries."
