"""Entries: prompts that a user writes around nodes, in one span with the retriever or not; chats, agents, workflows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from cases import QUERY, ListRetriever, engine_of, index_of
from entries_engines import MARKED, MARKER, Found, longer, numbered
from entry import GLOBAL, MORE, Ask, Entry, Nodes, invariant, warns
from llama_index.core import ChatPromptTemplate, PromptTemplate, get_response_synthesizer
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.base.llms.types import CitableBlock, DocumentBlock, TextBlock, ToolCallBlock
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import ChatMessage, ChatResponse, MessageRole
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import RichPromptTemplate
from llama_index.core.schema import MetadataMode, NodeWithScore
from llama_index.core.tools import QueryEngineTool, RetrieverTool
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step

from llama_index.chat_engine.invariant_rag import InvariantChatEngine
from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock, canonical
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

dispatcher = get_dispatcher(__name__)

IN_ONE_SPAN = "retrieve and ask in one function under `@dispatcher.span`, or in one workflow"
DECLARED = "mark the nodes (`SegmentMarkerPostprocessor`), or give `SegmentBlock`s"


def content(node: NodeWithScore) -> str:
    """Return the text of a node; the text between marks if it has marks."""
    return node.get_content(MetadataMode.LLM)


def file_of(node: NodeWithScore) -> str:
    return str(node.node.metadata["file_name"])


def each(write: Callable[[int, NodeWithScore], str], between: str = "\n\n") -> Callable[[Nodes], str]:
    """Return a function that writes one node after the other."""
    return lambda nodes: between.join(write(i, node) for i, node in enumerate(nodes, start=1))


JOINED = each(lambda _, node: content(node))
FORMATS: dict[str, Callable[[Nodes], str]] = {
    'joined with `"\\n\\n"`': JOINED,
    "as bullets": each(lambda _, node: f"- {content(node)}", "\n"),
    "numbered `[1] ...`": each(lambda i, node: f"[{i}] {content(node)}"),
    "as `Document 1:`": each(lambda i, node: f"Document {i}:\n{content(node)}"),
    "as `<document>` with its source": each(
        lambda _, node: f"<document>\n<source>{file_of(node)}</source>\n{content(node)}\n</document>", "\n"
    ),
    "separated by `---`": each(lambda _, node: content(node), "\n---\n"),
    "as a JSON list of texts": lambda nodes: json.dumps([content(node) for node in nodes], ensure_ascii=False),
}


def prompt_of(context: str) -> str:
    return f"Answer from these sources.\n\n{context}\n\nQuestion: {QUERY}\nAnswer:"


def retrieve(nodes: Nodes) -> Nodes:
    """Retrieve nodes whose metadata stays out of the text."""
    for node in nodes:
        node.node.excluded_llm_metadata_keys = ["file_name"]
    return ListRetriever(nodes).retrieve(QUERY)


@dispatcher.span
def in_one_span(llm: Any, nodes: Nodes, ask: Ask) -> str:
    """Retrieve and ask, as one function of an application that is traced."""
    return ask(llm, retrieve(nodes))


def completing(write: Callable[[Nodes], str]) -> Ask:
    return lambda llm, nodes: str(llm.complete(prompt_of(write(nodes))).text)


def chatting(write: Callable[[Nodes], str]) -> Ask:
    return lambda llm, nodes: str(llm.chat([ChatMessage(prompt_of(write(nodes)))]).message.content)


def retrieved(topic: str, asks: dict[str, Ask], sets: set[str]) -> list[Entry]:
    """Return what asks with nodes of the same run: in one span."""
    traced = {name: lambda llm, nodes, ask=ask: in_one_span(llm, nodes, ask) for name, ask in asks.items()}
    return [
        *invariant(topic, IN_ONE_SPAN, {name: ask for name, ask in traced.items() if name in sets}),
        *warns(topic, DECLARED, {name: ask for name, ask in traced.items() if name not in sets}),
    ]


def with_marks(topic: str, asks: dict[str, Ask], counted: set[str]) -> list[Entry]:
    """Return what asks with marked nodes."""
    one = {
        name: lambda llm, nodes, ask=ask: ask(llm, MARKER.postprocess_nodes(retrieve(nodes)))
        for name, ask in asks.items()
    }
    return [
        *invariant(f"{topic}, marked", MORE, {name: ask for name, ask in one.items() if name not in counted}),
        *warns(
            f"{topic}, marked", "leave the numbers away", {name: ask for name, ask in one.items() if name in counted}
        ),
    ]


# --- templates, tools' messages and blocks ---

JINJA = RichPromptTemplate(
    "{% for text in texts %}<source nr={{ loop.index }}>{{ text }}</source>\n{% endfor %}\nQuestion: {{ query }}"
)
CHAT_TEMPLATE = ChatPromptTemplate(
    [ChatMessage("Answer from: {context_str}", role="system"), ChatMessage("{query_str}", role="user")]
)
NUMBERED = PromptTemplate("{context_str}\n{query_str}", function_mappings={"context_str": numbered})
PLAIN = PromptTemplate("Context: {context_str}\nQuestion: {query_str}")


def predicting(template: Any) -> Ask:
    return lambda llm, nodes: str(llm.predict(template, context_str=JOINED(nodes), query_str=QUERY))


def looped(llm: Any, nodes: Nodes) -> str:
    return str(llm.predict(JINJA, texts=[content(node) for node in nodes], query=QUERY))


def structured(llm: Any, nodes: Nodes) -> str:
    context = FORMATS["numbered `[1] ...`"](nodes)
    return str(longer(llm).structured_predict(Found, PLAIN, context_str=context, query_str=QUERY))


def structured_chat(llm: Any, nodes: Nodes) -> str:
    asked = longer(llm).as_structured_llm(Found)
    return str(asked.complete(prompt_of(FORMATS["as bullets"](nodes))).text)


def told(write: Callable[[Nodes], str]) -> Ask:
    """Return what asks with the content of a tool's message."""

    def ask(llm: Any, nodes: Nodes) -> str:
        call = ToolCallBlock(tool_call_id="1", tool_name="search", tool_kwargs={})
        result = ChatMessage(write(nodes), role="tool", additional_kwargs={"tool_call_id": "1"})
        return str(llm.chat([ChatMessage(QUERY), ChatMessage(role="assistant", blocks=[call]), result]).message.content)

    return ask


def blocks(make: Callable[[str], Any], between: str = "") -> Ask:
    """Return what asks with one message: a block for each node, and the question."""

    def ask(llm: Any, nodes: Nodes) -> str:
        found: list[Any] = []
        for node in retrieve(nodes):
            found += [make(content(node)), *([TextBlock(text=between)] if between else [])]
        return str(llm.chat([ChatMessage(blocks=[*found, TextBlock(text=QUERY)])]).message.content)

    return ask


def citable(text: str) -> CitableBlock:
    return CitableBlock(title="", source="harbour", content=[TextBlock(text=text)])


def document(text: str) -> DocumentBlock:
    return DocumentBlock(data=text.encode(), document_mimetype="text/plain", title="")


# --- chats ---


def chat(engine: Any) -> str:
    """Say two things."""
    return " | ".join(str(engine.chat(said)) for said in (QUERY, "And then?"))


def stream_chat(engine: Any) -> str:
    return " | ".join("".join(engine.stream_chat(said).response_gen) for said in (QUERY, "And then?"))


def achat(engine: Any) -> str:
    async def ask() -> str:
        return " | ".join([str(await engine.achat(said)) for said in (QUERY, "And then?")])

    return asyncio.run(ask())


def spoken_to(way: Any, mode: str) -> Ask:
    return lambda _, nodes: way(index_of(nodes).as_chat_engine(chat_mode=mode))


def by_ours(way: Any) -> Ask:
    return lambda llm, nodes: way(
        InvariantChatEngine.from_defaults(ListRetriever(nodes), llm=llm, system_prompt="Be brief.")
    )


def built(kind: Any, **options: Any) -> Ask:
    return lambda _, nodes: chat(kind.from_defaults(ListRetriever(nodes), **options))


# --- workflows and agents ---


class Retrieved(Event):
    """What the first step of a workflow found."""

    nodes: list[NodeWithScore]


class Answering(Workflow):
    """Retrieves in one step, and in the next writes the prompt itself, or does as LlamaIndex's documentation."""

    def __init__(self, llm: Any = None) -> None:
        super().__init__(timeout=60)
        self._asked = llm

    @step
    async def retrieve(self, ctx: Context, ev: StartEvent) -> Retrieved:
        return Retrieved(nodes=await ListRetriever(ev.get("listed")).aretrieve(QUERY))

    @step
    async def answer(self, ctx: Context, ev: Retrieved) -> StopEvent:
        if self._asked is None:
            return StopEvent(result=str(await get_response_synthesizer().asynthesize(QUERY, nodes=ev.nodes)))
        return StopEvent(result=(await self._asked.acomplete(prompt_of(JOINED(ev.nodes)))).text)


def run_workflow(workflow: Workflow, nodes: Nodes) -> str:
    async def run() -> str:
        return str(await workflow.run(listed=nodes))

    return asyncio.run(run())


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
        events = [event async for event in handler.stream_events()]
        await handler
        (found,) = [event.tool_output.content for event in events if isinstance(event, ToolCallResult)]
        return str(found)

    return asyncio.run(run())


def searching(nodes: Nodes, **options: Any) -> RetrieverTool:
    return RetrieverTool.from_defaults(ListRetriever(nodes), name="harbour", description="Knows boats.", **options)


def react(llm: InvariantLLM, nodes: Nodes, **options: Any) -> str:
    """Let an agent search; its own model reads what was found."""
    own = SearchingLLM(llm.lm, max_tokens=8, generation_kwargs=llm.generation_kwargs)

    async def run() -> str:
        agent = ReActAgent(tools=[searching(nodes, **options)], llm=own, streaming=False)
        agent.formatter.system_header = "Tools:\n{tool_desc}\n{tool_names}"
        return str(await agent.run(QUERY))

    return asyncio.run(run())


def remembered(llm: Any, nodes: Nodes, **options: Any) -> str:
    """Let an agent search, and ask about its memory in a call of its own."""
    memory = ChatMemoryBuffer.from_defaults()

    async def run() -> None:
        asking = canonical(MockFunctionCallingLLM(response_generator=calling))
        await FunctionAgent(tools=[searching(nodes, **options)], llm=asking, streaming=False).run(QUERY, memory=memory)

    asyncio.run(run())
    return str(llm.chat([*memory.get_all()[:-1], ChatMessage("And then?")]).message.content)


BLOCKS = {
    "`SegmentBlock`s": blocks(SegmentBlock.of),
    "`CitableBlock`s": blocks(citable),
    "`DocumentBlock`s of plain text": blocks(document),
    "`SegmentBlock`s with `---` between them": blocks(SegmentBlock.of, "\n---\n"),
}
PROMPTS = {
    '`llm.chat`, joined with `"\\n\\n"`': chatting(JOINED),
    "`RichPromptTemplate` with a Jinja loop": looped,
    "`PromptTemplate`": predicting(PLAIN),
    "`PromptTemplate` with a function that numbers": predicting(NUMBERED),
    "`ChatPromptTemplate`": predicting(CHAT_TEMPLATE),
    "`structured_predict`, numbered": structured,
    "`as_structured_llm`, bullets": structured_chat,
}
COMPLETED = {name: completing(write) for name, write in FORMATS.items()}
TOLD = {name: told(write) for name, write in FORMATS.items()}
APART = {
    "`llm.complete`, joined": completing(JOINED),
    "`llm.chat`, joined": chatting(JOINED),
    "`llm.predict`": predicting(PLAIN),
    "`as_structured_llm`, bullets": structured_chat,
}
COUNTED = {"numbered `[1] ...`", "as `Document 1:`"}
CHAT_MODES = ("best", "context", "condense_question", "condense_plus_context")
RETRIEVER_TOOL = "`RetrieverTool(..., node_postprocessors=[SegmentMarkerPostprocessor()])`"
ENTRIES = [
    *retrieved("nodes in `llm.complete(...)`", COMPLETED, set()),
    *retrieved("nodes in other calls", PROMPTS, {"`PromptTemplate`", "`ChatPromptTemplate`"}),
    *retrieved("nodes in a tool's message", TOLD, set(FORMATS) - COUNTED - {"as a JSON list of texts"}),
    *with_marks("nodes in `llm.complete(...)`", COMPLETED, COUNTED | {"as `<document>` with its source"}),
    *with_marks("nodes in other calls", PROMPTS, {name for name in PROMPTS if "number" in name or "loop" in name}),
    *invariant("`llm.chat`", MORE, BLOCKS),
    *warns("nodes of `retriever.retrieve(...)`, in a call of its own", DECLARED, {
        name: lambda llm, nodes, ask=ask: ask(llm, retrieve(nodes)) for name, ask in APART.items()
    }),
    *invariant("`index.as_chat_engine(chat_mode=...)`", GLOBAL, {
        **{f'`"{mode}"`': spoken_to(chat, mode) for mode in CHAT_MODES},
        '`"context"`, `stream_chat`': spoken_to(stream_chat, "context"),
        '`"context"`, `achat`': spoken_to(achat, "context"),
        '`"condense_plus_context"`, `stream_chat`': spoken_to(stream_chat, "condense_plus_context"),
        '`"simple"`, which reads no node': spoken_to(chat, "simple"),
    }),
    *invariant("chat engines with the parts of this package", MORE, {
        "`InvariantChatEngine`": by_ours(chat),
        "`InvariantChatEngine`, `stream_chat`": by_ours(stream_chat),
        "`InvariantChatEngine`, `achat`": by_ours(achat),
        "`ContextChatEngine` with `SegmentMarkerPostprocessor`": built(ContextChatEngine, **MARKED),
        "`CondensePlusContextChatEngine` with `SegmentMarkerPostprocessor`": built(
            CondensePlusContextChatEngine, **MARKED
        ),
    }),
    *invariant("workflows", GLOBAL, {
        "the one of LlamaIndex's documentation: retrieve, synthesize": lambda _, them: run_workflow(Answering(), them),
    }),
    *warns("workflows", "fill in a template: `llm.apredict(template, context_str=...)`", {
        "a step that joins the nodes and calls `llm.acomplete`": lambda llm, nodes: run_workflow(Answering(llm), nodes),
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
