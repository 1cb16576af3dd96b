"""Nodes that were read before are not read again, in whatever order they come, and the response says so."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from cases import ORDERS, QUERY, TEXTS, nodes_of
from invariant_rag import InvariantModel
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.prompts import mark
from llama_index.core.llms import ChatMessage, TextBlock

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

EIGHT = [f"{prefix}{name}" for name in ("complete", "chat") for prefix in ("", "stream_", "a", "astream_")]


async def last_response(llm: InvariantLLM, name: str, order: tuple[int, ...]) -> Any:
    """What one of the eight methods says of a question over the texts in this order."""
    texts = [TEXTS[i] for i in order]
    messages = [ChatMessage(blocks=[*map(SegmentBlock.of, texts), TextBlock(text=QUERY)])]
    response = getattr(llm, name)(messages if name.endswith("chat") else f"Read:{''.join(map(mark, texts))}{QUERY}")
    if inspect.iscoroutine(response):
        response = await response
    if inspect.isasyncgen(response):
        return [each async for each in response][-1]
    return list(response)[-1] if inspect.isgenerator(response) else response


@pytest.mark.parametrize("whose", ["model", "llm"])
@pytest.mark.parametrize("name", EIGHT)
async def test_a_response_tells_of_segments_that_were_read_before(
    model: InvariantModel, llm: InvariantLLM, name: str, whose: str
) -> None:
    cache = KeyValueCache()
    cached = (
        InvariantLLM(model.with_cache(cache), max_tokens=8)
        if whose == "model"
        else InvariantLLM(model, key_value_cache=cache, max_tokens=8)
    )
    cold = await last_response(llm, name, ORDERS[0])
    responses = [await last_response(cached, name, order) for order in ORDERS]
    said = [each.raw["usage"] for each in responses]
    assert said == [each.additional_kwargs for each in responses]
    assert said[0] == cold.raw["usage"]
    assert said[0]["cached_tokens"] == 0
    behind = {each["prompt_tokens"] - each["cached_tokens"] for each in said[1:]}
    if name.endswith("chat"):
        assert len(behind) == 1
        assert len(QUERY) < behind.pop() < len(QUERY) + 40  # and what the chat template puts behind it
    else:
        assert behind == {len(QUERY)}
    assert {str(each) for each in responses} == {str(cold)}


def test_the_synthesizer_reads_nodes_once(model: InvariantModel, llm: InvariantLLM) -> None:
    cache = KeyValueCache()
    synthesizer = InvariantSynthesizer(InvariantLLM(model, key_value_cache=cache, max_tokens=8))
    answers = {str(synthesizer.synthesize(QUERY, nodes_of(order))) for order in ORDERS}
    assert answers == {str(InvariantSynthesizer(llm).synthesize(QUERY, nodes_of()))}
    assert (cache.stats().misses, cache.stats().hits) == (1, len(ORDERS) - 1)


def test_copies_in_the_process_share_it_and_others_do_without(folder: Path) -> None:
    cache = KeyValueCache()
    llm = InvariantLLM(folder, key_value_cache=cache, max_tokens=4)
    assert llm.lm.cache is copy.deepcopy(llm).lm.cache is llm.model_copy().lm.cache is cache
    for other in (InvariantLLM.from_dict(llm.to_dict()), pickle.loads(pickle.dumps(llm))):
        assert other.lm.cache is None
        assert other.to_dict() == llm.to_dict() == InvariantLLM(folder, max_tokens=4).to_dict()
    with pytest.raises(UnsupportedCombination, match="key_value_cache"):
        llm.model_copy(update={"key_value_cache": KeyValueCache()})
