"""What the handler notes of a run, and what the ledger says of documents that a model was told not to look for."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import OrderWarning
from langchain_core.documents import Document
from langchain_core.load import dumpd
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from pydantic import BaseModel

from langchain_invariant_rag import ChatInvariant, Segments
from langchain_invariant_rag.documents import as_document, document_list
from langchain_invariant_rag.tracking import document_lists

from .shared import DOCUMENTS, QUESTION, Listed

LONG = "The harbour of Senn was closed for a storm in the spring of that year."


class State(BaseModel):
    found: Any


@dataclass
class Data:
    found: Any


@pytest.mark.parametrize(
    "value",
    [
        DOCUMENTS,
        tuple(DOCUMENTS),
        {"a": {"b": DOCUMENTS}},
        ("text", DOCUMENTS),
        State(found={"kb": DOCUMENTS}),
        Data(DOCUMENTS),
        [each.model_dump() for each in DOCUMENTS],
        dumpd(DOCUMENTS),
        [(each, 0.5) for each in DOCUMENTS],
        [[each, 1] for each in DOCUMENTS],
    ],
)
def test_a_list_of_documents_is_found_in_any_container(value: Any) -> None:
    assert list(document_lists(value)) == [DOCUMENTS]


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        [],
        DOCUMENTS[0],
        [*DOCUMENTS, "text"],
        [{"page_content": 3}],
        [{"content": "text"}],
        State,
        [HumanMessage("a", additional_kwargs={"found": DOCUMENTS})],
    ],
)
def test_anything_else_is_no_list_of_documents(value: Any) -> None:
    assert list(document_lists(value)) == []


def test_a_value_that_holds_itself_or_very_much_ends() -> None:
    own: list[Any] = [{"found": DOCUMENTS}]
    own.append(own)
    assert DOCUMENTS in document_lists(own)
    assert list(document_lists([[1.0] * 1000] * 10_000)) == []


def test_a_document_in_another_form_keeps_its_id_and_metadata() -> None:
    document = Document("It rains.", id="7", metadata={"page": 1})
    for form in (document.model_dump(), dumpd(document), (document, 0.5)):
        assert as_document(form) == document
    assert document_list([document.model_dump()]) == [document]


def test_documents_that_a_tool_returned_are_known_in_its_run(lm: InvariantModel) -> None:
    @tool
    def find(query: str) -> Any:
        """Find."""
        return list(reversed(DOCUMENTS))

    def ask(question: str) -> Any:
        return chat.invoke("\n\n".join(each.page_content for each in find.invoke(question)) + f"\n\n{question}")

    chat = ChatInvariant(model=lm, max_tokens=2)
    assert RunnableLambda(ask).invoke(QUESTION).response_metadata["sets"] == [3]


@pytest.mark.parametrize("text", ["whole", "cut"])
def test_the_ledger_knows_of_documents_that_the_model_does_not_look_for(lm: InvariantModel, text: str) -> None:
    chat = ChatInvariant(model=lm, max_tokens=2, find_documents=False)
    texts = [f"{each.page_content} {LONG}" for each in DOCUMENTS]
    retriever = Listed(documents=[Document(each) for each in texts])

    def ask(question: str) -> Any:
        found = [each.page_content for each in retriever.invoke(question)]
        if text == "cut":
            found = [each[:40] for each in found]
        return chat.invoke("\n\n".join(found) + f"\n\n{question}", documents=["One.", "Two."])

    def asked(question: str) -> Any:
        return chat.invoke(question, documents=["One.", "Two."])

    def marked(question: str) -> Any:
        return chat.invoke(f"{Segments(retriever.invoke(question))}\n\n{question}")

    with warnings.catch_warnings():
        warnings.simplefilter("error", OrderWarning)
        answer = RunnableLambda(ask).invoke(QUESTION)
        alone = RunnableLambda(asked).invoke(QUESTION)
        segments = RunnableLambda(marked).invoke(QUESTION)
    assert (answer.response_metadata["sets"], answer.response_metadata["invariant"]) == ([2], False)
    assert (alone.response_metadata["sets"], alone.response_metadata["invariant"]) == ([2], True)
    assert (segments.response_metadata["sets"], segments.response_metadata["invariant"]) == ([3], True)
