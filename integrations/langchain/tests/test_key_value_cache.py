"""Documents that were read before are not read again, in whatever order they come, and the usage says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.generation.kv_cache import KeyValueCache
from langchain_core.messages import AIMessage

from langchain_invariant_rag import ChatInvariant

from .shared import ORDERS, QUESTION

SOME = ORDERS[::2]

Entry = Callable[..., Any]


async def _read(stream: Any) -> list[Any]:
    return [piece async for piece in stream]


ENTRIES: dict[str, Entry] = {
    "invoke": lambda model, *asked: model.invoke(*asked),
    "ainvoke": lambda model, *asked: asyncio.run(model.ainvoke(*asked)),
    "batch": lambda model, *asked: model.batch([asked[0]], *asked[1:])[0],
    "stream": lambda model, *asked: _sum(list(model.stream(*asked))),
    "astream": lambda model, *asked: _sum(asyncio.run(_read(model.astream(*asked)))),
}
BRINGERS: dict[str, Callable[[InvariantModel], dict[str, Any]]] = {
    "the model's own": lambda lm: {"model": lm.with_cache(KeyValueCache())},
    "given": lambda lm: {"model": lm, "key_value_cache": KeyValueCache()},
    "given with a method": lambda lm: {"model": lm, "method": "pine", "key_value_cache": KeyValueCache()},
    "given to a routed model": lambda lm: {
        "model": lm.with_routing(-2.0, plain_order="canonical"),
        "key_value_cache": KeyValueCache(),
    },
}
CASES = [*((name, "invoke") for name in BRINGERS), *(("given", name) for name in ENTRIES if name != "invoke")]


def _sum(pieces: list[Any]) -> Any:
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    return total


@pytest.mark.parametrize(("bringer", "name"), CASES)
def test_a_chat_model_reports_documents_that_it_read_before(lm: InvariantModel, bringer: str, name: str) -> None:
    given = BRINGERS[bringer](lm)
    chat = ChatInvariant(**given, max_tokens=6, sort_segments=False)
    answers: list[AIMessage] = [ENTRIES[name](chat.bind(documents=documents), QUESTION) for documents in SOME]
    plain = ChatInvariant(**{**given, "model": lm, "key_value_cache": None}, max_tokens=6)
    cold = plain.invoke(QUESTION, documents=SOME[0])
    question = 1 + len(f"\n\n{QUESTION}")
    for answer in answers:
        assert answer.content == cold.content
        assert answer.usage_metadata["input_tokens"] == cold.usage_metadata["input_tokens"]
    first, *others = [each.usage_metadata["input_token_details"]["cache_read"] for each in answers]
    assert first == cold.usage_metadata["input_token_details"]["cache_read"] == 0
    suffix = cold.usage_metadata["input_tokens"] - others[0]
    assert question <= suffix < 2 * question, "all but the text behind the documents"
    assert set(others) == {others[0]}


def test_it_is_no_part_of_the_cache_key(lm: InvariantModel, llm_cache: Any) -> None:
    ChatInvariant(model=lm, max_tokens=2).invoke(QUESTION)
    for options in (
        {"model": lm, "key_value_cache": KeyValueCache()},
        {"model": lm.with_cache(KeyValueCache())},
    ):
        chat = ChatInvariant(**options, max_tokens=2)
        chat.invoke(QUESTION)
        assert len(llm_cache._cache) == 1
        assert "key_value_cache" not in chat.model_dump()
