"""Entries in which a function searches without a retriever and returns text: LangChain never sees the documents."""

from __future__ import annotations

from typing import Any, TypedDict

from langchain.agents.middleware import AgentMiddleware, ModelRequest, dynamic_prompt
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from langchain_invariant_rag import Segments

from .base import ALL, BOUNDARIES, QUESTION, entry, joined, text_of
from .graphs import AGENT_MODELS, agent_answer
from .retrievers import listed_store

TEXT = "`vector_store.similarity_search` in a function that returns joined texts"
MARKED = '`vector_store.similarity_search` in a function that returns `f"... {Segments(found)}"`'
CALLS = "`ToolNode`: parallel calls that return one document each"
WRITE_SEGMENTS = 'return `f"... {Segments(found)}"` in place of the joined texts'
ONE_TOOL_CALL = "return all documents of a question from one call"

PASSAGES = (
    Document(
        "The ferry to Ostra leaves at noon from the eastern pier. In winter it leaves an hour later, because the crew "
        "has to break the ice in the basin first. Tickets are sold on board, and horses travel for half of the price.",
        metadata={"source": "ferry.txt"},
    ),
    Document(
        "Ostra has two bakeries, one at the market and one below the old wall. Both open before sunrise. The one at "
        "the market is known for its rye bread, which sailors buy by the sack before they leave for the islands.",
        metadata={"source": "town.txt"},
    ),
    Document(
        "The lighthouse was built by Teso Carno after the great storm. Its lamp burned whale oil at first, and can be "
        "seen from Brenn on a clear night. Two keepers live there in turns of three weeks, with their families.",
        metadata={"source": "coast.txt"},
    ),
)

# The prompts of LangChain's tutorials, as they are.
DYNAMIC_PROMPT = "You are a helpful assistant. Use the following context in your response:"
RAG_PROMPT = ChatPromptTemplate.from_template(
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to answer the "
    "question. If you don't know the answer, just say that you don't know. Use three sentences maximum and keep the "
    "answer concise.\nQuestion: {question} \nContext: {context} \nAnswer:"
)


class State(TypedDict, total=False):
    question: str
    context: str
    answer: str


def search(retriever: Any, query: str) -> list[Document]:
    return listed_store(retriever).similarity_search(query)


def dynamic(model: Any, retriever: Any, write: Any) -> str:
    @dynamic_prompt
    def prompt_with_context(request: ModelRequest[Any]) -> str:
        return f"{DYNAMIC_PROMPT}\n\n{write(search(retriever, request.state['messages'][-1].text))}"

    return agent_answer(model, prompt_with_context)


def wrapped(model: Any, retriever: Any, write: Any) -> str:
    class Retrieving(AgentMiddleware[Any, Any, Any]):
        def wrap_model_call(self, request: ModelRequest[Any], handler: Any) -> Any:
            found = search(retriever, request.messages[-1].text)
            return handler(request.override(system_message=SystemMessage(f"{DYNAMIC_PROMPT}\n\n{write(found)}")))

    return agent_answer(model, Retrieving())


def in_a_lambda(model: Any, retriever: Any, write: Any) -> str:
    inputs = {"context": lambda query: f"{write(search(retriever, query))}", "question": RunnablePassthrough()}
    return (inputs | RAG_PROMPT | model | StrOutputParser()).invoke(QUESTION)


def in_a_node(model: Any, retriever: Any, write: Any) -> str:
    def retrieve(state: State) -> State:
        return {"context": f"{write(search(retriever, state['question']))}"}

    def generate(state: State) -> State:
        return {"answer": (RAG_PROMPT | model | StrOutputParser()).invoke(state)}

    builder = StateGraph(State).add_sequence([retrieve, generate]).add_edge(START, "retrieve")
    return builder.compile().invoke({"question": QUESTION})["answer"]


def in_a_tool(model: Any, retriever: Any, write: Any) -> str:
    @tool
    def retrieve_context(query: str) -> str:
        """Retrieve information to help answer a query."""
        return f"{write(search(retriever, query))}"

    return with_results(model, [retrieve_context], ["retrieve_context"])


def with_results(model: Any, tools: list[Any], names: list[str]) -> str:
    """Call tools as a graph does, then the model; what it said before is given, since random weights decide nothing."""
    builder = StateGraph(MessagesState)
    builder.add_node("tools", ToolNode(tools))
    builder.add_node("model", lambda state: {"messages": [AIMessage(text_of(model.invoke(state["messages"])))]})
    builder.add_edge(START, "tools")
    builder.add_edge("tools", "model")
    builder.add_edge("model", END)
    calls = [{"name": name, "args": {"query": QUESTION}, "id": f"call_{place}"} for place, name in enumerate(names)]
    state = {"messages": [HumanMessage(QUESTION), AIMessage("", tool_calls=calls)]}
    return text_of(builder.compile().invoke(state)["messages"][-1])


PLACES: dict[str, tuple[Any, Any]] = {
    "a `dynamic_prompt`": (dynamic, AGENT_MODELS),
    "`wrap_model_call`": (wrapped, AGENT_MODELS),
    "a lambda in a chain": (in_a_lambda, ALL),
    "a node that returns `context: str`": (in_a_node, ALL),
    "a `@tool`": (in_a_tool, AGENT_MODELS),
}


def add_places(way: str, write: Any, *, todo: str, warns: bool) -> None:
    """Register one entry for each place in which a function may search."""
    for variant, (answer, models) in PLACES.items():
        if warns and variant == "a `@tool`":
            continue  # nothing tells the paragraphs of several documents from those of one
        entry(way, variant, todo=todo, warns=warns, models=models, documents=PASSAGES)(
            lambda model, retriever, answer=answer: answer(model, retriever, write)
        )


def each_by_itself(model: Any, retriever: Any, write: Any) -> str:
    """Let every call return one document; the calls stand in the order in which the documents were listed."""

    def tool_for(place: int) -> Any:
        @tool(f"look_{place}")
        def look(query: str) -> str:
            """Look up one place."""
            return str(write(retriever.documents[place : place + 1]))

        return look

    tools = [tool_for(place) for place in range(len(retriever.documents))]
    return with_results(model, tools, [each.name for each in tools])


add_places(TEXT, joined, todo=WRITE_SEGMENTS, warns=True)
add_places(MARKED, Segments, todo=BOUNDARIES, warns=False)


@entry(CALLS, "`Segments` as its text", todo=ONE_TOOL_CALL, warns=True, models=AGENT_MODELS, documents=PASSAGES)
def marked_calls(model: Any, retriever: Any) -> str:
    return each_by_itself(model, retriever, Segments)
