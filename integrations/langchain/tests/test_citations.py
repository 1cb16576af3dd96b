"""Citations: what an answer has from which document, as LangChain's annotations, in any order of the documents."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Literal

import pytest
from invariant_rag import InvariantModel
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from pydantic import BaseModel

from langchain_invariant_rag import ChatInvariant
from langchain_invariant_rag.documents import to_segment

from .shared import DOCUMENTS, ORDERS, QUESTION
from .test_tools import joined, said
from .tool_models import Writing, search

TEXT = "The ferry to Ostra leaves at noon. I am sure, see [2]."


@pytest.fixture(scope="module")
def chat(lm: InvariantModel) -> ChatInvariant:
    end = {"eos_token_id": lm.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    return ChatInvariant(
        model=lm, max_tokens=80, citations=True, sort_segments=False, known_documents=DOCUMENTS, generation_kwargs=end
    )


def asked(chat: ChatInvariant, documents: list[Any], text: str = TEXT, **options: Any) -> AIMessage:
    numbered = "\n".join(f"[{number}] {each.page_content}" for number, each in enumerate(documents, 1))
    writing = Writing(chat.lm, f"{text}<|im_end|>")
    return chat.invoke(f"{numbered}\n{QUESTION}", logits_processor=[writing], **options)


def cited(answer: AIMessage) -> list[tuple[str, str]]:
    (block,) = answer.content_blocks
    assert block["type"] == "text"
    found = block["annotations"]
    assert all(each["type"] == "citation" for each in found)
    return [(block["text"][each["start_index"] : each["end_index"]], each["cited_text"]) for each in found]


def test_sentences_and_numbers_are_cited_from_the_documents_that_the_caller_numbered(chat: ChatInvariant) -> None:
    found = set()
    for order in ORDERS:
        sentence, number = cited(asked(chat, order))
        assert sentence == ("The ferry to Ostra leaves at noon.", DOCUMENTS[0].page_content)
        given = int(number[0][1:-1])
        assert number[1] == order[given - 1].page_content
        found.add(number[1])
    assert len(found) == 1


class Cited(BaseModel):
    source: Literal[1, 2, 3]


@pytest.mark.parametrize("written", ["({})", "#{}", "Item {}:"])
def test_numbers_lead_to_the_same_document_in_every_order(chat: ChatInvariant, written: str) -> None:
    cited = set()
    for order in ORDERS:
        numbered = "\n".join(f"{written.format(number)} {each.page_content}" for number, each in enumerate(order, 1))
        writing = Writing(chat.lm, f"So it is, {written.format(2)} done.<|im_end|>")
        text = chat.invoke(f"{numbered}\n{QUESTION}", citations=False, logits_processor=[writing]).content
        (number,) = re.findall(r"\d", text)
        found = chat.with_structured_output(Cited, max_tokens=30).invoke(f"{numbered}\n{QUESTION}")
        cited.add((order[int(number) - 1].page_content, order[found.source - 1].page_content))
    assert len(cited) == 1


def test_a_citation_names_its_document(chat: ChatInvariant) -> None:
    documents = [
        Document("It leaves at noon.", metadata={"source": "https://ostra.example/ferry", "page": 3}),
        Document("Or so they say.", metadata={"source": "town.txt"}),
        Document("Who knows.", metadata={"title": "Doubts"}),
    ]
    text = "It leaves at noon. Or so they say. Who knows."
    answer = chat.invoke(QUESTION, documents=documents, logits_processor=[Writing(chat.lm, f"{text}<|im_end|>")])
    first, second, third = answer.content_blocks[0]["annotations"]
    segment = to_segment(documents[0])
    assert first == {
        "type": "citation",
        "start_index": 0,
        "end_index": 18,
        "cited_text": "It leaves at noon.",
        "url": "https://ostra.example/ferry",
        "title": "https://ostra.example/ferry",
        "extras": {"id": segment.content_hash, "metadata": {"source": "https://ostra.example/ferry", "page": 3}},
    }
    assert ("url" in second, second["title"]) == (False, "town.txt")
    assert ("url" in third, third["title"]) == (False, "Doubts")


def test_a_citation_has_the_id_of_its_document_beside_its_metadata(chat: ChatInvariant) -> None:
    documents = [Document("It leaves at noon.", id="f-17", metadata={"page": 3}), Document("Who knows.")]
    writing = Writing(chat.lm, "It leaves at noon. Who knows.<|im_end|>")
    answer = chat.invoke(QUESTION, documents=documents, logits_processor=[writing])
    first, second = (each["extras"] for each in answer.content_blocks[0]["annotations"])
    assert (first["document_id"], first["metadata"]) == ("f-17", {"page": 3})
    assert "document_id" not in second


def test_a_stream_has_them_in_its_last_chunk(chat: ChatInvariant) -> None:
    answer = asked(chat, DOCUMENTS)
    numbered = "\n".join(f"[{number}] {each.page_content}" for number, each in enumerate(DOCUMENTS, 1))

    def options() -> dict[str, Any]:
        return {"logits_processor": [Writing(chat.lm, f"{TEXT}<|im_end|>")]}

    async def collected() -> list[Any]:
        return [chunk async for chunk in chat.astream(f"{numbered}\n{QUESTION}", **options())]

    for chunks in (list(chat.stream(f"{numbered}\n{QUESTION}", **options())), asyncio.run(collected())):
        total = joined(chunks)
        (block,) = total.content
        assert isinstance(block, dict)
        assert [{name: block[name] for name in block if name != "index"}] == answer.content
        assert {**said(total), "content": ""} == {**said(answer), "content": ""}
        assert [chunk for chunk in chunks if any("annotations" in each for each in chunk.content)] == [chunks[-1]]


def test_citations_are_off_unless_asked_for_and_never_in_an_object(chat: ChatInvariant) -> None:
    class Answer(BaseModel):
        text: str

    assert asked(chat, DOCUMENTS, citations=False).content.endswith("].")
    plain = chat.model_copy(update={"citations": False})
    assert isinstance(asked(plain, DOCUMENTS).content, str)
    assert cited(asked(plain, DOCUMENTS, citations=True)) == cited(asked(chat, DOCUMENTS))
    structured = chat.with_structured_output(Answer, include_raw=True, max_tokens=30)
    assert isinstance(structured.invoke(QUESTION)["raw"].content, str)


def test_an_answer_with_citations_is_text_for_parsers_histories_and_tools(chat: ChatInvariant) -> None:
    answer = asked(chat, DOCUMENTS)
    assert StrOutputParser().invoke(answer) == answer.text
    again = [HumanMessage("a"), answer, HumanMessage("b")]
    plain = [HumanMessage("a"), AIMessage(answer.text), HumanMessage("b")]
    assert chat.invoke(again, max_tokens=8).text == chat.invoke(plain, max_tokens=8).text
    called = chat.bind_tools([search], tool_choice="any", max_tokens=160).invoke(QUESTION)
    assert (called.content, [block["type"] for block in called.content_blocks]) == ([], ["tool_call"])
