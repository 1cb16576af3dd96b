"""Listing the same nodes in another order changes no bit of an answer, whichever way it is asked for.

Nothing in the package sorts nodes: the engine has to do it. Each case is also run with the same weights read in the
order given, and must then give several answers: otherwise it could not tell.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import pytest
from cases import ORDERS, QUERY, TEXTS, nodes_of
from invariant_rag import InvariantModel
from invariant_rag.prompts import mark
from llama_index.core.llms import ChatMessage

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

Order: TypeAlias = Sequence[int]
Entry: TypeAlias = Callable[[InvariantLLM, Order], Awaitable[str]]


def text_of(order: Order) -> str:
    return f"Read:\n{''.join(mark(TEXTS[i]) for i in order)}\n{QUERY}\n"


def messages_of(order: Order) -> list[ChatMessage]:
    return [ChatMessage(blocks=[*(SegmentBlock.of(TEXTS[i]) for i in order), *ChatMessage(QUERY).blocks])]


def llm_entry(name: str) -> Entry:
    async def ask(llm: InvariantLLM, order: Order) -> str:
        response = getattr(llm, name)(messages_of(order) if name.endswith("chat") else text_of(order))
        response = await response if name.startswith("a") else response
        if name.startswith("astream"):
            return "".join([each.delta async for each in response])
        if name.startswith("stream"):
            return "".join(each.delta for each in response)
        return str(response.message.content if name.endswith("chat") else response.text)

    return ask


def synthesizer_entry(way: str, streaming: bool) -> Entry:
    async def ask(llm: InvariantLLM, order: Order) -> str:
        synthesizer: Any = InvariantSynthesizer(llm, streaming=streaming)
        if "get_response" in way:
            response = getattr(synthesizer, way)(QUERY, [TEXTS[i] for i in order])
        else:
            response = getattr(synthesizer, way)(QUERY, nodes_of(order))
        response = await response if way.startswith("a") else response
        if hasattr(response, "async_response_gen"):
            response = response.async_response_gen()
        if hasattr(response, "response_gen"):
            response = response.response_gen
        if hasattr(response, "__aiter__"):
            return "".join([piece async for piece in response])
        return "".join(response) if hasattr(response, "__next__") else str(response)

    return ask


ENTRIES: dict[str, Entry] = {
    **{
        name: llm_entry(name)
        for kind in ("complete", "chat")
        for name in (kind, f"stream_{kind}", f"a{kind}", f"astream_{kind}")
    },
    **{
        f"{way}{' streaming' * streaming}": synthesizer_entry(way, streaming)
        for way in ("get_response", "aget_response", "synthesize", "asynthesize")
        for streaming in (False, True)
    },
}


async def answers(llm: InvariantLLM, entry: str) -> set[str]:
    return {await ENTRIES[entry](llm, order) for order in ORDERS}


@pytest.mark.parametrize("entry", ENTRIES)
async def test_the_order_of_nodes_changes_nothing(llm: InvariantLLM, entry: str) -> None:
    assert len(await answers(llm, entry)) == 1


@pytest.mark.parametrize("entry", ENTRIES)
async def test_the_plain_model_answers_by_order(plain_llm: InvariantLLM, entry: str) -> None:
    assert len(await answers(plain_llm, entry)) > 1


@pytest.mark.parametrize("method", ["pine", "sequential"])
@pytest.mark.parametrize("entry", ["chat", "complete", "synthesize"])
async def test_other_methods_with_an_ordering_by_content(model: InvariantModel, method: str, entry: str) -> None:
    llm = InvariantLLM(model.with_method(method, ordering="lexical"), max_tokens=8)
    assert len(await answers(llm, entry)) == 1
