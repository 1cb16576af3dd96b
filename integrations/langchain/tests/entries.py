"""The ways in which retrieved documents get to a model, as users of LangChain write them.

An entry is a function of a `Case` of test_entries.py: it builds everything anew, and returns an answer, a list of
answers, or a chain that answers a question. README.md says of each whether it is invariant.
"""

import asyncio
import json
import pickle
import pprint
from functools import partial
from operator import itemgetter
from typing import Any, TypedDict

from langchain.agents import create_agent
from langchain.agents.middleware import dynamic_prompt, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_classic import chains, retrievers
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers.document_compressors import DocumentCompressorPipeline
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, FewShotPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.stores import InMemoryStore
from langchain_core.tools import tool
from langchain_text_splitters import CharacterTextSplitter
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

import langchain_invariant_rag as ours
from langchain_invariant_rag import SEGMENT_PROMPT, Segments, as_segments

from .shared import PLACEHOLDER, QUESTION, TEMPLATE, WAYS, Departure, Listed, collected, joined, rag, searching

ENTRIES = {}
"""Way -> variant -> entry."""
INPUT = RunnablePassthrough()
"""The question of a chain; and in place of a `format_docs`, the list of documents."""

# --- documents formatted as text ----------------------------------------------------------------------------------

SYSTEM = ChatPromptTemplate.from_messages([("system", "Answer from this:\n\n{context}"), ("human", "{question}")])
SHORT_PROMPT = PromptTemplate.from_template("{context}\n\n{question}")
TWICE = ChatPromptTemplate.from_template("{context}\n\n{question}\nRead it again:\n\n{context}\n\n{question}")
SEPARATE = ChatPromptTemplate.from_template(f"Document 1: {{a}}\nDocument 2: {{b}}\nDocument 3: {{c}}\n{QUESTION}")
TWO_PLACES = ChatPromptTemplate.from_template("Facts:\n{facts}\n\nNews:\n{news}\n\n{question}")
NEWS = Listed(documents=[Document("Bread costs two crowns."), Document("It rains.")])


def each_as(template, separator="\n\n"):
    """Format every document with a template of its number, its letter, its text and its metadata."""
    return lambda documents: separator.join(
        template.format(n=n, letter=chr(64 + n), text=each.page_content, all=each.metadata, **each.metadata)
        for n, each in enumerate(documents, 1)
    )


def texts(documents, length=None):
    return [each.page_content[:length] for each in documents]


def lcel(format_docs=joined, prompt=TEMPLATE, over=lambda c: c.retriever):
    """Build the chain of the tutorials, over a retriever of a case."""
    return lambda c: rag(c.model | StrOutputParser(), over(c), format_docs, prompt)


BULLETS, NUMBERED = each_as("- {text}", "\n"), each_as("[{n}] {text}", "\n")
JSON_LIST = lcel(lambda documents: json.dumps(texts(documents)))
ENTRIES['`{"context": retriever | format_docs} | prompt | model`'] = {
    "joined by an empty line": lcel(),
    "bullets": lcel(BULLETS),
    '`<doc id="…">` with an id of the metadata': lcel(each_as('<doc id="{id}">{text}</doc>', "\n")),
    "`Source: …`, `Content: …`": lcel(each_as("Source: {source}\nContent: {text}")),
    "text, then `(source, page)`": lcel(each_as("{text} ({source}, p. {page})", "\n")),
    "all metadata, then text": lcel(each_as("{all}: {text}", "\n")),
    "two equal texts": lcel(each_as("Source {year}: {text}")),
    "JSON lines": lcel(
        lambda documents: "\n".join(json.dumps({**each.metadata, "text": each.page_content}) for each in documents)
    ),
    "context in the system message": lcel(prompt=SYSTEM),
    "a prompt template for completion models": lcel(prompt=SHORT_PROMPT),
    "numbered `[1]`": lcel(each_as("[{n}] {text}")),
    "`Document 1 of 3`": lcel(each_as("Document {n} of 3\n{text}")),
    "XML with index and source": lcel(each_as('<document index="{n}"><source>{source}</source>{text}</document>')),
    "JSON list of texts": JSON_LIST,
    "`pprint`": lcel(pprint.pformat),
    "lettered": lcel(each_as("{letter}) {text}", "\n")),
    "cut to 20 characters": lcel(lambda documents: "\n\n".join(texts(documents, 20))),
    "upper case": lcel(lambda documents: joined(documents).upper()),
    "the first two only": lcel(lambda documents: joined(documents[:2])),
    "one document within another": lcel(),
    "context twice": lcel(prompt=TWICE),
    "JSON that escapes": JSON_LIST,
}
ENTRIES["documents formatted in the prompt template"] = {
    "the list in `{context}`": lcel(INPUT),
    "an f-string with one variable per document": lambda c: (
        c.retriever | (lambda documents: dict(zip("abc", texts(documents), strict=True))) | SEPARATE | c.model
    ),
    "two retrievers, two places": lambda c: (
        {"facts": c.retriever | BULLETS, "news": NEWS | BULLETS, "question": INPUT} | TWO_PLACES | c.model
    ),
}

# --- documents that keep their boundaries -------------------------------------------------------------------------

ASKED_OF = PromptTemplate.from_template("{question}")


def formatted(shape, prompt=TEMPLATE):
    return lambda c: (prompt | c.model).invoke({"context": shape(c.find()), "question": QUESTION})


def stuffed(create=create_stuff_documents_chain, prompt=TEMPLATE, **options):
    return lambda c: create(c.model, prompt, **options).invoke({"context": c.find(), "question": QUESTION})


ENTRIES["`Segments` in a text template"] = {
    "as they are": formatted(Segments),
    "a sum with a list": formatted(lambda documents: Segments(documents[:1]) + documents[1:]),
    "pickled": formatted(lambda documents: pickle.loads(pickle.dumps(Segments(documents)))),
    "in an f-string": formatted(lambda documents: f"Read this:\n{Segments(documents)}"),
}
ENTRIES["`as_segments(retriever)`"] = {
    "in front of a text template": lcel(INPUT, over=lambda c: as_segments(c.retriever))
}
ENTRIES["`SegmentsPlaceholder`"] = {
    "in a chain": lcel(INPUT, PLACEHOLDER),
    "retrieved before": formatted(list, PLACEHOLDER),
    "nested": lcel(INPUT, PLACEHOLDER),
}
ENTRIES["`create_invariant_documents_chain`"] = {
    "over documents retrieved before": stuffed(ours.create_invariant_documents_chain, PLACEHOLDER)
}
ENTRIES["`document_prompt=SEGMENT_PROMPT`"] = {
    "in the stuff chain": stuffed(document_prompt=SEGMENT_PROMPT),
    'with `+ "\\n"`': stuffed(document_prompt=SEGMENT_PROMPT + "\n"),
    "in a `format_docs` that numbers": formatted(
        lambda listed: "\n".join(
            f"[{n}] {SEGMENT_PROMPT.format(page_content=text)}" for n, text in enumerate(texts(listed))
        )
    ),
}
ENTRIES["`documents=`"] = {
    "on `invoke`": lambda c: c.model.invoke(QUESTION, documents=c.find()),
    "on `stream`": lambda c: WAYS["stream"](c.model, QUESTION, documents=c.find()),
    "on `batch`": lambda c: c.model.batch([QUESTION, "Who?"], documents=c.find()),
    "bound, in a chain": lambda c: ASKED_OF | c.model.bind(documents=c.find()),
    "on `prompt | model`, which passes it to the prompt": lambda c: (ASKED_OF | c.model).invoke(
        QUESTION, documents=c.find()
    ),
}

# --- chains, and retrievers over others ---------------------------------------------------------------------------

WORDS = CharacterTextSplitter(separator=" ", chunk_size=20, chunk_overlap=0)
SPLITS = DocumentCompressorPipeline(transformers=[WORDS])
SOURCE_PROMPT = PromptTemplate.from_template("Source: {source}\nContent: {page_content}")
REDUCE_PROMPT = PromptTemplate.from_template("{summaries}\n\n{question}")
FROM_INPUT = ChatPromptTemplate.from_messages([("system", "Answer from this:\n\n{context}"), ("human", "{input}")])
CONDENSE = ChatPromptTemplate.from_messages([MessagesPlaceholder("chat_history"), ("human", "{input} In short?")])


def retrieval_chain(over=lambda c: c.retriever, **options):
    asked = {"input": QUESTION, "chat_history": [HumanMessage("Is there a ferry?"), AIMessage("Yes.")]}
    return lambda c: chains.create_retrieval_chain(
        over(c), create_stuff_documents_chain(c.model, FROM_INPUT, **options)
    ).invoke(asked)


def retrieval_qa(kind, **prompts):
    create = partial(chains.RetrievalQA.from_chain_type, chain_type=kind, chain_type_kwargs=prompts)
    return lambda c: create(llm=c.model, retriever=c.retriever).invoke({"query": QUESTION})


def parents(c):
    places = {"vectorstore": c.store([]), "docstore": InMemoryStore()}
    both = retrievers.ParentDocumentRetriever(**places, child_splitter=WORDS)
    both.add_documents(c.retriever.documents)
    return both


ENTRIES["`create_retrieval_chain` with `create_stuff_documents_chain`"] = {
    "default": retrieval_chain(),
    "`document_prompt` with the source": retrieval_chain(document_prompt=SOURCE_PROMPT),
    "over `as_segments(retriever)`": retrieval_chain(lambda c: as_segments(c.retriever)),
    "with `create_history_aware_retriever`": retrieval_chain(
        lambda c: chains.create_history_aware_retriever(c.model, c.retriever, CONDENSE)
    ),
}
ENTRIES["`create_stuff_documents_chain`"] = {"over documents retrieved before": stuffed()}
ENTRIES["`RetrievalQA`"] = {
    "`stuff`": retrieval_qa("stuff"),
    "`map_reduce`": retrieval_qa("map_reduce", question_prompt=SHORT_PROMPT, combine_prompt=REDUCE_PROMPT),
    "`refine`": retrieval_qa("refine"),
}
ENTRIES["a retriever over others, then `format_docs`"] = {
    "`VectorStoreRetriever`": lcel(over=lambda c: c.store().as_retriever()),
    "`EnsembleRetriever`": lcel(over=lambda c: retrievers.EnsembleRetriever(retrievers=[c.retriever] * 2)),
    "`MultiQueryRetriever`": lcel(over=lambda c: retrievers.MultiQueryRetriever.from_llm(c.retriever, c.model)),
    "`ContextualCompressionRetriever` that splits": lcel(
        over=lambda c: retrievers.ContextualCompressionRetriever(base_compressor=SPLITS, base_retriever=c.retriever)
    ),
    "`ParentDocumentRetriever`": lcel(over=parents),
}
ENTRIES["`vector_store.similarity_search`, no retriever"] = {
    "numbered texts": lcel(each_as("Document {n}: {text}"), over=lambda c: RunnableLambda(c.store().similarity_search))
}

# --- a retriever on its own, or none ------------------------------------------------------------------------------


def by_hand(retrieve):
    return lambda c: c.model.invoke(f"{retrieve(c)}\n\n{QUESTION}")


async def awaited(c):
    return await c.model.ainvoke(f"{NUMBERED(await c.retriever.ainvoke(QUESTION))}\n\n{QUESTION}")


def labelled(template):
    """Only the labels say that there are documents: nothing was retrieved."""
    written = each_as(template, "\n")
    return by_hand(lambda c: f"Answer from these documents.\n\n{written(c.retriever.documents)}\n")


EMPTY_LINES = by_hand(lambda c: joined(c.find()))
ENTRIES["a retriever on its own, its texts joined by hand, the model in another call"] = {
    "empty lines": EMPTY_LINES,
    "the list in an f-string": by_hand(lambda c: c.find()),
    "from a chain": by_hand(lambda c: (c.retriever | joined).invoke(QUESTION)),
    "from `create_retriever_tool`": by_hand(lambda c: searching(c.retriever).invoke({"query": QUESTION})),
    "awaited": lambda c: asyncio.run(awaited(c)),
}
ENTRIES["labelled texts in a string, no retriever"] = {
    "`Document 1: …`": labelled("Document {n}: {text}"),
    "`<doc id=1>…`": labelled("<doc id={n}>{text}</doc>"),
}

# --- ways of calling, and what is composed ------------------------------------------------------------------------

JOINED = RunnablePassthrough.assign(context=lambda given: joined(given["context"]))
WITH_HISTORY = ChatPromptTemplate.from_messages(
    [("system", "Answer from this:\n{context}"), MessagesPlaceholder("history"), ("human", "{question}")]
)
GREETED = WITH_HISTORY.partial(history=[("human", "Hello."), ("ai", "Hello. Yes?")])
FEW_SHOTS = FewShotPromptTemplate(
    examples=[{"q": "How much is bread?", "a": "Two crowns."}, {"q": "Is it raining?", "a": "No."}],
    example_prompt=PromptTemplate.from_template("Q: {q}\nA: {a}"),
    suffix="{context}\n\nQ: {question}\nA:",
)


def with_context(c):
    return RunnablePassthrough.assign(context=itemgetter("question") | c.retriever | joined)


def configured_method(c):
    plain = type(c.model)(model=c.model.model, method="sequential", max_tokens=c.model.max_tokens)
    chosen = plain.configurable_fields(method=ConfigurableField("method"))
    return rag(chosen, c.retriever).with_config(configurable={"method": c.model.method})


def message_history(c):
    said = InMemoryChatMessageHistory()
    keys = {"input_messages_key": "question", "history_messages_key": "history", "history_factory_config": []}
    talk = RunnableWithMessageHistory(with_context(c) | WITH_HISTORY | c.model, lambda: said, **keys)
    return [talk.invoke({"question": question}) for question in ("Is there a ferry?", QUESTION)]


ENTRIES["`chain`, called with"] = {
    f"`{way}`": lambda c, ask=ask: ask(rag(c.model, c.retriever), QUESTION) for way, ask in WAYS.items()
}
ENTRIES["`chain`, called with"]["`astream_events`"] = lambda c: asyncio.run(
    collected(rag(c.model, c.retriever).astream_events(QUESTION, version="v2"))
)[-1]["data"]["output"]
ENTRIES["composed"] = {
    "`RunnableParallel` that returns the sources": lambda c: RunnableParallel(
        context=c.retriever, question=INPUT
    ).assign(answer=JOINED | TEMPLATE | c.model),
    "`RunnablePassthrough.assign`, `itemgetter`, `pick`": lambda c: (
        {"question": INPUT} | with_context(c) | RunnablePassthrough.assign(answer=TEMPLATE | c.model)
    ).pick("answer"),
    "`with_fallbacks`": lambda c: rag(RunnableLambda(lambda _: 1 / 0).with_fallbacks([c.model]), c.retriever),
    "the method, configured": configured_method,
    "`with_structured_output`": lambda c: (
        rag(c.model.with_structured_output(Departure, max_tokens=60), c.retriever) | repr
    ),
    "`RunnableLambda` that calls both": RunnableLambda(EMPTY_LINES).invoke,
    "an async `RunnableLambda`": lambda c: asyncio.run(RunnableLambda(awaited).ainvoke(c)),
}
ENTRIES["other prompts around `format_docs`"] = {
    "`MessagesPlaceholder` with a history": lcel(prompt=GREETED),
    "`FewShotPromptTemplate`": lcel(prompt=FEW_SHOTS),
    "`RunnableWithMessageHistory`": message_history,
}

# --- tools --------------------------------------------------------------------------------------------------------

SEARCH = {"name": "search", "args": {"query": QUESTION}, "id": "1", "type": "tool_call"}
WITH_ARTIFACT = {"response_format": "content_and_artifact"}


def history(*results):
    calls = [{**SEARCH, "id": each.tool_call_id} for each in results]
    return [HumanMessage(QUESTION), AIMessage("", tool_calls=calls), *results]


def result(text, call="1", **options):
    return ToolMessage(str(text), tool_call_id=call, **options)


def called_tool(c, **options):
    """Call the tool as an agent does, then the model, in one run."""
    return RunnableLambda(lambda _: c.model.invoke(history(searching(c.retriever, **options).invoke(SEARCH))))


ENTRIES["`create_retriever_tool`, called in the run that asks"] = {
    "`content`": partial(called_tool, response_format="content"),
    "`content_and_artifact`": partial(called_tool, **WITH_ARTIFACT),
    "`document_prompt=SEGMENT_PROMPT`": partial(called_tool, document_prompt=SEGMENT_PROMPT),
}
ENTRIES["`ToolMessage` in the history"] = {
    "documents in the artifact": lambda c: c.model.invoke(history(result(joined(found := c.find()), artifact=found))),
    "`Segments` as its text": lambda c: c.model.invoke(history(result(Segments(c.find())))),
    "parallel calls of a tool that return one document each": lambda c: c.model.invoke(
        history(*(result(Segments([each]), str(n)) for n, each in enumerate(c.retriever.documents)))
    ),
}

# --- graphs -------------------------------------------------------------------------------------------------------

State = TypedDict("State", {"question": str, "context": Any, "answer": Any}, total=False)  # noqa: UP013 - a short one
THREAD = {"configurable": {"thread_id": "1"}}


def graph(c, write=joined, prompt=TEMPLATE, keep=list):
    """Build the graph of LangChain's tutorial: two nodes, with documents in the state."""
    builder = StateGraph(State)
    builder.add_node("retrieve", lambda state: {"context": keep(c.retriever.invoke(state["question"]))})
    builder.add_node("generate", lambda state: {
        "answer": (prompt | c.model).invoke({**state, "context": write(state["context"])})
    })  # fmt: skip
    return builder.add_edge(START, "retrieve").add_edge("retrieve", "generate")


def two_nodes(saver=lambda: None, **choices):
    return lambda c: graph(c, **choices).compile(checkpointer=saver()).invoke({"question": QUESTION}, THREAD)


def resumed(c, **choices):
    paused = graph(c, **choices).compile(checkpointer=InMemorySaver(), interrupt_before=["generate"])
    paused.invoke({"question": QUESTION}, THREAD)
    return paused.invoke(None, THREAD)


def tool_node(c, **options):
    """The model of the first turn has decided to search; what it said is given, since random weights decide nothing."""
    builder = StateGraph(MessagesState).add_node("tools", ToolNode([searching(c.retriever, **options)]))
    builder.add_node("model", lambda state: {"messages": [c.model.invoke(state["messages"])]})
    builder.add_edge(START, "tools").add_edge("tools", "model")
    return builder.compile().invoke({"messages": history(result(""))[:2]})


KEPT = {"write": lambda context: context, "keep": Segments}
ENTRIES["LangGraph, retrieve and then generate"] = {
    "joined texts": two_nodes(),
    "streamed, async": lambda c: asyncio.run(
        collected(graph(c).compile().astream({"question": QUESTION}, stream_mode="values"))
    )[-1],
    "with a checkpointer": two_nodes(InMemorySaver),
    "numbered texts": two_nodes(write=NUMBERED),
    "`Segments` in the state": two_nodes(InMemorySaver, **KEPT),
}
ENTRIES["LangGraph, interrupted before generation and resumed"] = {
    "`SegmentsPlaceholder`": partial(resumed, write=list, prompt=PLACEHOLDER),
    "joined texts": resumed,
    "`Segments` in the state": partial(resumed, **KEPT),
}
ENTRIES["LangGraph, `ToolNode` with a retriever tool, then the model"] = {
    "`content`": tool_node,
    "`content_and_artifact`": partial(tool_node, **WITH_ARTIFACT),
}

# --- agents, and functions that return text -----------------------------------------------------------------------

RAG_PROMPT = ChatPromptTemplate.from_template(
    "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to answer the "
    "question. If you don't know the answer, just say that you don't know. Use three sentences maximum and keep the "
    "answer concise.\nQuestion: {question} \nContext: {context} \nAnswer:"
)
ASKED = {"messages": [("human", QUESTION)]}
AGAIN = {"messages": [("human", "Are you sure?")]}


def with_middleware(c):
    return create_agent(c.model, middleware=[ours.InvariantRAGMiddleware(c.retriever)])


def dynamic(c, context):
    """`context` is what returns a text for a question; so it is below."""

    @dynamic_prompt
    def prompt_with_context(request):
        found = context(request.state["messages"][-1].text)
        return f"You are a helpful assistant. Use the following context in your response:\n\n{found}"

    return create_agent(c.model, middleware=[prompt_with_context]).invoke(ASKED)


def in_a_lambda(c, context):
    return {"context": context, "question": INPUT} | RAG_PROMPT | c.model


def in_a_tool(c, context):
    return c.model.invoke(history(tool("search", description="Searches a store.")(context).invoke(SEARCH)))


def of_the_tutorial(retriever):
    found = each_as("Source: {all}\nContent: {text}")(retriever.documents), retriever.documents
    return tool("search", description="Searches a store.", **WITH_ARTIFACT)(lambda query: found)


def tool_agent(searches=searching, max_tokens=4, **options):
    """Ask an agent in two turns. It searches once: that is given, since random weights decide nothing."""

    @wrap_model_call
    def searching_once(request, handler):
        if any(isinstance(message, ToolMessage) for message in request.messages):
            settings = {"max_tokens": max_tokens, "parallel_tool_calls": False}
            return handler(request.override(tools=[], model_settings=settings))
        return history(result(""))[1]

    def ask(c):
        own = {"middleware": [searching_once], "checkpointer": InMemorySaver(), **options}
        saved = create_agent(c.model, [searches(c.retriever)], **own)
        turns = [saved.invoke(asked, THREAD) for asked in (ASKED, AGAIN)]
        return [repr(turn["structured_response"]) for turn in turns] if options else turns

    return ask


def second_turn(c):
    saved = create_agent(c.model, checkpointer=InMemorySaver())
    saved.invoke({"messages": [("system", f"Use this context:\n{joined(c.find())}"), *ASKED["messages"]]}, THREAD)
    return saved.invoke(AGAIN, THREAD)


def searched(door, write):
    """Ask through a door with a function that searches a store, and returns a text."""
    return lambda c: door(c, lambda query: f"{write(c.store().similarity_search(query))}")


ENTRIES["`create_agent`"] = {
    "`InvariantRAGMiddleware`": lambda c: with_middleware(c).invoke(ASKED),
    "`InvariantRAGMiddleware`, async": lambda c: asyncio.run(with_middleware(c).ainvoke(ASKED)),
    "`dynamic_prompt` that calls a retriever": lambda c: dynamic(c, lambda query: joined(c.retriever.invoke(query))),
    "two turns with a checkpointer, context in the first one's messages": second_turn,
}
ENTRIES["`create_agent` with a tool, in two turns"] = {
    "`create_retriever_tool`": tool_agent(),
    "`create_retriever_tool`, `content_and_artifact`": tool_agent(partial(searching, **WITH_ARTIFACT)),
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
