"""Entries through what LangChain composes of a retriever and a model: calls, lambdas, fallbacks, histories, runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotChatMessagePromptTemplate,
    FewShotPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    ConfigurableField,
    Runnable,
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    chain,
)
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import create_retriever_tool

from .base import ALL, CHAT_PROMPT, NOTHING, PASS_SEGMENTS, QUESTION, entry, joined, text_of
from .texts import format_each, lcel

CALLED = "`chain`, called with"
COMPOSED = "composed"
PROMPTED = "other prompts around `format_docs`"
BY_HAND = "labelled texts in a string, no retriever"
NUMBERED = format_each("[{n}] {text}", "\n")
OBJECT = {
    "title": "Answer",
    "type": "object",
    "properties": {"who": {"type": "string", "maxLength": 4}},
    "required": ["who"],
}


def rag(model: Any, retriever: BaseRetriever, format_docs: Any = joined) -> Runnable[str, str]:
    context = {"context": retriever | format_docs, "question": RunnablePassthrough()}
    return context | CHAT_PROMPT | model | StrOutputParser()


async def collected(pieces: Any) -> list[Any]:
    return [piece async for piece in pieces]


def last_output(events: list[Any]) -> str:
    return str(events[-1]["data"]["output"])


CALLS: dict[str, Callable[[Runnable[str, str]], Any]] = {
    "`batch`": lambda rag: rag.batch([QUESTION, "Who built it?"]),
    "`stream`": lambda rag: [*rag.stream(QUESTION)],
    "`transform`": lambda rag: [*rag.transform(iter([QUESTION]))],
    "`ainvoke`": lambda rag: asyncio.run(rag.ainvoke(QUESTION)),
    "`abatch`": lambda rag: asyncio.run(rag.abatch([QUESTION, "Who built it?"])),
    "`astream`": lambda rag: asyncio.run(collected(rag.astream(QUESTION))),
    "`astream_events`": lambda rag: last_output(asyncio.run(collected(rag.astream_events(QUESTION, version="v2")))),
    "`.map()`": lambda rag: rag.map().invoke([QUESTION, "Who built it?"]),
    "`with_retry`": lambda rag: rag.with_retry().invoke(QUESTION),
    "`with_config`": lambda rag: rag.with_config(run_name="rag", tags=["rag"]).invoke(QUESTION),
}


def add_calls() -> None:
    """Register one entry for each way of calling a chain."""
    for variant, call in CALLS.items():
        entry(CALLED, variant, todo=NOTHING, models=ALL)(
            lambda model, retriever, call=call: text_of(call(rag(model, retriever)))
        )


add_calls()


@entry(COMPOSED, "`RunnableParallel` that returns the sources", todo=NOTHING, models=ALL)
def with_sources(model: Any, retriever: BaseRetriever) -> str:
    answer = (
        RunnablePassthrough.assign(context=lambda x: joined(x["context"])) | CHAT_PROMPT | model | StrOutputParser()
    )
    inputs = RunnableParallel(context=retriever, question=RunnablePassthrough())
    return inputs.assign(answer=answer).invoke(QUESTION)["answer"]


@entry(COMPOSED, "`RunnablePassthrough.assign`, `itemgetter`, `pick`", todo=NOTHING, models=ALL)
def assigned(model: Any, retriever: BaseRetriever) -> str:
    context = RunnablePassthrough.assign(context=itemgetter("question") | retriever | joined)
    asked = context | RunnablePassthrough.assign(answer=CHAT_PROMPT | model | StrOutputParser())
    return asked.pick("answer").invoke({"question": QUESTION})


@entry(COMPOSED, "`RunnableBranch`", todo=NOTHING, models=ALL)
def branch(model: Any, retriever: BaseRetriever) -> str:
    return RunnableBranch((lambda question: "ferry" in question, rag(model, retriever)), model).invoke(QUESTION)


@entry(COMPOSED, "`RunnableLambda` that calls both", todo=PASS_SEGMENTS, warns=True, models=ALL)
def function(model: Any, retriever: BaseRetriever) -> str:
    def ask(question: str) -> str:
        return text_of(model.invoke(f"{joined(retriever.invoke(question))}\n\n{question}"))

    return RunnableLambda(ask).invoke(QUESTION)


@entry(COMPOSED, "an async `RunnableLambda`", todo=PASS_SEGMENTS, warns=True, models=ALL)
def async_function(model: Any, retriever: BaseRetriever) -> str:
    async def ask(question: str) -> str:
        return text_of(await model.ainvoke(f"{NUMBERED(await retriever.ainvoke(question))}\n\n{question}"))

    return asyncio.run(RunnableLambda(ask).ainvoke(QUESTION))


@entry(COMPOSED, "`@chain`", todo=NOTHING, models=ALL)
def decorated_function(model: Any, retriever: BaseRetriever) -> str:
    @chain
    def ask(question: str) -> str:
        documents = retriever.invoke(question)
        return (CHAT_PROMPT | model | StrOutputParser()).invoke({"context": joined(documents), "question": question})

    return ask.invoke(QUESTION)


@entry(COMPOSED, "a generator that streams", todo=PASS_SEGMENTS, warns=True, models=ALL)
def generator(model: Any, retriever: BaseRetriever) -> str:
    @chain
    def ask(question: str) -> Any:
        yield from model.stream(f"{joined(retriever.invoke(question))}\n\n{question}")

    return text_of([*ask.stream(QUESTION)])


def broken(_: Any) -> Any:
    raise ConnectionError("the provider is down")


@entry(COMPOSED, "`with_fallbacks`", todo=NOTHING, models=ALL)
def fallback(model: Any, retriever: BaseRetriever) -> str:
    return lcel(RunnableLambda(broken).with_fallbacks([model]), retriever, joined)


@entry(COMPOSED, "`configurable_fields`", todo=NOTHING)
def configurable(model: Any, retriever: BaseRetriever) -> str:
    chosen = model.configurable_fields(max_tokens=ConfigurableField("length"))
    return rag(chosen, retriever, joined).with_config(configurable={"length": 10}).invoke(QUESTION)


@entry(COMPOSED, "the method as a configurable field", todo=NOTHING, models=("chat", "completion"))
def configured_method(model: Any, retriever: BaseRetriever) -> str:
    plain = type(model)(model=model.model, method="sequential", max_tokens=model.max_tokens)
    chosen = plain.configurable_fields(method=ConfigurableField("method"))
    return rag(chosen, retriever).with_config(configurable={"method": model.method}).invoke(QUESTION)


@entry(COMPOSED, "`configurable_alternatives`", todo=NOTHING, models=ALL)
def alternatives(model: Any, retriever: BaseRetriever) -> str:
    default = FakeListChatModel(responses=["not asked"])
    chosen = default.configurable_alternatives(ConfigurableField("model"), default_key="default", ours=model)
    return rag(chosen, retriever).with_config(configurable={"model": "ours"}).invoke(QUESTION)


@entry(COMPOSED, "`with_structured_output`", todo=NOTHING)
def structured(model: Any, retriever: BaseRetriever) -> str:
    longer = model.model_copy(update={"max_tokens": 30})
    context = {"context": retriever | joined, "question": RunnablePassthrough()}
    return repr((context | CHAT_PROMPT | longer.with_structured_output(OBJECT)).invoke(QUESTION))


@entry(PROMPTED, "`MessagesPlaceholder` with a history", todo=NOTHING, models=ALL)
def with_history(model: Any, retriever: BaseRetriever) -> str:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer from this:\n{context}"), MessagesPlaceholder("history"), ("human", "{question}")]
    ).partial(history=[("human", "Hello."), ("ai", "Hello. What would you like to know?")])
    return lcel(model, retriever, joined, prompt)


@entry(PROMPTED, "`RunnableWithMessageHistory`", todo=NOTHING)
def message_history(model: Any, retriever: BaseRetriever) -> str:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer from this:\n{context}"), MessagesPlaceholder("history"), ("human", "{question}")]
    )
    context = RunnablePassthrough.assign(context=itemgetter("question") | retriever | joined)
    said = InMemoryChatMessageHistory()
    talk = RunnableWithMessageHistory(
        context | prompt | model,
        lambda: said,
        input_messages_key="question",
        history_messages_key="history",
        history_factory_config=[],
    )
    return text_of([talk.invoke({"question": question}) for question in ("Is there a ferry?", QUESTION)])


@entry(PROMPTED, "`FewShotChatMessagePromptTemplate`", todo=NOTHING, models=ALL)
def few_shot_chat(model: Any, retriever: BaseRetriever) -> str:
    shots = FewShotChatMessagePromptTemplate(
        examples=[{"q": "Context: Bread costs two crowns.\nHow much is bread?", "a": "Two crowns."}],
        example_prompt=ChatPromptTemplate.from_messages([("human", "{q}"), ("ai", "{a}")]),
    )
    prompt = ChatPromptTemplate.from_messages([shots, ("human", "Context: {context}\n{question}")])
    return lcel(model, retriever, joined, prompt)


@entry(PROMPTED, "`FewShotPromptTemplate`", todo=NOTHING, models=ALL)
def few_shot(model: Any, retriever: BaseRetriever) -> str:
    prompt = FewShotPromptTemplate(
        examples=[{"q": "How much is bread?", "a": "Two crowns."}, {"q": "Is it raining?", "a": "No."}],
        example_prompt=PromptTemplate.from_template("Q: {q}\nA: {a}"),
        suffix="{context}\n\nQ: {question}\nA:",
        input_variables=["context", "question"],
    )
    return lcel(model, retriever, joined, prompt)


@entry("documents retrieved before, as a list in an f-string", todo=PASS_SEGMENTS, warns=True, models=ALL)
def list_in_a_string(model: Any, retriever: BaseRetriever) -> str:
    return text_of(model.invoke(f"{retriever.invoke(QUESTION)}\n\n{QUESTION}"))


OUTSIDE: dict[str, Callable[[BaseRetriever], str]] = {
    "empty lines": lambda retriever: joined(retriever.invoke(QUESTION)),
    "bullets": lambda retriever: "\n".join(f"- {each.page_content}" for each in retriever.invoke(QUESTION)),
    "from a chain": lambda retriever: (retriever | joined).invoke(QUESTION),
    "from `create_retriever_tool`": lambda retriever: create_retriever_tool(retriever, "search", "Searches.").invoke(
        {"query": QUESTION}
    ),
}


ON_ITS_OWN = "a retriever on its own, its texts joined by hand, the model in another call"


def add_outside() -> None:
    for variant, retrieve in OUTSIDE.items():

        def answer(model: Any, retriever: BaseRetriever, retrieve: Any = retrieve) -> str:
            text = retrieve(retriever)
            return text_of(model.invoke(f"{text}\n\n{QUESTION}"))

        entry(ON_ITS_OWN, variant, todo=PASS_SEGMENTS, warns=True, models=ALL)(answer)


add_outside()


@entry(ON_ITS_OWN, "awaited", todo=PASS_SEGMENTS, warns=True, models=ALL)
def awaited(model: Any, retriever: BaseRetriever) -> str:
    async def ask() -> Any:
        found = await retriever.ainvoke(QUESTION)
        return await model.ainvoke(f"{joined(found)}\n\n{QUESTION}")

    return text_of(asyncio.run(ask()))


LABELS = {
    "`Document 1: …`": format_each("Document {n}: {text}", "\n"),
    "`<doc id=1>…`": format_each("<doc id={n}>{text}</doc>", "\n"),
    "`Source: …`, `Content: …`": format_each("Source: {source}\nContent: {text}"),
}


def add_labels() -> None:
    """Register the entries in which only the labels say that there are documents: nothing was retrieved."""
    for variant, format_docs in LABELS.items():
        entry(BY_HAND, variant, todo=PASS_SEGMENTS, warns=True, models=ALL)(
            lambda model, retriever, format_docs=format_docs: text_of(
                model.invoke(
                    f"Answer from these documents.\n\n{format_docs(retriever.documents)}\n\nQuestion: {QUESTION}"
                )
            )
        )


add_labels()
