"""Entries through what LangChain and LangGraph compose of retriever and model: lambdas, tools, graphs, agents."""

import asyncio
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, TypedDict

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, dynamic_prompt
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, FewShotPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import create_retriever_tool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from langchain_invariant_rag import SEGMENT_PROMPT, InvariantRAGMiddleware, Segments

from .base import BOUNDARIES, CHAT_PROMPT, CHATS, NOTHING, PASS_SEGMENTS, PLACEHOLDER, QUESTION

from .base import add, each_as, entry, joined, lcel, rag, text_of  # isort: skip
from .chains import found, listed_store

NUMBERED = each_as("[{n}] {text}", "\n")
THREAD = {"configurable": {"thread_id": "1"}}
WHO = {"who": {"type": "string", "maxLength": 4}}
OBJECT = {"title": "Answer", "type": "object", "properties": WHO, "required": ["who"]}


async def collected(pieces):
    return [piece async for piece in pieces]


def events(asked):
    return str(asyncio.run(collected(asked.astream_events(QUESTION, version="v2")))[-1]["data"]["output"])


CALLS = {
    "`batch`": lambda asked: asked.batch([QUESTION, "Who built it?"]),
    "`stream`": lambda asked: [*asked.stream(QUESTION)],
    "`abatch`": lambda asked: asyncio.run(asked.abatch([QUESTION, "Who built it?"])),
    "`astream`": lambda asked: asyncio.run(collected(asked.astream(QUESTION))),
    "`astream_events`": events,
}


def called(call):
    return lambda model, retriever: call(rag(retriever, model))


add("`chain`, called with", NOTHING, {name: called(call) for name, call in CALLS.items()})

# --- composed -----------------------------------------------------------------------------------------------------


def broken(_):
    raise ConnectionError("the provider is down")


def configured_method(model, retriever):
    plain = type(model)(model=model.model, method="sequential", max_tokens=model.max_tokens)
    chosen = plain.configurable_fields(method=ConfigurableField("method"))
    return rag(retriever, chosen).with_config(configurable={"method": model.method}).invoke(QUESTION)


WITH_CONTEXT = RunnablePassthrough.assign(context=lambda given: joined(given["context"]))
add("composed", NOTHING, {
    "`RunnableParallel` that returns the sources": lambda model, retriever: RunnableParallel(
        context=retriever, question=RunnablePassthrough()
    ).assign(answer=WITH_CONTEXT | CHAT_PROMPT | model).invoke(QUESTION),
    "`RunnablePassthrough.assign`, `itemgetter`, `pick`": lambda model, retriever: (
        RunnablePassthrough.assign(context=itemgetter("question") | retriever | joined)
        | RunnablePassthrough.assign(answer=CHAT_PROMPT | model)
    ).pick("answer").invoke({"question": QUESTION}),
    "`with_fallbacks`": lambda model, retriever: rag(
        retriever, RunnableLambda(broken).with_fallbacks([model])
    ).invoke(QUESTION),
})  # fmt: skip
add("composed", NOTHING, {"the method, configured": configured_method}, models=("chat", "completion"))
add("composed", NOTHING, {
    "`with_structured_output`": lambda model, retriever: repr((
        {"context": retriever | joined, "question": RunnablePassthrough()} | CHAT_PROMPT
        | model.model_copy(update={"max_tokens": 30}).with_structured_output(OBJECT)
    ).invoke(QUESTION)),
}, models=("chat",))  # fmt: skip
add("composed", PASS_SEGMENTS, {
    "`RunnableLambda` that calls both": lambda model, retriever: RunnableLambda(
        lambda text: model.invoke(f"{joined(retriever.invoke(text))}\n\n{text}")
    ).invoke(QUESTION),
}, warns=True)  # fmt: skip


@entry("composed", PASS_SEGMENTS, "an async `RunnableLambda`", warns=True)
def async_function(model, retriever):
    async def ask(question):
        return await model.ainvoke(f"{NUMBERED(await retriever.ainvoke(question))}\n\n{question}")

    return asyncio.run(RunnableLambda(ask).ainvoke(QUESTION))


PROMPTED = "other prompts around `format_docs`"
WITH_HISTORY = ChatPromptTemplate.from_messages(
    [("system", "Answer from this:\n{context}"), MessagesPlaceholder("history"), ("human", "{question}")]
)
FEW_SHOTS = FewShotPromptTemplate(
    examples=[{"q": "How much is bread?", "a": "Two crowns."}, {"q": "Is it raining?", "a": "No."}],
    example_prompt=PromptTemplate.from_template("Q: {q}\nA: {a}"),
    suffix="{context}\n\nQ: {question}\nA:",
    input_variables=["context", "question"],
)
greeted = WITH_HISTORY.partial(history=[("human", "Hello."), ("ai", "Hello. Yes?")])
add(PROMPTED, NOTHING, {"`MessagesPlaceholder` with a history": lcel(prompt=greeted)})
add(PROMPTED, NOTHING, {"`FewShotPromptTemplate`": lcel(prompt=FEW_SHOTS)})


@entry(PROMPTED, NOTHING, "`RunnableWithMessageHistory`", models=("chat",))
def message_history(model, retriever):
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


def by_hand(retrieve):
    return lambda model, retriever: model.invoke(f"{retrieve(retriever)}\n\n{QUESTION}")


def from_a_tool(retriever):
    return str(searching(retriever).invoke({"query": QUESTION}))


def labelled(template):
    """Only the labels say that there are documents: nothing was retrieved."""
    written = each_as(template, "\n")
    return by_hand(lambda retriever: f"Answer from these documents.\n\n{written(retriever.documents)}\n")


ALONE = "a retriever on its own, its texts joined by hand, the model in another call"
ON_ITS_OWN = {
    "empty lines": lambda retriever: joined(retriever.invoke(QUESTION)),
    "the list in an f-string": lambda retriever: f"{retriever.invoke(QUESTION)}",
    "from a chain": lambda retriever: (retriever | joined).invoke(QUESTION),
    "from `create_retriever_tool`": from_a_tool,
}
add(ALONE, PASS_SEGMENTS, {name: by_hand(each) for name, each in ON_ITS_OWN.items()}, warns=True)


@entry(ALONE, PASS_SEGMENTS, "awaited", warns=True)
def awaited(model, retriever):
    async def ask():
        return await model.ainvoke(f"{joined(await retriever.ainvoke(QUESTION))}\n\n{QUESTION}")

    return asyncio.run(ask())


LABELS = {"`Document 1: …`": "Document {n}: {text}", "`<doc id=1>…`": "<doc id={n}>{text}</doc>"}
in_strings = {name: labelled(template) for name, template in LABELS.items()}
add("labelled texts in a string, no retriever", PASS_SEGMENTS, in_strings, warns=True)

# --- tools --------------------------------------------------------------------------------------------------------


def history(*results):
    calls = [{"name": "search", "args": {"query": "ferry"}, "id": each.tool_call_id} for each in results]
    return [HumanMessage(QUESTION), AIMessage("", tool_calls=calls), *results]


def searching(retriever, **options):
    return create_retriever_tool(retriever, "search", "Searches the town's records.", **options)


def called_tool(model, retriever, **options):
    """Call the tool as an agent does, then the model, in one run."""
    search = searching(retriever, **options)
    call = {"type": "tool_call", "name": "search", "args": {"query": QUESTION}, "id": "1"}
    return RunnableLambda(lambda _: model.invoke(history(search.invoke(call)))).invoke("")


add("`create_retriever_tool`, called in the run that asks", NOTHING, {
    "`content`": partial(called_tool, response_format="content"),
    "`content_and_artifact`": partial(called_tool, response_format="content_and_artifact"),
    "`document_prompt=SEGMENT_PROMPT`": partial(called_tool, document_prompt=SEGMENT_PROMPT),
}, models=CHATS)  # fmt: skip
add("`ToolMessage` in the history", BOUNDARIES, {
    "documents in the artifact": found(
        lambda model, documents: model.invoke(
            history(ToolMessage(joined(documents), tool_call_id="1", artifact=documents))
        )
    ),
    "`Segments` as its text": found(
        lambda model, documents: model.invoke(history(ToolMessage(str(Segments(documents)), tool_call_id="1")))
    ),
}, models=CHATS)  # fmt: skip


add("parallel calls of a tool that return one document each", "return all documents of a question from one call", {
    "": lambda model, retriever: model.invoke(history(
        *(ToolMessage(str(Segments([each])), tool_call_id=str(n)) for n, each in enumerate(retriever.documents))
    )),
}, warns=True, models=CHATS)  # fmt: skip

# --- graphs -------------------------------------------------------------------------------------------------------


class State(TypedDict, total=False):
    question: str
    context: Any
    answer: Any


def graph(model, retriever, format_docs=joined, prompt=CHAT_PROMPT, keep=list):
    """Build the graph of LangChain's tutorial: two nodes, with documents in the state."""

    def retrieve(state: State) -> State:
        return {"context": keep(retriever.invoke(state["question"]))}

    def generate(state: State) -> State:
        asked = prompt | model
        return {"answer": asked.invoke({"context": format_docs(state["context"]), "question": state["question"]})}

    return StateGraph(State).add_sequence([retrieve, generate]).add_edge(START, "retrieve")


def itself(documents):
    return documents


def two_nodes(model, retriever, *choices, saved=False):
    saver = {"checkpointer": InMemorySaver()} if saved else {}
    return graph(model, retriever, *choices).compile(**saver).invoke({"question": QUESTION}, THREAD)


def resumed(model, retriever, *choices):
    built = graph(model, retriever, *choices)
    paused = built.compile(checkpointer=InMemorySaver(), interrupt_before=["generate"])
    paused.invoke({"question": QUESTION}, THREAD)
    return paused.invoke(None, THREAD)


def chosen(ask, *choices, **options):
    return lambda model, retriever: ask(model, retriever, *choices, **options)


GRAPH = "LangGraph: retrieve, then generate"
RESUMED = "LangGraph, interrupted before generation and resumed"
add(GRAPH, NOTHING, {"joined texts": two_nodes})


add(GRAPH, NOTHING, {
    "streamed, async": lambda model, retriever: asyncio.run(collected(
        graph(model, retriever).compile().astream({"question": QUESTION}, stream_mode="values")
    ))[-1],
})  # fmt: skip
add(GRAPH, NOTHING, {"with a checkpointer": partial(two_nodes, saved=True)})
add(GRAPH, PASS_SEGMENTS, {"numbered texts": chosen(two_nodes, NUMBERED)}, warns=True)
add(GRAPH, BOUNDARIES, {"`Segments` in the state": chosen(two_nodes, itself, CHAT_PROMPT, Segments, saved=True)})
add(RESUMED, BOUNDARIES, {"`SegmentsPlaceholder`": chosen(resumed, itself, PLACEHOLDER)})
forgotten = {"joined texts": resumed, "`Segments` in the state": chosen(resumed, itself, CHAT_PROMPT, Segments)}
add(RESUMED, PASS_SEGMENTS, forgotten, warns=True)


def tool_node(model, retriever, **options):
    """The model of the first turn has decided to search; what it said is given, since random weights decide nothing."""
    builder = StateGraph(MessagesState).add_node("tools", ToolNode([searching(retriever, **options)]))
    builder.add_node("model", lambda state: {"messages": [AIMessage(text_of(model.invoke(state["messages"])))]})
    builder.add_edge(START, "tools").add_edge("tools", "model")
    return builder.compile().invoke({"messages": history(ToolMessage("", tool_call_id="1"))[:2]})


add(
    "LangGraph: `ToolNode` with a retriever tool, then the model",
    NOTHING,
    {"`content`": tool_node, "`content_and_artifact`": partial(tool_node, response_format="content_and_artifact")},
    models=CHATS,
)

# --- agents -------------------------------------------------------------------------------------------------------

DYNAMIC_PROMPT = "You are a helpful assistant. Use the following context in your response:"  # of LangChain's tutorials
RAG_PROMPT = ChatPromptTemplate.from_template(
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to answer the "
    "question. If you don't know the answer, just say that you don't know. Use three sentences maximum and keep the "
    "answer concise.\nQuestion: {question} \nContext: {context} \nAnswer:"
)
ASKED = {"messages": [("human", QUESTION)]}
Context = Callable[[str], str]
"""What a function returns for a question."""


def retrieved(retriever):
    return lambda query: joined(retriever.invoke(query))


def searched(retriever, write=joined):
    return lambda query: f"{write(listed_store(retriever.documents).similarity_search(query))}"


def agent(model, middleware, **options):
    return create_agent(model, tools=[], middleware=[middleware], **options)


def dynamic(model, context):
    @dynamic_prompt
    def prompt_with_context(request):
        return f"{DYNAMIC_PROMPT}\n\n{context(request.state['messages'][-1].text)}"

    return agent(model, prompt_with_context).invoke(ASKED)


def in_a_lambda(model, context):
    return ({"context": context, "question": RunnablePassthrough()} | RAG_PROMPT | model).invoke(QUESTION)


def in_a_tool(model, context):
    @tool
    def retrieve_context(query: str) -> str:
        """Retrieve information to help answer a query."""
        return context(query)

    call = {"type": "tool_call", "name": "retrieve_context", "args": {"query": QUESTION}, "id": "1"}
    return model.invoke(history(retrieve_context.invoke(call)))


def ours(model, retriever):
    return agent(model, InvariantRAGMiddleware(retriever))


add("`create_agent`", BOUNDARIES, {
    "`InvariantRAGMiddleware`": lambda model, retriever: ours(model, retriever).invoke(ASKED),
    "`InvariantRAGMiddleware`, async": lambda model, retriever: asyncio.run(ours(model, retriever).ainvoke(ASKED)),
}, models=CHATS)  # fmt: skip
calling = {"`dynamic_prompt` that calls a retriever": lambda model, retriever: dynamic(model, retrieved(retriever))}
add("`create_agent`", PASS_SEGMENTS, calling, warns=True, models=("chat",))
SECOND_TURN = "two turns with a checkpointer, context in the first one's messages"


@entry("`create_agent`", PASS_SEGMENTS, SECOND_TURN, warns=True, models=("chat",))
def second_turn(model, retriever):
    class Retrieving(AgentMiddleware[Any, Any, Any]):
        def before_agent(self, state, runtime):
            if len(state["messages"]) > 1:
                return None
            return {"messages": [SystemMessage(f"Use this context:\n{joined(retriever.invoke(QUESTION))}")]}

    saved = agent(model, Retrieving(), checkpointer=InMemorySaver())
    saved.invoke(ASKED, THREAD)
    return saved.invoke({"messages": [("human", "Are you sure?")]}, THREAD)


SEARCHED = "`vector_store.similarity_search` in a function that returns"
WRITE_SEGMENTS = 'return `f"... {Segments(found)}"` in place of the joined texts'
DOORS = {
    "a `dynamic_prompt`": dynamic, "a lambda in a chain": in_a_lambda, "a `@tool`": in_a_tool,
}  # fmt: skip


def through(door, write):
    return lambda model, retriever: door(model, searched(retriever, write))


texts = {name: through(door, joined) for name, door in DOORS.items() if door is not in_a_tool}
add(f"{SEARCHED} joined texts", WRITE_SEGMENTS, texts, warns=True, models=CHATS)
segments = {name: through(door, Segments) for name, door in DOORS.items()}
add(f'{SEARCHED} `f"... {{Segments(found)}}"`', BOUNDARIES, segments, models=CHATS)
