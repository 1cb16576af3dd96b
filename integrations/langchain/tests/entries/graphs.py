"""Entries through LangGraph and the agents of LangChain."""

from __future__ import annotations

import asyncio
from typing import Any, TypedDict

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, dynamic_prompt
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools.retriever import create_retriever_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt

from langchain_invariant_rag import InvariantRAGMiddleware, Segments

from .base import ALL, BOUNDARIES, CHAT_PROMPT, NOTHING, PASS_SEGMENTS, QUESTION, entry, joined, text_of
from .segments import PLACEHOLDER
from .texts import format_each

GRAPH = "LangGraph: retrieve, then generate"
RESUMED = "LangGraph, interrupted before generation and resumed"
TOOLS = "LangGraph: `ToolNode` with a retriever tool, then the model"
AGENT = "`create_agent`"
NUMBERED = format_each("[{n}] {text}", "\n")
THREAD: Any = {"configurable": {"thread_id": "1"}}


class State(TypedDict, total=False):
    question: str
    context: list[Any]
    answer: str


def graph(
    model: Any, retriever: Any, *, format_docs: Any = joined, prompt: Any = CHAT_PROMPT, found: Any = list
) -> Any:
    """Build the graph of LangChain's tutorial: two nodes, with documents in the state."""

    def retrieve(state: State) -> State:
        return {"context": found(retriever.invoke(state["question"]))}

    def generate(state: State) -> State:
        inputs = {"context": format_docs(state["context"]), "question": state["question"]}
        return {"answer": (prompt | model | StrOutputParser()).invoke(inputs)}

    builder = StateGraph(State)
    builder.add_node("retrieve", retrieve)
    builder.add_node("generate", generate)
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "generate")
    builder.add_edge("generate", END)
    return builder


def itself(documents: Any) -> Any:
    return documents


@entry(GRAPH, "joined texts", todo=NOTHING, models=ALL)
def two_nodes(model: Any, retriever: BaseRetriever) -> str:
    return graph(model, retriever).compile().invoke({"question": QUESTION})["answer"]


@entry(GRAPH, "numbered texts", todo=PASS_SEGMENTS, warns=True, models=ALL)
def two_nodes_numbered(model: Any, retriever: BaseRetriever) -> str:
    return graph(model, retriever, format_docs=NUMBERED).compile().invoke({"question": QUESTION})["answer"]


@entry(GRAPH, "streamed, async", todo=NOTHING, models=ALL)
def two_nodes_streamed(model: Any, retriever: BaseRetriever) -> str:
    async def ask() -> str:
        states = graph(model, retriever).compile().astream({"question": QUESTION}, stream_mode="values")
        return [state async for state in states][-1]["answer"]

    return asyncio.run(ask())


@entry(GRAPH, "with a checkpointer", todo=NOTHING, models=ALL)
def two_nodes_saved(model: Any, retriever: BaseRetriever) -> str:
    saved = graph(model, retriever).compile(checkpointer=InMemorySaver())
    return saved.invoke({"question": QUESTION}, THREAD)["answer"]


@entry(GRAPH, "`Segments` in the state", todo=BOUNDARIES, models=ALL)
def segments_in_the_state(model: Any, retriever: BaseRetriever) -> str:
    built = graph(model, retriever, format_docs=itself, found=Segments).compile(checkpointer=InMemorySaver())
    return built.invoke({"question": QUESTION}, THREAD)["answer"]


def resumed(builder: Any) -> str:
    paused = builder.compile(checkpointer=InMemorySaver(), interrupt_before=["generate"])
    paused.invoke({"question": QUESTION}, THREAD)
    return paused.invoke(None, THREAD)["answer"]


@entry(RESUMED, "`Segments` in the state", todo=PASS_SEGMENTS, warns=True, models=ALL)
def resumed_segments(model: Any, retriever: BaseRetriever) -> str:
    return resumed(graph(model, retriever, format_docs=itself, found=Segments))


@entry(RESUMED, "`SegmentsPlaceholder`", todo=BOUNDARIES, models=ALL)
def resumed_placeholder(model: Any, retriever: BaseRetriever) -> str:
    return resumed(graph(model, retriever, format_docs=itself, prompt=PLACEHOLDER))


@entry(RESUMED, "joined texts", todo=PASS_SEGMENTS, warns=True, models=ALL)
def resumed_texts(model: Any, retriever: BaseRetriever) -> str:
    return resumed(graph(model, retriever))


@entry(RESUMED, "a person approves the documents", todo=PASS_SEGMENTS, warns=True, models=ALL)
def approved(model: Any, retriever: BaseRetriever) -> str:
    def retrieve(state: State) -> State:
        return {"context": retriever.invoke(state["question"])}

    def generate(state: State) -> State:
        if interrupt("Are these the right documents?") != "yes":
            return {"answer": ""}
        inputs = {"context": NUMBERED(state["context"]), "question": state["question"]}
        return {"answer": (CHAT_PROMPT | model | StrOutputParser()).invoke(inputs)}

    builder = StateGraph(State).add_sequence([retrieve, generate]).add_edge(START, "retrieve")
    paused = builder.compile(checkpointer=InMemorySaver())
    paused.invoke({"question": QUESTION}, THREAD)
    return paused.invoke(Command(resume="yes"), THREAD)["answer"]


def tool_graph(model: Any, retriever: BaseRetriever, **options: Any) -> str:
    """The model of the first turn has decided to search; what it said is given, since random weights decide nothing."""
    tool = create_retriever_tool(retriever, "search", "Searches the town's records.", **options)
    builder = StateGraph(MessagesState)
    builder.add_node("tools", ToolNode([tool]))
    builder.add_node("model", lambda state: {"messages": [AIMessage(text_of(model.invoke(state["messages"])))]})
    builder.add_edge(START, "tools")
    builder.add_edge("tools", "model")
    call = {"name": "search", "args": {"query": QUESTION}, "id": "1"}
    state = {"messages": [HumanMessage(QUESTION), AIMessage("", tool_calls=[call])]}
    return text_of(builder.compile().invoke(state)["messages"][-1])


@entry(TOOLS, "`content`", todo=NOTHING, models=("chat", "canonical", "vote"))
def tool_node(model: Any, retriever: BaseRetriever) -> str:
    return tool_graph(model, retriever)


@entry(TOOLS, "`content_and_artifact`", todo=NOTHING, models=("chat", "canonical", "vote"))
def tool_node_with_artifact(model: Any, retriever: BaseRetriever) -> str:
    return tool_graph(model, retriever, response_format="content_and_artifact")


def agent_answer(model: Any, middleware: Any) -> str:
    agent = create_agent(model, tools=[], middleware=[middleware])
    return text_of(agent.invoke({"messages": [("human", QUESTION)]})["messages"][-1])


AGENT_MODELS = ("chat", "canonical", "vote")


@entry(AGENT, "`InvariantRAGMiddleware`", todo=BOUNDARIES, models=AGENT_MODELS)
def our_middleware(model: Any, retriever: BaseRetriever) -> str:
    return agent_answer(model, InvariantRAGMiddleware(retriever))


@entry(AGENT, "`InvariantRAGMiddleware`, async", todo=BOUNDARIES, models=AGENT_MODELS)
def our_middleware_async(model: Any, retriever: BaseRetriever) -> str:
    agent = create_agent(model, tools=[], middleware=[InvariantRAGMiddleware(retriever)])
    return text_of(asyncio.run(agent.ainvoke({"messages": [("human", QUESTION)]}))["messages"][-1])


@entry(AGENT, "`dynamic_prompt` that calls a retriever", todo=PASS_SEGMENTS, warns=True, models=AGENT_MODELS)
def retrieving_prompt(model: Any, retriever: BaseRetriever) -> str:
    @dynamic_prompt
    def prompt_with_context(request: ModelRequest[Any]) -> str:
        return f"Use this context:\n\n{joined(retriever.invoke(request.state['messages'][-1].text))}"

    return agent_answer(model, prompt_with_context)


@entry(AGENT, "`before_model` that adds a message", todo=PASS_SEGMENTS, warns=True, models=AGENT_MODELS)
def retrieving_hook(model: Any, retriever: BaseRetriever) -> str:
    class Retrieving(AgentMiddleware[Any, Any, Any]):
        def before_model(self, state: Any, runtime: Any) -> dict[str, Any]:
            found = retriever.invoke(state["messages"][-1].text)
            return {"messages": [SystemMessage(f"Use this context:\n{NUMBERED(found)}")]}

    return agent_answer(model, Retrieving())


@entry(
    "two turns of a `create_agent` with a checkpointer, context in the first one's messages",
    todo=PASS_SEGMENTS,
    warns=True,
)
def second_turn(model: Any, retriever: BaseRetriever) -> str:
    class Retrieving(AgentMiddleware[Any, Any, Any]):
        def before_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
            if len(state["messages"]) > 1:
                return None
            return {"messages": [SystemMessage(f"Use this context:\n{joined(retriever.invoke(QUESTION))}")]}

    agent = create_agent(model, tools=[], middleware=[Retrieving()], checkpointer=InMemorySaver())
    agent.invoke({"messages": [("human", QUESTION)]}, THREAD)
    return text_of(agent.invoke({"messages": [("human", "Are you sure?")]}, THREAD)["messages"][-1])
