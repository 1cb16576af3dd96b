"""Entries through what LangChain and LangGraph compose of retriever and model: lambdas, tools, graphs, agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import itemgetter
from typing import Any, TypedDict

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, dynamic_prompt
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.runnables import (
    ConfigurableField,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import create_retriever_tool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from langchain_invariant_rag import SEGMENT_PROMPT, InvariantRAGMiddleware, Segments

from .base import (
    BOUNDARIES,
    CHAT_PROMPT,
    CHATS,
    NOTHING,
    PASS_SEGMENTS,
    QUESTION,
    Answer,
    Entry,
    each_as,
    joined,
    lcel,
    rag,
    rows,
    text_of,
)
from .chains import PLACEHOLDER, found, listed_store

NUMBERED = each_as("[{n}] {text}", "\n")
THREAD: Any = {"configurable": {"thread_id": "1"}}
OBJECT = {
    "title": "Answer",
    "type": "object",
    "properties": {"who": {"type": "string", "maxLength": 4}},
    "required": ["who"],
}


async def collected(pieces: Any) -> list[Any]:
    return [piece async for piece in pieces]


def events(asked: Any) -> str:
    return str(asyncio.run(collected(asked.astream_events(QUESTION, version="v2")))[-1]["data"]["output"])


CALLS: dict[str, Callable[[Any], Any]] = {
    "`batch`": lambda rag: rag.batch([QUESTION, "Who built it?"]),
    "`stream`": lambda rag: [*rag.stream(QUESTION)],
    "`abatch`": lambda rag: asyncio.run(rag.abatch([QUESTION, "Who built it?"])),
    "`astream`": lambda rag: asyncio.run(collected(rag.astream(QUESTION))),
    "`astream_events`": events,
}


def called(call: Callable[[Any], Any]) -> Answer:
    return lambda model, retriever: call(rag(retriever, model))


# --- composed -----------------------------------------------------------------------------------------------------


def with_sources(model: Any, retriever: Any) -> Any:
    answer = RunnablePassthrough.assign(context=lambda given: joined(given["context"])) | CHAT_PROMPT | model
    return RunnableParallel(context=retriever, question=RunnablePassthrough()).assign(answer=answer).invoke(QUESTION)


def assigned(model: Any, retriever: Any) -> Any:
    context = RunnablePassthrough.assign(context=itemgetter("question") | retriever | joined)
    asked = context | RunnablePassthrough.assign(answer=CHAT_PROMPT | model)
    return asked.pick("answer").invoke({"question": QUESTION})


def broken(_: Any) -> Any:
    raise ConnectionError("the provider is down")


def fallback(model: Any, retriever: Any) -> Any:
    return rag(retriever, RunnableLambda(broken).with_fallbacks([model])).invoke(QUESTION)


def configured_method(model: Any, retriever: Any) -> Any:
    plain = type(model)(model=model.model, method="sequential", max_tokens=model.max_tokens)
    chosen = plain.configurable_fields(method=ConfigurableField("method"))
    return rag(retriever, chosen).with_config(configurable={"method": model.method}).invoke(QUESTION)


def structured(model: Any, retriever: Any) -> Any:
    longer = model.model_copy(update={"max_tokens": 30}).with_structured_output(OBJECT)
    context = {"context": retriever | joined, "question": RunnablePassthrough()}
    return repr((context | CHAT_PROMPT | longer).invoke(QUESTION))


def function(model: Any, retriever: Any) -> Any:
    return RunnableLambda(lambda text: model.invoke(f"{joined(retriever.invoke(text))}\n\n{text}")).invoke(QUESTION)


def async_function(model: Any, retriever: Any) -> Any:
    async def ask(question: str) -> Any:
        return await model.ainvoke(f"{NUMBERED(await retriever.ainvoke(question))}\n\n{question}")

    return asyncio.run(RunnableLambda(ask).ainvoke(QUESTION))


WITH_HISTORY = ChatPromptTemplate.from_messages(
    [("system", "Answer from this:\n{context}"), MessagesPlaceholder("history"), ("human", "{question}")]
)
FEW_SHOTS = FewShotPromptTemplate(
    examples=[{"q": "How much is bread?", "a": "Two crowns."}, {"q": "Is it raining?", "a": "No."}],
    example_prompt=PromptTemplate.from_template("Q: {q}\nA: {a}"),
    suffix="{context}\n\nQ: {question}\nA:",
    input_variables=["context", "question"],
)
PROMPTS: dict[str, Any] = {
    "`MessagesPlaceholder` with a history": WITH_HISTORY.partial(history=[("human", "Hello."), ("ai", "Hello. Yes?")]),
    "`FewShotPromptTemplate`": FEW_SHOTS,
}


def message_history(model: Any, retriever: Any) -> Any:
    said = InMemoryChatMessageHistory()
    talk = RunnableWithMessageHistory(
        RunnablePassthrough.assign(context=itemgetter("question") | retriever | joined) | WITH_HISTORY | model,
        lambda: said,
        input_messages_key="question",
        history_messages_key="history",
        history_factory_config=[],
    )
    return [talk.invoke({"question": question}) for question in ("Is there a ferry?", QUESTION)]


# --- a retriever on its own ---------------------------------------------------------------------------------------


def by_hand(retrieve: Callable[[Any], str]) -> Answer:
    return lambda model, retriever: model.invoke(f"{retrieve(retriever)}\n\n{QUESTION}")


def awaited(model: Any, retriever: Any) -> Any:
    async def ask() -> Any:
        return await model.ainvoke(f"{joined(await retriever.ainvoke(QUESTION))}\n\n{QUESTION}")

    return asyncio.run(ask())


def from_a_tool(retriever: Any) -> str:
    return str(create_retriever_tool(retriever, "search", "Searches.").invoke({"query": QUESTION}))


ON_ITS_OWN: dict[str, Answer] = {
    "empty lines": by_hand(lambda retriever: joined(retriever.invoke(QUESTION))),
    "the list in an f-string": by_hand(lambda retriever: f"{retriever.invoke(QUESTION)}"),
    "from a chain": by_hand(lambda retriever: (retriever | joined).invoke(QUESTION)),
    "from `create_retriever_tool`": by_hand(from_a_tool),
    "awaited": awaited,
}


def labelled(template: str) -> Answer:
    """Only the labels say that there are documents: nothing was retrieved."""
    written = each_as(template, "\n")
    return by_hand(lambda retriever: f"Answer from these documents.\n\n{written(retriever.documents)}\n")


# --- tools --------------------------------------------------------------------------------------------------------


def history(*results: ToolMessage) -> list[Any]:
    calls = [{"name": "search", "args": {"query": "ferry"}, "id": each.tool_call_id} for each in results]
    return [HumanMessage(QUESTION), AIMessage("", tool_calls=calls), *results]


def called_tool(**options: Any) -> Answer:
    """Call the tool as an agent does, then the model, in one run."""

    def answer(model: Any, retriever: Any) -> Any:
        search = create_retriever_tool(retriever, "search", "Searches the town's records.", **options)
        call = {"type": "tool_call", "name": "search", "args": {"query": QUESTION}, "id": "1"}
        return RunnableLambda(lambda _: model.invoke(history(search.invoke(call)))).invoke("")

    return answer


RESULTS: dict[str, Answer] = {
    "documents in the artifact": found(
        lambda model, documents: model.invoke(
            history(ToolMessage(joined(documents), tool_call_id="1", artifact=documents))
        )
    ),
    "`Segments` as its text": found(
        lambda model, documents: model.invoke(history(ToolMessage(str(Segments(documents)), tool_call_id="1")))
    ),
}


def parallel_calls(model: Any, retriever: Any) -> Any:
    """Let every call return one document; the calls stand in the order in which the documents were listed."""
    listed = enumerate(retriever.documents)
    return model.invoke(history(*(ToolMessage(str(Segments([each])), tool_call_id=str(n)) for n, each in listed)))


# --- graphs -------------------------------------------------------------------------------------------------------


class State(TypedDict, total=False):
    question: str
    context: Any
    answer: Any


def graph(model: Any, retriever: Any, format_docs: Any = joined, prompt: Any = CHAT_PROMPT, keep: Any = list) -> Any:
    """Build the graph of LangChain's tutorial: two nodes, with documents in the state."""

    def retrieve(state: State) -> State:
        return {"context": keep(retriever.invoke(state["question"]))}

    def generate(state: State) -> State:
        asked = prompt | model
        return {"answer": asked.invoke({"context": format_docs(state["context"]), "question": state["question"]})}

    return StateGraph(State).add_sequence([retrieve, generate]).add_edge(START, "retrieve")


def itself(documents: Any) -> Any:
    return documents


def two_nodes(*choices: Any, saved: bool = False) -> Answer:
    def answer(model: Any, retriever: Any) -> Any:
        saver = {"checkpointer": InMemorySaver()} if saved else {}
        return graph(model, retriever, *choices).compile(**saver).invoke({"question": QUESTION}, THREAD)

    return answer


def streamed_nodes(model: Any, retriever: Any) -> Any:
    pieces = graph(model, retriever).compile().astream({"question": QUESTION}, stream_mode="values")
    return asyncio.run(collected(pieces))[-1]


def resumed(*choices: Any) -> Answer:
    def answer(model: Any, retriever: Any) -> Any:
        built = graph(model, retriever, *choices)
        paused = built.compile(checkpointer=InMemorySaver(), interrupt_before=["generate"])
        paused.invoke({"question": QUESTION}, THREAD)
        return paused.invoke(None, THREAD)

    return answer


def tool_node(**options: Any) -> Answer:
    """The model of the first turn has decided to search; what it said is given, since random weights decide nothing."""

    def answer(model: Any, retriever: Any) -> Any:
        search = create_retriever_tool(retriever, "search", "Searches the town's records.", **options)
        builder = StateGraph(MessagesState).add_node("tools", ToolNode([search]))
        builder.add_node("model", lambda state: {"messages": [AIMessage(text_of(model.invoke(state["messages"])))]})
        builder.add_edge(START, "tools").add_edge("tools", "model")
        return builder.compile().invoke({"messages": history(ToolMessage("", tool_call_id="1"))[:2]})

    return answer


# --- agents -------------------------------------------------------------------------------------------------------

DYNAMIC_PROMPT = "You are a helpful assistant. Use the following context in your response:"  # of LangChain's tutorials
RAG_PROMPT = ChatPromptTemplate.from_template(
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to answer the "
    "question. If you don't know the answer, just say that you don't know. Use three sentences maximum and keep the "
    "answer concise.\nQuestion: {question} \nContext: {context} \nAnswer:"
)
Find = Callable[[Any, str], list[Document]]


def retrieved(retriever: Any, query: str) -> list[Document]:
    return list(retriever.invoke(query))


def searched(retriever: Any, query: str) -> list[Document]:
    return listed_store(retriever.documents).similarity_search(query)


def agent(middleware: Callable[[Any], Any]) -> Answer:
    return lambda model, retriever: create_agent(model, tools=[], middleware=[middleware(retriever)]).invoke(
        {"messages": [("human", QUESTION)]}
    )


def async_agent(model: Any, retriever: Any) -> Any:
    built = create_agent(model, tools=[], middleware=[InvariantRAGMiddleware(retriever)])
    return asyncio.run(built.ainvoke({"messages": [("human", QUESTION)]}))


def dynamic(find: Find, write: Any) -> Answer:
    def middleware(retriever: Any) -> Any:
        @dynamic_prompt
        def prompt_with_context(request: Any) -> str:
            return f"{DYNAMIC_PROMPT}\n\n{write(find(retriever, request.state['messages'][-1].text))}"

        return prompt_with_context

    return agent(middleware)


def in_a_lambda(find: Find, write: Any) -> Answer:
    def answer(model: Any, retriever: Any) -> Any:
        inputs = {"context": lambda query: f"{write(find(retriever, query))}", "question": RunnablePassthrough()}
        return (inputs | RAG_PROMPT | model).invoke(QUESTION)

    return answer


def in_a_tool(find: Find, write: Any) -> Answer:
    def answer(model: Any, retriever: Any) -> Any:
        @tool
        def retrieve_context(query: str) -> str:
            """Retrieve information to help answer a query."""
            return f"{write(find(retriever, query))}"

        call = {"type": "tool_call", "name": "retrieve_context", "args": {"query": QUESTION}, "id": "1"}
        return model.invoke(history(retrieve_context.invoke(call)))

    return answer


def second_turn(model: Any, retriever: Any) -> Any:
    class Retrieving(AgentMiddleware[Any, Any, Any]):
        def before_agent(self, state: Any, runtime: Any) -> Any:
            if len(state["messages"]) > 1:
                return None
            return {"messages": [SystemMessage(f"Use this context:\n{joined(retriever.invoke(QUESTION))}")]}

    saved: Any = create_agent(model, tools=[], middleware=[Retrieving()], checkpointer=InMemorySaver())
    saved.invoke({"messages": [("human", QUESTION)]}, THREAD)
    return saved.invoke({"messages": [("human", "Are you sure?")]}, THREAD)


COMPOSED: dict[str, Answer] = {
    "`RunnableParallel` that returns the sources": with_sources,
    "`RunnablePassthrough.assign`, `itemgetter`, `pick`": assigned,
    "`with_fallbacks`": fallback,
}
FUNCTIONS: dict[str, Answer] = {
    "`RunnableLambda` that calls both": function,
    "an async `RunnableLambda`": async_function,
}
TOOL_OPTIONS: dict[str, Answer] = {
    "`content`": called_tool(response_format="content"),
    "`content_and_artifact`": called_tool(response_format="content_and_artifact"),
    "`document_prompt=SEGMENT_PROMPT`": called_tool(document_prompt=SEGMENT_PROMPT),
}
PROMPTED = "other prompts around `format_docs`"
ALONE = "a retriever on its own, its texts joined by hand, the model in another call"
GRAPH = "LangGraph: retrieve, then generate"
RESUMED = "LangGraph, interrupted before generation and resumed"
SEARCHED = "`vector_store.similarity_search` in a function that returns"
WRITE_SEGMENTS = 'return `f"... {Segments(found)}"` in place of the joined texts'

ENTRIES: list[Entry] = [
    *rows("`chain`, called with", NOTHING, {name: called(each) for name, each in CALLS.items()}),
    *rows("composed", NOTHING, COMPOSED),
    *rows("composed", NOTHING, {"the method, configured": configured_method}, models=("chat", "completion")),
    *rows("composed", NOTHING, {"`with_structured_output`": structured}, models=("chat",)),
    *rows("composed", PASS_SEGMENTS, FUNCTIONS, warns=True),
    *rows(PROMPTED, NOTHING, {name: lcel(prompt=each) for name, each in PROMPTS.items()}),
    *rows(PROMPTED, NOTHING, {"`RunnableWithMessageHistory`": message_history}, models=("chat",)),
    *rows(ALONE, PASS_SEGMENTS, ON_ITS_OWN, warns=True),
    *rows(
        "labelled texts in a string, no retriever", PASS_SEGMENTS,
        {"`Document 1: …`": labelled("Document {n}: {text}"), "`<doc id=1>…`": labelled("<doc id={n}>{text}</doc>")},
        warns=True,
    ),
    *rows("`create_retriever_tool`, called in the run that asks", NOTHING, TOOL_OPTIONS, models=CHATS),
    *rows("`ToolMessage` in the history", BOUNDARIES, RESULTS, models=CHATS),
    *rows(
        "parallel calls of a tool that return one document each", "return all documents of a question from one call",
        {"": parallel_calls}, warns=True, models=CHATS,
    ),
    *rows(GRAPH, NOTHING, {"joined texts": two_nodes(), "streamed, async": streamed_nodes}),
    *rows(GRAPH, NOTHING, {"with a checkpointer": two_nodes(saved=True)}),
    *rows(GRAPH, PASS_SEGMENTS, {"numbered texts": two_nodes(NUMBERED)}, warns=True),
    *rows(GRAPH, BOUNDARIES, {"`Segments` in the state": two_nodes(itself, CHAT_PROMPT, Segments, saved=True)}),
    *rows(RESUMED, BOUNDARIES, {"`SegmentsPlaceholder`": resumed(itself, PLACEHOLDER)}),
    *rows(
        RESUMED, PASS_SEGMENTS,
        {
            "joined texts": resumed(),
            "`Segments` in the state": resumed(itself, CHAT_PROMPT, Segments),
        },
        warns=True,
    ),
    *rows(
        "LangGraph: `ToolNode` with a retriever tool, then the model", NOTHING,
        {"`content`": tool_node(), "`content_and_artifact`": tool_node(response_format="content_and_artifact")},
        models=CHATS,
    ),
    *rows("`create_agent`", BOUNDARIES, {"`InvariantRAGMiddleware`": agent(InvariantRAGMiddleware)}, models=CHATS),
    *rows("`create_agent`", BOUNDARIES, {"`InvariantRAGMiddleware`, async": async_agent}, models=CHATS),
    *rows(
        "`create_agent`", PASS_SEGMENTS,
        {
            "`dynamic_prompt` that calls a retriever": dynamic(retrieved, joined),
            "two turns with a checkpointer, context in the first one's messages": second_turn,
        },
        warns=True, models=("chat",),
    ),
    *rows(
        f"{SEARCHED} joined texts", WRITE_SEGMENTS,
        {
            "a `dynamic_prompt`": dynamic(searched, joined),
            "a lambda in a chain": in_a_lambda(searched, joined),
        },
        warns=True, models=CHATS,
    ),
    *rows(
        f'{SEARCHED} `f"... {{Segments(found)}}"`', BOUNDARIES,
        {
            "a `dynamic_prompt`": dynamic(searched, Segments),
            "a lambda in a chain": in_a_lambda(searched, Segments),
            "a `@tool`": in_a_tool(searched, Segments),
        },
        models=CHATS,
    ),
]  # fmt: skip
