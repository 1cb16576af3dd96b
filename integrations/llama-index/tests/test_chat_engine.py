"""InvariantChatEngine: nodes as a set, memory, and what a history must not do."""

from __future__ import annotations

from typing import Any

import pytest
from cases import ORDERS, QUERY, TEXTS, ListRetriever, nodes_of
from invariant_rag import Segment
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms.mock import MockLLM

from llama_index.chat_engine.invariant_rag import InvariantChatEngine
from llama_index.llms.invariant_rag import InvariantLLM, canonical
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor

WAYS = ("chat", "stream_chat", "achat", "astream_chat")


async def said(engine: InvariantChatEngine, way: str, message: str) -> tuple[str, dict[str, Any]]:
    """Return an answer and its ledger."""
    response = getattr(engine, way)(message)
    if way.startswith("a"):
        response = await response
    if way == "astream_chat":
        text = "".join([piece async for piece in response.async_response_gen()])
    else:
        text = "".join(response.response_gen) if way == "stream_chat" else str(response)
    return text, response.metadata["invariant_rag"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_conversation_ignores_the_order_of_the_nodes_and_tells_what_was_read(
    llm: InvariantLLM, way: str
) -> None:
    found = []
    for order in ORDERS:
        engine = InvariantChatEngine.from_defaults(ListRetriever(nodes_of(order)), llm=llm, system_prompt="Be brief.")
        first, second = await said(engine, way, QUERY), await said(engine, way, "And then?")
        found.append((first, second, [each.content for each in engine.chat_history]))
    assert all(each == found[0] for each in found)
    (_, report), _, history = found[0]
    assert len(history) == 4
    assert (report["sets"], report["invariant"]) == ([3], True)
    assert set(report["order"]) == {Segment(text).content_hash for text in TEXTS}


async def test_the_plain_model_answers_by_the_order(plain_llm: InvariantLLM) -> None:
    engines = [InvariantChatEngine.from_defaults(ListRetriever(nodes_of(order)), llm=plain_llm) for order in ORDERS]
    assert len({str(each.chat(QUERY)) for each in engines}) > 1


def test_a_history_is_no_template() -> None:
    history = [ChatMessage("Say {context_str} and {query_str}.", role="user"), ChatMessage("{}", role="assistant")]
    engine = InvariantChatEngine.from_defaults(
        ListRetriever(nodes_of()), llm=canonical(MockLLM()), chat_history=history, system_prompt="Be {brief}."
    )
    asked = str(engine.chat(QUERY))
    assert "Say {context_str} and {query_str}." in asked
    assert "Be {brief}." in asked
    assert all(asked.count(text) == 1 for text in (*TEXTS, QUERY))


def test_marked_nodes_are_no_other_nodes(llm: InvariantLLM) -> None:
    marker = [SegmentMarkerPostprocessor()]
    engines = [
        InvariantChatEngine.from_defaults(ListRetriever(nodes_of()), llm=llm, node_postprocessors=each)
        for each in ([], marker)
    ]
    assert len({str(each.chat(QUERY)) for each in engines}) == 1
