"""Entries through what LangChain and LangGraph compose of retriever and model: lambdas, tools, graphs, agents."""

import asyncio
from functools import partial
from operator import itemgetter
from typing import Any, TypedDict

from langchain.agents import create_agent
from langchain.agents.middleware import before_agent, dynamic_prompt, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.messages.tool import tool_call
from langchain_core.prompts import ChatPromptTemplate, FewShotPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from langchain_invariant_rag import SEGMENT_PROMPT, InvariantRAGMiddleware, Segments

from .chain_entries import ENTRIES, each_as, found, lcel, listed_store
from .shared import PLACEHOLDER, QUESTION, TEMPLATE, WAYS, Departure, collected, joined, rag, searching

NUMBERED = each_as("[{n}] {text}", "\n")
THREAD = {"configurable": {"thread_id": "1"}}

# --- a retriever on its own, or none ------------------------------------------------------------------------------


def by_hand(retrieve):
    return lambda model, retriever: model.invoke(f"{retrieve(retriever)}\n\n{QUESTION}")


async def awaited(model, retriever, question=QUESTION):
    return await model.ainvoke(f"{NUMBERED(await retriever.ainvoke(question))}\n\n{question}")


def labelled(template):
    """Only the labels say that there are documents: nothing was retrieved."""
    written = each_as(template, "\n")
    return by_hand(lambda retriever: f"Answer from these documents.\n\n{written(retriever.documents)}\n")


EMPTY_LINES = by_hand(lambda retriever: joined(retriever.invoke(QUESTION)))
ENTRIES["a retriever on its own, its texts joined by hand, the model in another call"] = {
    "empty lines": EMPTY_LINES,
    "the list in an f-string": by_hand(lambda retriever: retriever.invoke(QUESTION)),
    "from a chain": by_hand(lambda retriever: (retriever | joined).invoke(QUESTION)),
    "from `create_retriever_tool`": by_hand(lambda retriever: searching(retriever).invoke({"query": QUESTION})),
    "awaited": lambda model, retriever: asyncio.run(awaited(model, retriever)),
}
ENTRIES["labelled texts in a string, no retriever"] = {
    "`Document 1: …`": labelled("Document {n}: {text}"),
    "`<doc id=1>…`": labelled("<doc id={n}>{text}</doc>"),
}

# --- ways of calling, and what is composed ------------------------------------------------------------------------

RETRIEVED = RunnablePassthrough.assign(context=lambda given: joined(given["context"]))
WITH_HISTORY = ChatPromptTemplate.from_messages(
    [("system", "Answer from this:\n{context}"), MessagesPlaceholder("history"), ("human", "{question}")]
)
GREETED = WITH_HISTORY.partial(history=[("human", "Hello."), ("ai", "Hello. Yes?")])
FEW_SHOTS = FewShotPromptTemplate(
    examples=[{"q": "How much is bread?", "a": "Two crowns."}, {"q": "Is it raining?", "a": "No."}],
    example_prompt=PromptTemplate.from_template("Q: {q}\nA: {a}"),
    suffix="{context}\n\nQ: {question}\nA:",
    input_variables=["context", "question"],
)


def with_context(retriever):
    return RunnablePassthrough.assign(context=itemgetter("question") | retriever | joined)


def configured_method(model, retriever):
    plain = type(model)(model=model.model, method="sequential", max_tokens=model.max_tokens)
    chosen = plain.configurable_fields(method=ConfigurableField("method"))
    return rag(chosen, retriever).with_config(configurable={"method": model.method}).invoke(QUESTION)


def structured(model, retriever):
    writer = model.model_copy(update={"max_tokens": 60}).with_structured_output(Departure)
    return repr(rag(writer, retriever).invoke(QUESTION))


def message_history(model, retriever):
    said = InMemoryChatMessageHistory()
    talk = RunnableWithMessageHistory(
        with_context(retriever) | WITH_HISTORY | model,
        lambda: said,
        input_messages_key="question",
        history_messages_key="history",
        history_factory_config=[],
    )
    return [talk.invoke({"question": question}) for question in ("Is there a ferry?", QUESTION)]


ENTRIES["`chain`, called with"] = {
    f"`{way}`": lambda model, retriever, ask=ask: ask(rag(model, retriever), QUESTION) for way, ask in WAYS.items()
}
ENTRIES["`chain`, called with"]["`astream_events`"] = lambda model, retriever: asyncio.run(
    collected(rag(model, retriever).astream_events(QUESTION, version="v2"))
)[-1]["data"]["output"]
ENTRIES["composed"] = {
    "`RunnableParallel` that returns the sources": lambda model, retriever: (
        RunnableParallel(context=retriever, question=RunnablePassthrough())
        .assign(answer=RETRIEVED | TEMPLATE | model)
        .invoke(QUESTION)
    ),
    "`RunnablePassthrough.assign`, `itemgetter`, `pick`": lambda model, retriever: (
        (with_context(retriever) | RunnablePassthrough.assign(answer=TEMPLATE | model))
        .pick("answer")
        .invoke({"question": QUESTION})
    ),
    "`with_fallbacks`": lambda model, retriever: rag(
        RunnableLambda(lambda _: 1 / 0).with_fallbacks([model]), retriever
    ).invoke(QUESTION),
    "the method, configured": configured_method,
    "`with_structured_output`": structured,
    "`RunnableLambda` that calls both": lambda model, retriever: RunnableLambda(
        lambda _: EMPTY_LINES(model, retriever)
    ).invoke(QUESTION),
    "an async `RunnableLambda`": lambda model, retriever: asyncio.run(
        RunnableLambda(partial(awaited, model, retriever)).ainvoke(QUESTION)
    ),
}
ENTRIES["other prompts around `format_docs`"] = {
    "`MessagesPlaceholder` with a history": lcel(prompt=GREETED),
    "`FewShotPromptTemplate`": lcel(prompt=FEW_SHOTS),
    "`RunnableWithMessageHistory`": message_history,
}

# --- tools --------------------------------------------------------------------------------------------------------


def history(*results):
    calls = [{"name": "search", "args": {"query": "ferry"}, "id": each.tool_call_id} for each in results]
    return [HumanMessage(QUESTION), AIMessage("", tool_calls=calls), *results]


def result(text, call="1", **options):
    return ToolMessage(str(text), tool_call_id=call, **options)


def called_tool(model, retriever, **options):
    """Call the tool as an agent does, then the model, in one run."""
    call = tool_call(name="search", args={"query": QUESTION}, id="1")
    return RunnableLambda(lambda _: model.invoke(history(searching(retriever, **options).invoke(call)))).invoke("")


ENTRIES["`create_retriever_tool`, called in the run that asks"] = {
    "`content`": partial(called_tool, response_format="content"),
    "`content_and_artifact`": partial(called_tool, response_format="content_and_artifact"),
    "`document_prompt=SEGMENT_PROMPT`": partial(called_tool, document_prompt=SEGMENT_PROMPT),
}
ENTRIES["`ToolMessage` in the history"] = {
    "documents in the artifact": found(
        lambda model, documents: model.invoke(history(result(joined(documents), artifact=documents)))
    ),
    "`Segments` as its text": found(lambda model, documents: model.invoke(history(result(Segments(documents))))),
    "parallel calls of a tool that return one document each": lambda model, retriever: model.invoke(
        history(*(result(Segments([each]), str(n)) for n, each in enumerate(retriever.documents)))
    ),
}

# --- graphs -------------------------------------------------------------------------------------------------------

State = TypedDict("State", {"question": str, "context": Any, "answer": Any}, total=False)  # noqa: UP013 - a short one


def graph(model, retriever, write=joined, prompt=TEMPLATE, keep=list):
    """Build the graph of LangChain's tutorial: two nodes, with documents in the state."""
    builder = StateGraph(State)
    builder.add_node("retrieve", lambda state: {"context": keep(retriever.invoke(state["question"]))})
    builder.add_node("generate", lambda state: {
        "answer": (prompt | model).invoke({**state, "context": write(state["context"])})
    })  # fmt: skip
    return builder.add_edge(START, "retrieve").add_edge("retrieve", "generate")


def two_nodes(model, retriever, checkpointer=None, **choices):
    built = graph(model, retriever, **choices).compile(checkpointer=checkpointer and checkpointer())
    return built.invoke({"question": QUESTION}, THREAD)


def resumed(model, retriever, **choices):
    built = graph(model, retriever, **choices)
    paused = built.compile(checkpointer=InMemorySaver(), interrupt_before=["generate"])
    paused.invoke({"question": QUESTION}, THREAD)
    return paused.invoke(None, THREAD)


def tool_node(model, retriever, **options):
    """The model of the first turn has decided to search; what it said is given, since random weights decide nothing."""
    builder = StateGraph(MessagesState).add_node("tools", ToolNode([searching(retriever, **options)]))
    builder.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_edge(START, "tools").add_edge("tools", "model")
    return builder.compile().invoke({"messages": history(result(""))[:2]})


KEPT = {"write": lambda context: context, "keep": Segments}
ENTRIES["LangGraph, retrieve and then generate"] = {
    "joined texts": two_nodes,
    "streamed, async": lambda model, retriever: asyncio.run(
        collected(graph(model, retriever).compile().astream({"question": QUESTION}, stream_mode="values"))
    )[-1],
    "with a checkpointer": partial(two_nodes, checkpointer=InMemorySaver),
    "numbered texts": partial(two_nodes, write=NUMBERED),
    "`Segments` in the state": partial(two_nodes, checkpointer=InMemorySaver, **KEPT),
}
ENTRIES["LangGraph, interrupted before generation and resumed"] = {
    "`SegmentsPlaceholder`": partial(resumed, write=list, prompt=PLACEHOLDER),
    "joined texts": resumed,
    "`Segments` in the state": partial(resumed, **KEPT),
}
ENTRIES["LangGraph, `ToolNode` with a retriever tool, then the model"] = {
    "`content`": tool_node,
    "`content_and_artifact`": partial(tool_node, response_format="content_and_artifact"),
}

# --- agents, and functions that return text -----------------------------------------------------------------------

DYNAMIC_PROMPT = "You are a helpful assistant. Use the following context in your response:"  # of LangChain's tutorials
RAG_PROMPT = ChatPromptTemplate.from_template(
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to answer the "
    "question. If you don't know the answer, just say that you don't know. Use three sentences maximum and keep the "
    "answer concise.\nQuestion: {question} \nContext: {context} \nAnswer:"
)
ASKED = {"messages": [("human", QUESTION)]}


def agent(model, middleware, **options):
    return create_agent(model, tools=[], middleware=[middleware], **options)


def dynamic(model, context):
    """`context` is what returns a text for a question; so it is below."""

    @dynamic_prompt
    def prompt_with_context(request):
        return f"{DYNAMIC_PROMPT}\n\n{context(request.state['messages'][-1].text)}"

    return agent(model, prompt_with_context).invoke(ASKED)


def in_a_lambda(model, context):
    return ({"context": context, "question": RunnablePassthrough()} | RAG_PROMPT | model).invoke(QUESTION)


def in_a_tool(model, context):
    @tool
    def search(query: str) -> str:
        """Retrieve information to help answer a query."""
        return context(query)

    return model.invoke(history(search.invoke(tool_call(name="search", args={"query": QUESTION}, id="1"))))


def of_the_tutorial(retriever):
    @tool(response_format="content_and_artifact")
    def search(query: str) -> Any:
        """Search the harbour's records."""
        found = retriever.documents
        return "\n\n".join(f"Source: {each.metadata}\nContent: {each.page_content}" for each in found), found

    return search


def tool_agent(searches=searching, max_tokens=4, **options):
    """Ask an agent in two turns. It searches once: that is given, since random weights decide nothing."""

    @wrap_model_call
    def searching_once(request, handler):
        if any(isinstance(message, ToolMessage) for message in request.messages):
            settings = {"max_tokens": max_tokens, "parallel_tool_calls": False}
            return handler(request.override(tools=[], model_settings=settings))
        return history(result(""))[1]

    def ask(model, retriever):
        own = {"middleware": [searching_once], "checkpointer": InMemorySaver(), **options}
        saved = create_agent(model, [searches(retriever)], **own)
        turns = [saved.invoke({"messages": [("human", asked)]}, THREAD) for asked in (QUESTION, "Are you sure?")]
        return [repr(turn["structured_response"]) for turn in turns] if options else turns

    return ask


def second_turn(model, retriever):
    @before_agent
    def retrieving(state, runtime):
        if len(state["messages"]) > 1:
            return None
        return {"messages": [SystemMessage(f"Use this context:\n{joined(retriever.invoke(QUESTION))}")]}

    saved = agent(model, retrieving, checkpointer=InMemorySaver())
    saved.invoke(ASKED, THREAD)
    return saved.invoke({"messages": [("human", "Are you sure?")]}, THREAD)


def searched(door, write):
    """Ask through a door with a function that searches a store, and returns a text."""
    return lambda model, retriever: door(
        model, lambda query: f"{write(listed_store(retriever.documents).similarity_search(query))}"
    )


ENTRIES["`create_agent`"] = {
    "`InvariantRAGMiddleware`": lambda model, retriever: agent(model, InvariantRAGMiddleware(retriever)).invoke(ASKED),
    "`InvariantRAGMiddleware`, async": lambda model, retriever: asyncio.run(
        agent(model, InvariantRAGMiddleware(retriever)).ainvoke(ASKED)
    ),
    "`dynamic_prompt` that calls a retriever": lambda model, retriever: dynamic(
        model, lambda query: joined(retriever.invoke(query))
    ),
    "two turns with a checkpointer, context in the first one's messages": second_turn,
}
ENTRIES["`create_agent` with a tool, in two turns"] = {
    "`create_retriever_tool`": tool_agent(),
    "`create_retriever_tool`, `content_and_artifact`": tool_agent(
        partial(searching, response_format="content_and_artifact")
    ),
    "a `@tool` that returns texts and documents": tool_agent(of_the_tutorial),
    "`ToolStrategy`": tool_agent(max_tokens=100, response_format=ToolStrategy(Departure)),
    "`ProviderStrategy`": tool_agent(max_tokens=100, response_format=ProviderStrategy(Departure)),
    "`response_format=` a class": tool_agent(max_tokens=100, response_format=Departure),
}
ENTRIES["`vector_store.similarity_search` in a function that returns joined texts"] = {
    "a `dynamic_prompt`": searched(dynamic, joined),
    "a lambda in a chain": searched(in_a_lambda, joined),
}
ENTRIES['`vector_store.similarity_search` in a function that returns `f"... {Segments(found)}"`'] = {
    "a `dynamic_prompt`": searched(dynamic, Segments),
    "a lambda in a chain": searched(in_a_lambda, Segments),
    "a `@tool`": searched(in_a_tool, Segments),
}
