"""Listing the same documents in another order changes nothing, through every public entry.

`sort_segments` is off: the `InvariantModel` has to do it. The model's weights are random, so its answers depend on
everything that it reads; the first test shows that they depend on the order too where nothing is done about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from invariant_rag import InvariantModel
from langchain.agents import create_agent
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnablePassthrough

from langchain_invariant_rag import (
    SEGMENT_PROMPT,
    ChatInvariant,
    InvariantLLM,
    InvariantRAGMiddleware,
    Segments,
    SegmentsPlaceholder,
    as_segments,
    create_invariant_documents_chain,
)

from .shared import DOCUMENTS, ORDERS, QUESTION, Listed

CHAT_PROMPT = ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{input}")])
TEXT_PROMPT = PromptTemplate.from_template("{context}\n{input}")
OBJECT = {
    "title": "Answer",
    "type": "object",
    "properties": {"who": {"type": "string", "maxLength": 4}},
    "required": ["who"],
}

Documents = list[Any]


def chat_inputs(documents: Documents) -> Any:
    return CHAT_PROMPT.invoke({"context": documents, "input": QUESTION})


def text_inputs(documents: Documents) -> Any:
    return TEXT_PROMPT.invoke({"context": Segments(documents), "input": QUESTION})


async def collected(stream: Any) -> Any:
    return [item async for item in stream]


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk if isinstance(chunk, str) else chunk.content for chunk in chunks)


def agent_answer(chat: ChatInvariant, documents: Documents, *, asynchronous: bool) -> str:
    agent = create_agent(chat, tools=[], middleware=[InvariantRAGMiddleware(Listed(documents=documents))])
    state = {"messages": [("human", QUESTION)]}
    result = asyncio.run(agent.ainvoke(state)) if asynchronous else agent.invoke(state)
    assert [message.type for message in result["messages"]] == ["human", "ai"]
    return str(result["messages"][-1].content)


def six_entries(inputs: Callable[[Documents], Any]) -> dict[str, Callable[[Any, Documents], Any]]:
    return {
        "invoke": lambda model, documents: text_of([model.invoke(inputs(documents))]),
        "ainvoke": lambda model, documents: text_of([asyncio.run(model.ainvoke(inputs(documents)))]),
        "batch": lambda model, documents: text_of(model.batch([inputs(documents), inputs(documents[:2])])[:1]),
        "abatch": lambda model, documents: text_of(asyncio.run(model.abatch([inputs(documents)]))),
        "stream": lambda model, documents: text_of([*model.stream(inputs(documents))]),
        "astream": lambda model, documents: text_of(asyncio.run(collected(model.astream(inputs(documents))))),
        "documents keyword": lambda model, documents: text_of([model.invoke(QUESTION, documents=documents)]),
        "bound documents": lambda model, documents: text_of([*model.bind(documents=documents).stream(QUESTION)]),
    }


CHAT_ENTRIES: dict[str, Callable[[Any, Documents], Any]] = {
    **six_entries(chat_inputs),
    "marks": lambda chat, documents: chat.invoke(f"{Segments(documents)}{QUESTION}").content,
    "system message": lambda chat, documents: (
        chat.invoke(
            ChatPromptTemplate.from_messages([("system", "Read this: {context}"), ("human", "{input}")]).invoke(
                {"context": Segments(documents), "input": QUESTION}
            )
        ).content
    ),
    "artifact": lambda chat, documents: (
        chat.invoke([ToolMessage("text", tool_call_id="1", artifact=documents), HumanMessage(QUESTION)]).content
    ),
    "sampled with a seed": lambda chat, documents: chat.invoke(chat_inputs(documents), temperature=1.0, seed=3).content,
    "structured": lambda chat, documents: chat.with_structured_output(OBJECT).invoke(
        chat_inputs(documents), max_tokens=30
    ),
    "our chain": lambda chat, documents: create_invariant_documents_chain(chat, CHAT_PROMPT).invoke(
        {"context": documents, "input": QUESTION}
    ),
    "retrieval chain": lambda chat, documents: create_retrieval_chain(
        Listed(documents=documents), create_invariant_documents_chain(chat, CHAT_PROMPT)
    ).invoke({"input": QUESTION})["answer"],
    "stock chain": lambda chat, documents: create_stuff_documents_chain(
        chat, ChatPromptTemplate.from_template("{context}{input}"), document_prompt=SEGMENT_PROMPT
    ).invoke({"context": documents, "input": QUESTION}),
    "wrapped retriever": lambda chat, documents: (
        ({"context": as_segments(Listed(documents=documents)), "input": RunnablePassthrough()} | CHAT_PROMPT | chat)
        .invoke(QUESTION)
        .content
    ),
    "agent": lambda chat, documents: agent_answer(chat, documents, asynchronous=False),
    "agent, async": lambda chat, documents: agent_answer(chat, documents, asynchronous=True),
}
LLM_ENTRIES = six_entries(text_inputs)


def distinct(entry: Callable[[Any, Documents], Any], model: Any) -> int:
    return len({repr(entry(model, list(documents))) for documents in ORDERS})


@pytest.fixture(scope="module", params=["rotor", "pine"])
def chat(lm: InvariantModel, request: Any) -> ChatInvariant:
    return ChatInvariant(model=lm, method=request.param, max_tokens=12, sort_segments=False)


@pytest.fixture(scope="module")
def llm(lm: InvariantModel) -> InvariantLLM:
    return InvariantLLM(model=lm, max_tokens=12, sort_segments=False)


def test_the_plain_model_answers_differently(lm: InvariantModel) -> None:
    plain = {"model": lm, "method": "sequential", "ordering": "given", "max_tokens": 12}
    assert distinct(CHAT_ENTRIES["invoke"], ChatInvariant(**plain)) > 1
    assert distinct(CHAT_ENTRIES["structured"], ChatInvariant(**plain)) > 1
    assert distinct(LLM_ENTRIES["invoke"], InvariantLLM(**plain)) > 1


@pytest.mark.parametrize("name", CHAT_ENTRIES)
def test_a_chat_model_ignores_the_order(chat: ChatInvariant, name: str) -> None:
    assert distinct(CHAT_ENTRIES[name], chat) == 1


@pytest.mark.parametrize("name", LLM_ENTRIES)
def test_a_completion_model_ignores_the_order(llm: InvariantLLM, name: str) -> None:
    assert distinct(LLM_ENTRIES[name], llm) == 1


def test_all_entries_of_a_model_agree(chat: ChatInvariant, llm: InvariantLLM) -> None:
    for model, inputs in ((chat, chat_inputs), (llm, text_inputs)):
        entries = six_entries(inputs)
        plain = [name for name in entries if "documents" not in name]
        assert len({entries[name](model, DOCUMENTS) for name in plain}) == 1
