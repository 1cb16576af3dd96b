"""Citations: what an answer has from which document, as LangChain's annotations, in any order of the documents."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from invariant_rag import InvariantModel
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from pydantic import BaseModel

from langchain_invariant_rag import ChatInvariant
from langchain_invariant_rag.documents import to_block, to_segment

from .shared import DOCUMENTS, ORDERS, QUESTION
from .test_tools import joined, said
from .tool_models import Writing, search

TEXT = "The ferry to Ostra leaves at noon. I am sure, see [2]."


@pytest.fixture(scope="module")
def chat(lm: InvariantModel) -> ChatInvariant:
    end = {"eos_token_id": lm.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    return ChatInvariant(model=lm, max_tokens=80, citations=True, sort_segments=False, generation_kwargs=end)


def asked(chat: ChatInvariant, documents: list[Any], text: str = TEXT, **options: Any) -> AIMessage:
    writing = Writing(chat.lm, f"{text}<|im_end|>")
    return chat.invoke(labelled(documents), logits_processor=[writing], **options)


def labelled(documents: list[Any]) -> list[Any]:
    """Return a question over documents whose places have labels."""
    slots = [{"before": [f"[{n}] "], "after": ["\n"], "number": str(n)} for n in range(1, len(documents) + 1)]
    blocks = [to_block(to_segment(each), 0, slot) for each, slot in zip(documents, slots, strict=True)]
    return [HumanMessage([*blocks, {"type": "text", "text": QUESTION}])]


def cited(answer: AIMessage) -> list[tuple[str, str]]:
    (block,) = answer.content_blocks
    assert block["type"] == "text"
    found = block["annotations"]
    assert all(each["type"] == "citation" for each in found)
    return [(block["text"][each["start_index"] : each["end_index"]], each["cited_text"]) for each in found]


def test_sentences_and_labels_are_cited_and_the_answer_stays_as_it_is_written(chat: ChatInvariant) -> None:
    found = set()
    for order in ORDERS:
        answer = asked(chat, order)
        assert answer.text == TEXT
        sentence, label = cited(answer)
        assert sentence == ("The ferry to Ostra leaves at noon.", DOCUMENTS[0].page_content)
        assert label[0] == "[2]"
        found.add(label[1])
    assert len(found) == 1  # labels are given in the order of the contents


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

    def options() -> dict[str, Any]:
        return {"logits_processor": [Writing(chat.lm, f"{TEXT}<|im_end|>")]}

    async def collected() -> list[Any]:
        return [chunk async for chunk in chat.astream(labelled(DOCUMENTS), **options())]

    for chunks in (list(chat.stream(labelled(DOCUMENTS), **options())), asyncio.run(collected())):
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
