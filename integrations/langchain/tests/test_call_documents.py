"""The `documents=` keyword: read once, also by calls that are made several times, and the same set in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import InvalidSegment
from langchain_core.language_models import LLM, SimpleChatModel
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.runnables import Runnable
from pydantic import Field

from langchain_invariant_rag import ChatInvariant, InvariantLLM, canonical, vote
from langchain_invariant_rag.errors import UnknownParameter

from .shared import DOCUMENTS, ORDERS, QUESTION


class Echo(SimpleChatModel):
    """Says what it was asked."""

    @property
    def _llm_type(self) -> str:
        return "echo"

    def _call(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> str:
        return " ".join(message.text for message in messages)


class Forgetful(Echo):
    """Says what it was asked, but fails every second time."""

    asked: list[str] = Field(default_factory=list)

    def _call(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> str:
        said = super()._call(messages)
        self.asked.append(said)
        if len(self.asked) % 2:
            raise ConnectionError("try again")
        return said


class EchoText(LLM):
    """Writes what it was asked."""

    @property
    def _llm_type(self) -> str:
        return "echo"

    def _call(self, prompt: str, *args: Any, **kwargs: Any) -> str:
        return prompt


MODELS: dict[str, Any] = {
    "ChatInvariant": lambda lm: ChatInvariant(model=lm, max_tokens=6),
    "InvariantLLM": lambda lm: InvariantLLM(model=lm, max_tokens=6),
    "canonical chat model": lambda lm: canonical(Echo()),
    "voting chat model": lambda lm: vote(Echo(), votes=2),
    "canonical runnable": lambda lm: canonical(EchoText()),
    "voting runnable": lambda lm: vote(EchoText(), votes=2),
}


@pytest.fixture(params=MODELS)
def model(request: Any, lm: InvariantModel) -> Any:
    return MODELS[request.param](lm)


def said(answer: Any) -> str:
    return getattr(answer, "content", answer)


def once() -> Iterator[Any]:
    """The documents as a generator."""
    return (document for document in DOCUMENTS)


def test_a_generator_serves_all_prompts_of_a_batch(model: Any) -> None:
    prompts = [QUESTION, "Who?", QUESTION]
    expected = [said(model.invoke(prompt, documents=DOCUMENTS)) for prompt in prompts]
    assert expected != [said(model.invoke(prompt)) for prompt in prompts], "the documents make a difference"
    config = {"max_concurrency": 1} if isinstance(model, InvariantLLM) else {}  # one prompt at a time, else all in one
    assert [said(each) for each in model.batch(prompts, config, documents=once())] == expected
    assert [said(each) for each in asyncio.run(model.abatch(prompts, config, documents=once()))] == expected
    found = dict(model.batch_as_completed(prompts, config, documents=once()))
    assert [said(found[place]) for place in range(3)] == expected

    async def completed() -> dict[int, Any]:
        return {place: each async for place, each in model.abatch_as_completed(prompts, config, documents=once())}

    found = asyncio.run(completed())
    assert [said(found[place]) for place in range(3)] == expected


def test_a_generator_serves_every_call_that_it_is_bound_to(model: Any) -> None:
    expected = said(model.invoke(QUESTION, documents=DOCUMENTS))
    bound = model.bind(documents=once())
    assert [said(bound.invoke(QUESTION)) for _ in range(3)] == [expected] * 3
    assert "".join(said(each) for each in bound.stream(QUESTION)) == expected


def test_a_generator_serves_every_entry(model: Any) -> None:
    expected = said(model.invoke(QUESTION, documents=DOCUMENTS))

    async def streamed() -> str:
        return "".join([said(each) async for each in model.astream(QUESTION, documents=once())])

    assert said(model.invoke(QUESTION, documents=once())) == expected
    assert said(asyncio.run(model.ainvoke(QUESTION, documents=once()))) == expected
    assert "".join(said(each) for each in model.stream(QUESTION, documents=once())) == expected
    assert asyncio.run(streamed()) == expected


def test_all_prompts_of_one_generation_get_the_documents(lm: InvariantModel) -> None:
    chat = ChatInvariant(model=lm, max_tokens=6)
    expected = said(chat.invoke(QUESTION, documents=DOCUMENTS))
    for result in (
        chat.generate([[HumanMessage(QUESTION)]] * 2, documents=once()),
        asyncio.run(chat.agenerate([[HumanMessage(QUESTION)]] * 2, documents=once())),
    ):
        assert [each[0].text for each in result.generations] == [expected] * 2


def test_a_retry_gets_the_same_documents() -> None:
    expected = said(canonical(Echo()).invoke(QUESTION, documents=DOCUMENTS))
    for wrapped in (canonical(Forgetful()), canonical(Forgetful()).bind(stop=["never"])):
        again: Runnable[Any, Any] = wrapped.with_retry(wait_exponential_jitter=False, stop_after_attempt=2)
        assert said(again.invoke(QUESTION, documents=once())) == expected
        assert said(asyncio.run(again.ainvoke(QUESTION, documents=once()))) == expected


def test_a_fallback_gets_the_same_documents(lm: InvariantModel) -> None:
    full = ChatInvariant(model=lm, max_tokens=6).with_fallbacks([canonical(Echo())])
    long = [*DOCUMENTS, "long " * 2000]
    assert "The ferry to Ostra" in said(full.invoke(QUESTION, documents=(each for each in long)))


def test_a_generator_that_was_read_before_is_an_error(model: Any) -> None:
    documents = once()
    model.invoke(QUESTION, documents=documents)
    with pytest.raises(InvalidSegment, match="nothing left to read"):
        model.invoke(QUESTION, documents=documents)
    assert model.invoke(QUESTION, documents=[])


def test_the_cache_knows_documents_of_a_call_in_any_order(lm: InvariantModel, llm_cache: Any) -> None:
    for size, chat in ((1, ChatInvariant(model=lm, max_tokens=4)), (2, canonical(Echo()))):
        for order in ORDERS:
            chat.invoke(QUESTION, documents=order)
            chat.bind(documents=order).invoke(QUESTION)
            chat.invoke(QUESTION, documents=iter(order))
        assert len(llm_cache._cache) == size
    chat.invoke(QUESTION, documents=DOCUMENTS[:2])
    assert len(llm_cache._cache) == 3


def test_the_order_of_documents_stays_where_it_means_something(lm: InvariantModel) -> None:
    plain = ChatInvariant(model=lm, method="sequential", max_tokens=2)
    orders = {tuple(plain.invoke(QUESTION, documents=order).response_metadata["order"]) for order in ORDERS}
    assert len(orders) == len(ORDERS)
    orders = {
        tuple(plain.with_retry().invoke(QUESTION, documents=iter(order)).response_metadata["order"]) for order in ORDERS
    }
    assert len(orders) == len(ORDERS)


@pytest.mark.parametrize("keyword", ["docs", "document", "dokuments"])
@pytest.mark.parametrize(
    "made", [lambda lm: ChatInvariant(model=lm), lambda lm: InvariantLLM(model=lm), lambda lm: canonical(Echo())]
)
def test_a_keyword_that_looks_like_documents_is_refused_with_what_is_meant(
    made: Any, keyword: str, lm: InvariantModel
) -> None:
    llm = made(lm)
    for call in (llm.invoke, lambda question, **given: llm.bind(**given).invoke(question)):
        with pytest.raises(UnknownParameter, match=f"no parameter '{keyword}'; did you mean 'documents'"):
            call(QUESTION, **{keyword: DOCUMENTS})
