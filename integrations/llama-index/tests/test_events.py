"""What instrumentation and callbacks are told, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cases import QUERY, TEXTS, ListRetriever, nodes_of
from invariant_rag.errors import ContextOverflow
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.llms import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer


class Recorder(BaseEventHandler):
    """Remembers every event."""

    events: list[BaseEvent] = []  # noqa: RUF012 - a pydantic field: every recorder has its own

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)

    @property
    def names(self) -> list[str]:
        """Names of the events, those of progress once."""
        names = [event.class_name().removesuffix("Event") for event in self.events]
        return [name for i, name in enumerate(names) if not (name.endswith("InProgress") and names[i - 1] == name)]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    handler, root = Recorder(), get_dispatcher("root")
    before = list(root.event_handlers)
    root.event_handlers = [*before, handler]
    yield handler
    root.event_handlers = before


MESSAGES = [ChatMessage(blocks=[SegmentBlock.of("one"), *ChatMessage(QUERY).blocks])]


@pytest.mark.parametrize("kind", ["Completion", "Chat"])
@pytest.mark.parametrize("way", ["", "a"])
async def test_a_call_starts_and_ends(llm: InvariantLLM, recorder: Recorder, way: str, kind: str) -> None:
    response = getattr(llm, way + ("chat" if kind == "Chat" else "complete"))(MESSAGES if kind == "Chat" else QUERY)
    response = await response if way else response
    assert recorder.names == [f"LLM{kind}Start", f"LLM{kind}End"]
    start, end = recorder.events
    assert end.response == response
    assert start.model_dict["method"] == "rotor"
    assert start.span_id == end.span_id is not None


@pytest.mark.parametrize("kind", ["Completion", "Chat"])
@pytest.mark.parametrize("way", ["stream_", "astream_"])
async def test_a_stream_starts_progresses_and_ends(llm: InvariantLLM, recorder: Recorder, way: str, kind: str) -> None:
    stream = getattr(llm, way + ("chat" if kind == "Chat" else "complete"))(MESSAGES if kind == "Chat" else QUERY)
    responses = [each async for each in await stream] if way == "astream_" else list(stream)
    assert recorder.names == [f"LLM{kind}Start", f"LLM{kind}InProgress", f"LLM{kind}End"]
    assert [event.response for event in recorder.events[1:-1]] == responses
    assert recorder.events[-1].response == responses[-1]


def test_events_show_the_segments_as_text(llm: InvariantLLM, recorder: Recorder) -> None:
    InvariantSynthesizer(llm).synthesize(QUERY, nodes_of())
    [start] = [event for event in recorder.events if event.class_name() == "LLMChatStartEvent"]
    assert "\n\n".join(TEXTS) in start.messages[-1].content
    assert start.model_dump(mode="json")["messages"]


@pytest.mark.parametrize("way", ["query", "aquery"])
async def test_a_query_tells_its_steps_in_order(llm: InvariantLLM, recorder: Recorder, way: str) -> None:
    engine = RetrieverQueryEngine(ListRetriever(nodes_of()), InvariantSynthesizer(llm))
    response = getattr(engine, way)(QUERY)
    _ = await response if way == "aquery" else response
    assert recorder.names == [
        "QueryStart", "RetrievalStart", "RetrievalEnd", "SynthesizeStart", "GetResponseStart",
        "LLMPredictStart", "LLMChatStart", "LLMChatEnd", "LLMPredictEnd", "GetResponseEnd", "SynthesizeEnd", "QueryEnd",
    ]  # fmt: skip


@pytest.mark.parametrize("way", ["query", "aquery"])
async def test_a_streamed_query_progresses_after_its_end(llm: InvariantLLM, recorder: Recorder, way: str) -> None:
    engine = RetrieverQueryEngine(ListRetriever(nodes_of()), InvariantSynthesizer(llm, streaming=True))
    if way == "aquery":
        _ = [piece async for piece in (await engine.aquery(QUERY)).async_response_gen()]
    else:
        _ = list(engine.query(QUERY).response_gen)
    assert recorder.names == [
        "QueryStart", "RetrievalStart", "RetrievalEnd", "SynthesizeStart", "GetResponseStart", "LLMPredictStart",
        "LLMChatStart", "GetResponseEnd", "SynthesizeEnd", "QueryEnd", "LLMChatInProgress", "LLMChatEnd",
    ]  # fmt: skip


def test_a_failed_call_is_told_as_one(llm: InvariantLLM) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = llm.model_copy(update={"callback_manager": CallbackManager([debug])})
    with pytest.raises(ContextOverflow):
        llm.complete("x" * 5000)
    [(_, end)] = debug.get_event_pairs(CBEventType.LLM)
    assert isinstance(end.payload["exception"], ContextOverflow)


def test_callbacks_see_one_call_per_query_and_its_tokens(llm: InvariantLLM) -> None:
    debug, counter = LlamaDebugHandler(print_trace_on_end=False), TokenCountingHandler()
    manager = CallbackManager([debug, counter])
    synthesizer = InvariantSynthesizer(llm.model_copy(), callback_manager=manager)
    RetrieverQueryEngine(ListRetriever(nodes_of()), synthesizer, callback_manager=manager).query(QUERY)
    [(_, end)] = debug.get_event_pairs(CBEventType.LLM)
    usage = end.payload["response"].raw["usage"]
    assert counter.completion_llm_token_count == usage["completion_tokens"] == 8
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert [len(debug.get_event_pairs(kind)) for kind in (CBEventType.QUERY, CBEventType.SYNTHESIZE)] == [1, 1]
