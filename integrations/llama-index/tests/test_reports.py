"""What responses of engines, instrumentation and callbacks are told, whoever's synthesizer wrote an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from cases import ORDERS, QUERY, TEXTS, HashingLLM, consumed, engine_of, nodes_of
from invariant_rag import InvariantModel, Segment
from invariant_rag.errors import ContextOverflow
from llama_index.core import Settings, get_response_synthesizer
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms import ChatMessage
from llama_index.core.postprocessor.rankGPT_rerank import RankGPTRerank
from pydantic import BaseModel, Field

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock, canonical, vote
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

pytestmark = pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")

HASHES = {Segment(text).content_hash for text in TEXTS}
WAYS = ("query", "aquery", "stream", "astream")


async def response_of(llm: Any, way: str, nodes: Any = None, **options: Any) -> Any:
    """Return a response, of a stream once it is read."""
    engine = engine_of(nodes_of() if nodes is None else nodes, llm=llm, streaming="stream" in way, **options)
    return (await consumed(engine.aquery(QUERY) if way.startswith("a") else engine.query(QUERY)))[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["compact", "tree_summarize"])
@pytest.mark.parametrize("wrapper", ["InvariantLLM", "canonical", "vote"])
async def test_a_query_engine_of_llamaindex_tells_what_was_read(
    model: InvariantModel, wrapper: str, mode: str, way: str
) -> None:
    llms = {"canonical": canonical(HashingLLM()), "vote": vote(HashingLLM())}
    llm = llms.get(wrapper) or InvariantLLM(model, max_tokens=4)
    found = [await response_of(llm, way, nodes_of(order), response_mode=mode) for order in (ORDERS[0], ORDERS[-1])]
    assert {"node 0", "node 1", "node 2", "invariant_rag"} == set(found[0].metadata)
    first, last = (each.metadata["invariant_rag"] for each in found)
    assert first == last
    assert (first["sets"], first["invariant"], set(first["order"])) == ([3], True, HASHES)


@pytest.mark.parametrize("way", WAYS)
async def test_several_calls_are_one_report_that_is_invariant_only_if_all_are(llm: InvariantLLM, way: str) -> None:
    report = (await response_of(llm, way, response_mode="refine")).metadata["invariant_rag"]
    assert (report["sets"], report["invariant"], set(report["order"])) == ([], False, set())
    assert report["usage"]["completion_tokens"] == 24
    reranked = await response_of(llm, way, node_postprocessors=[RankGPTRerank(llm=llm, top_n=3)])
    report = reranked.metadata["invariant_rag"]  # of what wrote the answer; but what chose the nodes may change it
    assert (report["sets"], report["invariant"], report["usage"]["completion_tokens"]) == ([3], False, 8)


@pytest.mark.parametrize("way", ["query", "aquery"])
async def test_a_response_without_a_call_says_that_nothing_was_read(llm: InvariantLLM, way: str) -> None:
    Settings.llm = llm  # LlamaIndex gives a synthesizer without text no other
    for options in ({"nodes": []}, {"response_mode": "no_text"}):
        report = (await response_of(llm, way, **options)).metadata["invariant_rag"]
        assert (report["sets"], report["invariant"]) == ([], None)
    assert set((await response_of(HashingLLM(), way)).metadata) == {"node 0", "node 1", "node 2"}
    assert llm.complete(QUERY).raw["invariant"] is None
    by_hand = get_response_synthesizer(llm=llm).synthesize(QUERY, nodes_of((0,)))
    assert by_hand.metadata["invariant_rag"]["sets"] == [1]


class Word(BaseModel):
    word: str = Field(max_length=8)


@pytest.mark.parametrize("way", ["query", "aquery"])
async def test_an_object_reports_too(model: InvariantModel, way: str) -> None:
    structured = InvariantLLM(model, max_tokens=100).as_structured_llm(Word)
    report = (await response_of(structured, way)).metadata["invariant_rag"]
    assert (report["sets"], report["invariant"]) == ([3], True)


async def test_concurrent_queries_do_not_report_for_one_another(llm: InvariantLLM) -> None:
    orders = [(0,), (0, 1), (0, 1, 2)]
    found = await asyncio.gather(*(engine_of(nodes_of(order), llm=llm).aquery(QUERY) for order in orders))
    assert [each.metadata["invariant_rag"]["sets"] for each in found] == [[1], [2], [3]]


# --- events ---


class Events(BaseEventHandler):
    """Remembers every event."""

    events: list[BaseEvent] = []  # noqa: RUF012 - a pydantic field: every handler has its own

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)

    @property
    def names(self) -> list[str]:
        """Names of the events, those of progress once."""
        names = [event.class_name().removesuffix("Event") for event in self.events]
        return [name for i, name in enumerate(names) if not (name.endswith("InProgress") and names[i - 1] == name)]


@pytest.fixture
def told() -> Iterator[Events]:
    handler, root = Events(), get_dispatcher("root")
    before = list(root.event_handlers)
    root.event_handlers = [*before, handler]
    yield handler
    root.event_handlers = before


@pytest.mark.parametrize("kind", ["Completion", "Chat"])
@pytest.mark.parametrize("way", ["", "a", "stream_", "astream_"])
async def test_a_call_starts_progresses_and_ends(llm: InvariantLLM, told: Events, way: str, kind: str) -> None:
    messages = [ChatMessage(blocks=[SegmentBlock.of("one"), *ChatMessage(QUERY).blocks])]
    call = getattr(llm, way + ("chat" if kind == "Chat" else "complete"))
    _, response = await consumed(call(messages if kind == "Chat" else QUERY))
    progress = [f"LLM{kind}InProgress"] if "stream" in way else []
    assert told.names == [f"LLM{kind}Start", *progress, f"LLM{kind}End"]
    start, *_, end = told.events
    assert end.response == response
    assert start.model_dict["method"] == "rotor"
    assert start.model_dump(mode="json")
    assert start.span_id == end.span_id is not None


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("way", ["query", "aquery"])
async def test_a_query_tells_its_steps_in_order(llm: InvariantLLM, told: Events, way: str, streaming: bool) -> None:
    engine = engine_of(nodes_of(), response_synthesizer=InvariantSynthesizer(llm, streaming=streaming))
    await consumed(getattr(engine, way)(QUERY))
    begun = ["QueryStart", "RetrievalStart", "RetrievalEnd", "SynthesizeStart", "GetResponseStart", "LLMPredictStart"]
    ended = ["GetResponseEnd", "SynthesizeEnd", "QueryEnd"]
    if streaming:
        assert told.names == [*begun, "LLMChatStart", *ended, "LLMChatInProgress", "LLMChatEnd"]
    else:
        assert told.names == [*begun, "LLMChatStart", "LLMChatEnd", "LLMPredictEnd", *ended]
    [start] = [event for event in told.events if event.class_name() == "LLMChatStartEvent"]
    assert "\n\n".join(TEXTS) in start.messages[-1].content, "events show segments as text"


def test_callbacks_see_one_call_per_query_its_tokens_and_its_failure(llm: InvariantLLM) -> None:
    debug, counter = LlamaDebugHandler(print_trace_on_end=False), TokenCountingHandler()
    manager = CallbackManager([debug, counter])
    synthesizer = InvariantSynthesizer(llm.model_copy(), callback_manager=manager)
    engine_of(nodes_of(), response_synthesizer=synthesizer, callback_manager=manager).query(QUERY)
    [(_, end)] = debug.get_event_pairs(CBEventType.LLM)
    usage = end.payload["response"].raw["usage"]
    assert counter.completion_llm_token_count == usage["completion_tokens"] == 8
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert [len(debug.get_event_pairs(kind)) for kind in (CBEventType.QUERY, CBEventType.SYNTHESIZE)] == [1, 1]
    with pytest.raises(ContextOverflow):
        llm.model_copy(update={"callback_manager": manager}).complete("x" * 5000)
    assert isinstance(debug.get_event_pairs(CBEventType.LLM)[-1][1].payload["exception"], ContextOverflow)
