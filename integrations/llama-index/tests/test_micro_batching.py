"""Concurrent calls are decoded together where that is asked for, and answer as they do alone."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from cases import QUERY, TEXTS, ListRetriever, nodes_of
from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import ContextOverflow
from llama_index.core.llms import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine
from pydantic import BaseModel, ValidationError

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

QUESTIONS = [f"{QUERY} {number}" for number in range(4)]


class Place(BaseModel):
    """A place."""

    name: str


class Gated(InvariantModel):
    """The model; its first call waits for a signal, and it remembers how many prompts each call has."""

    def __init__(self, other: InvariantModel) -> None:
        self.__dict__.update(other.__dict__)
        vars(self).update(sizes=list[int](), first=Event(), gate=Event())

    def generate(self, prompt: Any, **kwargs: Any) -> Any:
        self.sizes.append(1 if isinstance(prompt, Prompt) else len(prompt))
        if len(self.sizes) == 1:
            self.first.set()
            assert self.gate.wait(timeout=20)
        return super().generate(prompt, **kwargs)


async def together(model: Gated, llm: InvariantLLM, calls: list[Any]) -> list[Any]:
    """Start calls, the first of which goes on once all others wait behind it."""
    tasks = [asyncio.create_task(calls[0])]
    await asyncio.to_thread(model.first.wait, 20)
    tasks += [asyncio.create_task(each) for each in calls[1:]]
    for _ in range(400):
        if len(llm._batcher._waiting) == len(calls) - 1:
            break
        await asyncio.sleep(0.01)
    model.gate.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


def asked(question: str) -> list[ChatMessage]:
    return [ChatMessage(blocks=[*map(SegmentBlock.of, TEXTS), *ChatMessage(question).blocks])]


@pytest.mark.parametrize("name", ["aquery", "achat", "acomplete"])
@pytest.mark.parametrize("batch_size", [8, 2])
async def test_concurrent_calls_are_decoded_together(model: InvariantModel, name: str, batch_size: int) -> None:
    gated = Gated(model)
    llm = InvariantLLM(gated, max_tokens=8, micro_batching=True, batch_size=batch_size)
    alone = InvariantLLM(model, max_tokens=8)

    def called(llm: InvariantLLM, question: str) -> Any:
        if name == "aquery":
            return RetrieverQueryEngine(ListRetriever(nodes_of()), InvariantSynthesizer(llm)).aquery(question)
        return llm.achat(asked(question)) if name == "achat" else llm.acomplete(question)

    found = await together(gated, llm, [called(llm, question) for question in QUESTIONS])
    assert [str(each) for each in found] == [str(await called(alone, question)) for question in QUESTIONS]
    assert gated.sizes == ([1, 3] if batch_size == 8 else [1, 2, 1])


async def test_calls_are_decoded_alone_unless_asked_otherwise(model: InvariantModel) -> None:
    gated = Gated(model)
    gated.gate.set()
    llm = InvariantLLM(gated, max_tokens=4)
    await asyncio.gather(*(llm.acomplete(question) for question in QUESTIONS))
    assert gated.sizes == [1, 1, 1, 1]


async def test_sampled_answers_and_objects_are_decoded_alone(model: InvariantModel) -> None:
    gated = Gated(model)
    gated.gate.set()
    llm = InvariantLLM(gated, max_tokens=60, micro_batching=True)
    alone = InvariantLLM(model, max_tokens=60)
    for options in ({"temperature": 0.7, "seed": 3}, {"output_cls": Place}):
        found = await asyncio.gather(*(llm.achat(asked(question), **options) for question in QUESTIONS[:2]))
        expected = [alone.chat(asked(question), **options) for question in QUESTIONS[:2]]
        assert [each.message.content for each in found] == [each.message.content for each in expected]
    assert gated.sizes == [1, 1, 1, 1]


async def test_a_call_that_fails_fails_alone(model: InvariantModel) -> None:
    gated = Gated(model)
    llm = InvariantLLM(gated, max_tokens=4, micro_batching=True)
    texts = [QUERY, "x" * 5000, "Where?"]
    found = await together(gated, llm, [llm.acomplete(text) for text in texts])
    assert [type(each).__name__ for each in found] == ["CompletionResponse", "ContextOverflow", "CompletionResponse"]
    assert isinstance(found[1], ContextOverflow)


def test_the_choice_is_described_and_checked(folder: Path) -> None:
    llm = InvariantLLM(folder, micro_batching=True, batch_size=3, max_tokens=2)
    for copied in (InvariantLLM.from_dict(llm.to_dict()), pickle.loads(pickle.dumps(llm))):
        assert (copied.micro_batching, copied.batch_size) == (True, 3)
        assert copied.complete("x").text == llm.complete("x").text
    assert "rounding" in InvariantLLM.model_fields["micro_batching"].description
    with pytest.raises(ValidationError, match="batch_size"):
        InvariantLLM(batch_size=0)
