"""Findings are warnings or errors, and say what to do."""

from __future__ import annotations

import pytest

from invariant_rag.errors import InvariantRAGError, OrderWarning
from invariant_rag.prompts import Finding, Retrieval, report
from invariant_rag.prompts.order_warnings import looks_introduced, looks_listed, states_order
from invariant_rag.segments import Segment

FOUND = [Finding("separate", "two segments stand apart."), Finding("marks", "marks are left.")]


@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")  # or it would be raised without strict
def test_every_finding_warns_with_its_fix_and_strict_raises_the_first() -> None:
    with pytest.warns(OrderWarning) as caught:
        report(FOUND, fixes={"marks": "Do this."})
    assert [str(each.message).endswith(fix) for each, fix in zip(caught, ("or none.", "Do this."), strict=True)] == [
        True
    ] * 2
    with pytest.raises(OrderWarning, match="stand apart") as raised:
        report(FOUND, strict=True)
    assert isinstance(raised.value, InvariantRAGError)
    report([], strict=True)


@pytest.mark.parametrize(
    "text",
    [
        "Documents, newest first:", "The documents are ranked by price.", "Context, sorted from cheapest to dearest",
        "The last document is the authority.", "Later passages win: the final passage is right.",
        "In chronological order:", "Most relevant results at the top:", "The first source is the contract.",
        "Listed in descending order of score.", "Prefer the earlier document where two disagree.",
    ],
)  # fmt: skip
def test_a_prompt_that_states_an_order_is_noticed(text: str) -> None:
    assert states_order(text)
    other = (
        "Answer from the documents. Be brief. First, greet. Who ranked highest? Provide a final result in this format:"
    )
    assert not states_order(other)
    assert not states_order(f"Question: {text}", [Retrieval((Segment("a"),), text)])


@pytest.mark.parametrize(
    "text",
    [
        "Document 1: The ferry leaves at noon.\nDocument 2: The mill grinds barley.",
        "[Source 1]\nThe ferry leaves at noon.\n[Source 2]\nThe mill grinds barley.",
        "<document>The ferry leaves at noon.</document><document>The mill grinds barley.</document>",
    ],
)
def test_a_list_of_documents_in_text_is_noticed(text: str) -> None:
    assert looks_listed(text)


def test_a_context_is_introduced_only_if_two_paragraphs_of_it_follow() -> None:
    above, below = (
        "Use the provided context.\nBelow:\n---\n",
        "---\nGiven the context information, answer.\nQuery: when?",
    )
    one, other = "The ferry leaves at noon.\n\n", "The mill grinds barley.\n\n"
    assert looks_introduced(above + one + other + below)
    assert not looks_introduced(above + one + below), "what follows is what to do with it"
