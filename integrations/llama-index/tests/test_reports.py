"""The ledger is in the metadata of every response of an engine, whoever's synthesizer wrote it."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from cases import ORDERS, QUERY, TEXTS, ListRetriever, nodes_of
from entry import HashingLLM
from invariant_rag import InvariantModel, Segment
from llama_index.core import get_response_synthesizer
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.postprocessor.rankGPT_rerank import RankGPTRerank
from llama_index.core.query_engine import RetrieverQueryEngine

from llama_index.llms.invariant_rag import InvariantLLM, OrderWarning, canonical, vote

HASHES = {Segment(text).content_hash for text in TEXTS}
ENGINES = {"context": ContextChatEngine, "condense_plus_context": CondensePlusContextChatEngine}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OrderWarning)
        yield


def engine_of(llm: Any, order: Any = (0, 1, 2), **options: Any) -> RetrieverQueryEngine:
    return RetrieverQueryEngine.from_args(ListRetriever(nodes_of(order)), llm=llm, **options)


async def response_of(llm: Any, way: str, order: Any = (0, 1, 2), **options: Any) -> Any:
    """Return a response, of a stream once it is read."""
    engine = engine_of(llm, order, streaming="stream" in way, **options)
    if way in {"query", "stream"}:
        response = engine.query(QUERY)
        if way == "stream":
            "".join(response.response_gen)
        return response
    response = await engine.aquery(QUERY)
    if way == "astream":
        [piece async for piece in response.response_gen]
    return response


@pytest.mark.parametrize("way", ["query", "aquery", "stream", "astream"])
@pytest.mark.parametrize("mode", ["compact", "tree_summarize"])
@pytest.mark.parametrize("wrapper", ["InvariantLLM", "canonical", "vote"])
async def test_a_query_engine_of_llamaindex_tells_what_was_read(
    model: InvariantModel, wrapper: str, mode: str, way: str
) -> None:
    llms = {"canonical": canonical(HashingLLM()), "vote": vote(HashingLLM())}
    llm = llms.get(wrapper) or InvariantLLM(model, max_tokens=4)
    found = [await response_of(llm, way, order, response_mode=mode) for order in (ORDERS[0], ORDERS[-1])]
    assert {"node 0", "node 1", "node 2", "invariant_rag"} == set(found[0].metadata)
    first, last = (each.metadata["invariant_rag"] for each in found)
    assert first == last
    assert (first["sets"], first["invariant"], set(first["order"])) == ([3], True, HASHES)


@pytest.mark.parametrize("way", ["query", "stream"])
async def test_several_calls_are_one_report_that_is_invariant_only_if_all_are(llm: InvariantLLM, way: str) -> None:
    report = (await response_of(llm, way, response_mode="refine")).metadata["invariant_rag"]
    assert (report["sets"], report["invariant"], set(report["order"])) == ([], False, set())
    assert report["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("way", ["query", "stream"])
async def test_what_a_reranker_read_is_not_what_the_answer_was_written_from_but_may_change_it(
    llm: InvariantLLM, way: str
) -> None:
    response = await response_of(llm, way, node_postprocessors=[RankGPTRerank(llm=llm, top_n=3)])
    report = response.metadata["invariant_rag"]
    assert (report["sets"], report["invariant"]) == ([3], False)
    assert report["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("way", ["chat", "achat", "stream_chat"])
async def test_a_chat_engine_of_llamaindex_tells_what_was_read(llm: InvariantLLM, kind: str, way: str) -> None:
    response = getattr(ENGINES[kind].from_defaults(ListRetriever(nodes_of()), llm=llm), way)(QUERY)
    if way == "achat":
        response = await response
    elif way == "stream_chat":
        "".join(response.response_gen)
    report = response.metadata["invariant_rag"]
    assert (report["sets"], report["invariant"], set(report["order"])) == ([3], True, HASHES)


def test_what_another_llm_answers_has_no_report() -> None:
    assert set(engine_of(HashingLLM()).query(QUERY).metadata) == {"node 0", "node 1", "node 2"}


async def test_concurrent_queries_do_not_report_for_one_another(llm: InvariantLLM) -> None:
    orders = [(0,), (0, 1), (0, 1, 2)]
    found = await asyncio.gather(*(engine_of(llm, order).aquery(QUERY) for order in orders))
    assert [each.metadata["invariant_rag"]["sets"] for each in found] == [[1], [2], [3]]


def test_synthesizing_by_hand_reports_too(llm: InvariantLLM) -> None:
    response = get_response_synthesizer(llm=llm).synthesize(QUERY, nodes_of())
    assert response.metadata["invariant_rag"]["sets"] == [3]
