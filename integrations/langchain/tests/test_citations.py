"""Citations: what an answer has from which document, as LangChain's annotations, in any order of the documents."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from invariant_rag import InvariantModel
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser

from langchain_invariant_rag import ChatInvariant
from langchain_invariant_rag.documents import to_segment

from .shared import QUESTION
from .tool_models import distinct, ended, joined, said, search

FOUND = [
    Document("It leaves at noon.", id="f-17", metadata={"source": "https://ostra.example/ferry", "page": 3}),
    Document("Or so they say.", metadata={"source": "town.txt"}),
    Document("Who knows.", metadata={"title": "Doubts"}),
]
TEXT = "It leaves at noon. Or so they say. Who knows. See [2]."


@pytest.fixture(scope="module")
def chat(lm: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=lm, max_tokens=80, citations=True, sort_segments=False)


def asked(chat: ChatInvariant, documents: list[Any], **options: Any) -> AIMessage:
    return chat.invoke(QUESTION, documents=documents, **ended(chat.lm, TEXT), **options)


def test_sentences_are_cited_with_their_documents_and_the_answer_stays_as_it_is_written(chat: ChatInvariant) -> None:
    answer = asked(chat, FOUND)
    assert answer.text == TEXT
    first, second, third = answer.content_blocks[0]["annotations"]
    url = "https://ostra.example/ferry"
    assert first == {
        "type": "citation", "start_index": 0, "end_index": 18, "cited_text": "It leaves at noon.",
        "url": url, "title": url,
        "extras": {
            "id": to_segment(FOUND[0]).content_hash, "metadata": {"source": url, "page": 3}, "document_id": "f-17",
        },
    }  # fmt: skip
    assert ("url" in second, second["title"], "document_id" in second["extras"]) == (False, "town.txt", False)
    assert ("url" in third, third["title"]) == (False, "Doubts")
    assert distinct(lambda documents: asked(chat, documents).content, [FOUND, FOUND[::-1]]) == 1


def test_a_stream_has_them_in_its_last_chunk(chat: ChatInvariant) -> None:
    answer = asked(chat, FOUND)

    async def collected() -> list[Any]:
        return [chunk async for chunk in chat.astream(QUESTION, documents=FOUND, **ended(chat.lm, TEXT))]

    for chunks in (list(chat.stream(QUESTION, documents=FOUND, **ended(chat.lm, TEXT))), asyncio.run(collected())):
        total = joined(chunks)
        (block,) = total.content
        assert isinstance(block, dict)
        assert [{name: block[name] for name in block if name != "index"}] == answer.content
        assert {**said(total), "content": ""} == {**said(answer), "content": ""}
        assert [chunk for chunk in chunks if any("annotations" in each for each in chunk.content)] == [chunks[-1]]


def test_an_answer_with_citations_is_text_for_parsers_histories_and_tools(chat: ChatInvariant) -> None:
    answer = asked(chat, FOUND)
    assert StrOutputParser().invoke(answer) == answer.text
    again, plain = ([HumanMessage("a"), each, HumanMessage("b")] for each in (answer, AIMessage(answer.text)))
    assert chat.invoke(again, max_tokens=8).text == chat.invoke(plain, max_tokens=8).text
    called = chat.bind_tools([search], tool_choice="any", max_tokens=160).invoke(QUESTION)
    assert (called.content, [block["type"] for block in called.content_blocks]) == ([], ["tool_call"])
    off = chat.model_copy(update={"citations": False})
    assert asked(chat, FOUND, citations=False).content == asked(off, FOUND).content == TEXT
    assert asked(off, FOUND, citations=True).content == answer.content
