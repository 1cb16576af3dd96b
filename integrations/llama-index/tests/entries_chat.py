"""Entries: chat engines, agents and workflows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from cases import QUERY, ListRetriever, engine_of, index_of
from entry import GLOBAL, MORE, Ask, Nodes, invariant, warns
from llama_index.core import get_response_synthesizer
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.llms import ChatMessage, ChatResponse, MessageRole
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.schema import MetadataMode, NodeWithScore
from llama_index.core.tools import QueryEngineTool, RetrieverTool
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step

from llama_index.chat_engine.invariant_rag import InvariantChatEngine
from llama_index.llms.invariant_rag import InvariantLLM, canonical
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

AGAIN = "And then?"


def chat(engine: Any) -> str:
    """Say two things."""
    return f"{engine.chat(QUERY)} | {engine.chat(AGAIN)}"


def stream_chat(engine: Any) -> str:
    return " | ".join("".join(engine.stream_chat(said).response_gen) for said in (QUERY, AGAIN))


def achat(engine: Any) -> str:
    async def ask() -> str:
        return f"{await engine.achat(QUERY)} | {await engine.achat(AGAIN)}"

    return asyncio.run(ask())


# --- workflows ---


class Retrieved(Event):
    """What the first step of a workflow found."""

    nodes: list[NodeWithScore]


class _Retrieving(Workflow):
    @step
    async def retrieve(self, ctx: Context, ev: StartEvent) -> Retrieved:
        return Retrieved(nodes=await ListRetriever(ev.get("listed")).aretrieve(QUERY))


class SynthesizingWorkflow(_Retrieving):
    """The RAG workflow of LlamaIndex's documentation."""

    @step
    async def synthesize(self, ctx: Context, ev: Retrieved) -> StopEvent:
        response = await get_response_synthesizer().asynthesize(QUERY, nodes=ev.nodes)
        return StopEvent(result=str(response))


class FormattingWorkflow(_Retrieving):
    """One whose second step writes the prompt itself."""

    def __init__(self, llm: Any) -> None:
        super().__init__(timeout=60)
        self._asked = llm

    @step
    async def answer(self, ctx: Context, ev: Retrieved) -> StopEvent:
        context = "\n\n".join(each.get_content(MetadataMode.LLM) for each in ev.nodes)
        response = await self._asked.acomplete(f"Context:\n{context}\n\nQuestion: {QUERY}\nAnswer:")
        return StopEvent(result=response.text)


def run_workflow(workflow: Workflow, nodes: Nodes) -> str:
    async def run() -> str:
        return str(await workflow.run(listed=nodes))

    return asyncio.run(run())


# --- agents ---


def calling(messages: Sequence[ChatMessage], **kwargs: Any) -> ChatMessage:
    """Call the tool, and repeat what it said."""
    if messages[-1].role == MessageRole.TOOL:
        return ChatMessage(role="assistant", content=messages[-1].content)
    call = ToolCallBlock(tool_call_id="1", tool_name="harbour", tool_kwargs={"input": QUERY})
    return ChatMessage(role="assistant", blocks=[call])


class SearchingLLM(InvariantLLM):
    """A model that has learnt one thing: to search before it answers, as a ReAct agent does."""

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        if "Observation:" in (messages[-1].content or ""):
            return await super().achat(messages, **kwargs)
        said = f"Thought: I search.\nAction: harbour\nAction Input: {json.dumps({'input': QUERY})}"
        return ChatResponse(message=ChatMessage(said, role="assistant"))


def agent_tool(nodes: Nodes, **options: Any) -> str:
    """Let an agent ask a query engine; the answer is what its tool said."""
    tool = QueryEngineTool.from_defaults(engine_of(nodes, **options), name="harbour", description="Knows boats.")

    async def run() -> str:
        handler = FunctionAgent(tools=[tool], llm=MockFunctionCallingLLM(response_generator=calling)).run(QUERY)
        (found,) = [
            each.tool_output.content async for each in handler.stream_events() if isinstance(each, ToolCallResult)
        ]
        await handler
        return str(found)

    return asyncio.run(run())


def react(llm: InvariantLLM, nodes: Nodes, **options: Any) -> str:
    """Let an agent search; its own model reads what was found."""
    tool = RetrieverTool.from_defaults(ListRetriever(nodes), name="harbour", description="Knows boats.", **options)

    async def run() -> str:
        agent = ReActAgent(
            tools=[tool],
            llm=SearchingLLM(llm.lm, max_tokens=8, generation_kwargs=llm.generation_kwargs),
            streaming=False,
        )
        agent.formatter.system_header = "Tools:\n{tool_desc}\n{tool_names}"
        return str(await agent.run(QUERY))

    return asyncio.run(run())


def remembered(llm: Any, nodes: Nodes, **options: Any) -> str:
    """Let an agent search, and ask about its memory in a call of its own."""
    memory = ChatMemoryBuffer.from_defaults()
    tool = RetrieverTool.from_defaults(ListRetriever(nodes), name="harbour", description="Knows boats.", **options)

    async def run() -> None:
        searching = canonical(MockFunctionCallingLLM(response_generator=calling))
        await FunctionAgent(tools=[tool], llm=searching, streaming=False).run(QUERY, memory=memory)

    asyncio.run(run())
    return str(llm.chat([*memory.get_all()[:-1], ChatMessage(AGAIN)]).message.content)


def spoken_to(way: Any, mode: str, **options: Any) -> Ask:
    return lambda _, nodes: way(index_of(nodes).as_chat_engine(chat_mode=mode, **options))


def by_ours(way: Any) -> Ask:
    return lambda llm, nodes: way(
        InvariantChatEngine.from_defaults(ListRetriever(nodes), llm=llm, system_prompt="Be brief.")
    )


def built(kind: Any, **options: Any) -> Ask:
    return lambda _, nodes: chat(kind.from_defaults(ListRetriever(nodes), **options))


MARKED = {"node_postprocessors": [SegmentMarkerPostprocessor()]}
CHAT_MODES = ("best", "context", "condense_question", "condense_plus_context")
RETRIEVER_TOOL = "`RetrieverTool(..., node_postprocessors=[SegmentMarkerPostprocessor()])`"
ENTRIES = [
    *invariant("`index.as_chat_engine(chat_mode=...)`", GLOBAL, {
        **{f'`"{mode}"`': spoken_to(chat, mode) for mode in CHAT_MODES},
        '`"context"`, `stream_chat`': spoken_to(stream_chat, "context"),
        '`"context"`, `achat`': spoken_to(achat, "context"),
        '`"condense_plus_context"`, `stream_chat`': spoken_to(stream_chat, "condense_plus_context"),
        "`ContextChatEngine.from_defaults`": built(ContextChatEngine),
        '`"context"` with a `response_synthesizer`, which LlamaIndex ignores': lambda llm, nodes: spoken_to(
            chat, "context", response_synthesizer=InvariantSynthesizer(llm)
        )(llm, nodes),
        '`"simple"`, which reads no node': spoken_to(chat, "simple"),
    }),
    *invariant("chat engines with the parts of this package", MORE, {
        "`InvariantChatEngine`": by_ours(chat),
        "`InvariantChatEngine`, `stream_chat`": by_ours(stream_chat),
        "`InvariantChatEngine`, `achat`": by_ours(achat),
        '`"condense_question"` with `InvariantSynthesizer`': lambda llm, nodes: spoken_to(
            chat, "condense_question", response_synthesizer=InvariantSynthesizer(llm)
        )(llm, nodes),
        "`ContextChatEngine` with `SegmentMarkerPostprocessor`": built(ContextChatEngine, **MARKED),
        "`CondensePlusContextChatEngine` with `SegmentMarkerPostprocessor`": built(
            CondensePlusContextChatEngine, **MARKED
        ),
    }),
    *invariant("workflows", GLOBAL, {
        "the one of LlamaIndex's documentation: retrieve, synthesize": lambda _, nodes: run_workflow(
            SynthesizingWorkflow(timeout=60), nodes
        ),
    }),
    *warns("workflows", "fill in a template: `llm.apredict(template, context_str=...)`", {
        "a step that joins the nodes and calls `llm.acomplete`": lambda llm, nodes: run_workflow(
            FormattingWorkflow(llm), nodes
        ),
    }),
    *invariant("agents", GLOBAL, {
        "`FunctionAgent` with a `QueryEngineTool`": lambda _, nodes: agent_tool(nodes),
        "a later call with the memory of a `FunctionAgent` with a `RetrieverTool`": remembered,
    }),
    *warns("agents", RETRIEVER_TOOL, {"`ReActAgent` of an `InvariantLLM` with a `RetrieverTool`": react}),
    *invariant("agents with the parts of this package", MORE, {
        "`FunctionAgent` with a `QueryEngineTool` over `InvariantSynthesizer`": lambda llm, nodes: agent_tool(
            nodes, response_synthesizer=InvariantSynthesizer(llm)
        ),
        "a later call with what a `RetrieverTool` with `SegmentMarkerPostprocessor` found": lambda llm, nodes: (
            remembered(llm, nodes, **MARKED)
        ),
        "`ReActAgent` with a `RetrieverTool` and `SegmentMarkerPostprocessor`": lambda llm, nodes: react(
            llm, nodes, **MARKED
        ),
    }),
]  # fmt: skip
