"""Documents that were read before are not read again, in whatever order they come, and the usage says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.generation.kv_cache import KeyValueCache

from langchain_invariant_rag import ChatInvariant

from .shared import ORDERS, QUESTION
from .tool_models import joined

Case = tuple[Callable[[InvariantModel], dict[str, Any]], Callable[[Any], Any]]
CASES: dict[str, Case] = {
    "the model's own, invoked": (
        lambda lm: {"model": lm.with_cache(KeyValueCache())}, lambda model: model.invoke(QUESTION),
    ),
    "given, awaited": (
        lambda lm: {"model": lm, "key_value_cache": KeyValueCache()},
        lambda model: asyncio.run(model.ainvoke(QUESTION)),
    ),
    "given with a method, in a batch": (
        lambda lm: {"model": lm, "method": "pine", "key_value_cache": KeyValueCache()},
        lambda model: model.batch([QUESTION])[0],
    ),
    "given to a routed model, streamed": (
        lambda lm: {
            "model": lm.with_routing(-2.0, plain_order="canonical"), "key_value_cache": KeyValueCache(),
        },
        lambda model: joined(list(model.stream(QUESTION))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_chat_model_reports_documents_that_it_read_before(lm: InvariantModel, name: str) -> None:
    make, ask = CASES[name]
    given = make(lm)
    chat = ChatInvariant(**given, max_tokens=6, sort_segments=False)
    plain = ChatInvariant(**{**given, "model": lm, "key_value_cache": None}, max_tokens=6)
    cold = plain.invoke(QUESTION, documents=ORDERS[0])
    answers = [ask(chat.bind(documents=documents)) for documents in ORDERS[::2]]
    assert {each.content for each in answers} == {cold.content}
    assert {each.usage_metadata["input_tokens"] for each in answers} == {cold.usage_metadata["input_tokens"]}
    first, *others = [each.usage_metadata["input_token_details"]["cache_read"] for each in answers]
    assert first == cold.usage_metadata["input_token_details"]["cache_read"] == 0
    question = 1 + len(f"\n\n{QUESTION}")
    suffix = cold.usage_metadata["input_tokens"] - others[0]
    assert question <= suffix < 2 * question, "all but the text behind the documents"
    assert set(others) == {others[0]}


def test_it_is_no_part_of_the_cache_key(lm: InvariantModel, llm_cache: Any) -> None:
    for options in ({"key_value_cache": None}, {"key_value_cache": KeyValueCache()}):
        chat = ChatInvariant(model=lm, **options, max_tokens=2)
        chat.invoke(QUESTION)
        assert len(llm_cache._cache) == 1
        assert "key_value_cache" not in chat.model_dump()
