"""Entries in which documents keep their boundaries: `Segments`, placeholders, marks, keywords and artifacts."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from typing import Any

from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate, format_document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough

from langchain_invariant_rag import (
    SEGMENT_PROMPT,
    Segments,
    SegmentsPlaceholder,
    as_segments,
    create_invariant_documents_chain,
)

from .base import ALL, BOUNDARIES, CHAT_PROMPT, FOUR, NESTED, PASS_SEGMENTS, QUESTION, entry, joined, text_of

PLACEHOLDER = ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])

IN_TEMPLATE = "`Segments` in a text template"
MARKED = "`document_prompt=SEGMENT_PROMPT`"
KEYWORD = "`documents=`"
TOOL = "`ToolMessage` in the history"


def ask(model: Any, prompt: Any, context: Any) -> str:
    return (prompt | model | StrOutputParser()).invoke({"context": context, "question": QUESTION})


SHAPES: dict[str, Callable[[list[Document]], Any]] = {
    "as they are": Segments,
    "a slice": lambda documents: Segments(documents)[:],
    "a sum": lambda documents: Segments(documents[:1]) + Segments(documents[1:]),
    "a sum with a list": lambda documents: Segments(documents[:1]) + documents[1:],
    "a list plus segments": lambda documents: documents[:1] + Segments(documents[1:]),
    "`.copy()`": lambda documents: Segments(documents).copy(),
    "`copy.copy`": lambda documents: copy.copy(Segments(documents)),
    "`copy.deepcopy`": lambda documents: copy.deepcopy(Segments(documents)),
    "pickled": lambda documents: pickle.loads(pickle.dumps(Segments(documents))),
    "times 1": lambda documents: Segments(documents) * 1,
    "in an f-string": lambda documents: f"Read this:\n{Segments(documents)}",
    "`str`": lambda documents: str(Segments(documents)),
    "`repr`": lambda documents: repr(Segments(documents)),
}


def add_shapes() -> None:
    """Register one entry for each thing that Python does with a list."""
    for variant, shape in SHAPES.items():
        entry(IN_TEMPLATE, variant, todo=BOUNDARIES, models=ALL)(
            lambda model, retriever, shape=shape: ask(model, CHAT_PROMPT, shape(retriever.invoke(QUESTION)))
        )


add_shapes()


@entry("`as_segments(retriever)` in front of a text template", todo=BOUNDARIES, models=ALL)
def wrapped_retriever(model: Any, retriever: BaseRetriever) -> str:
    context = {"context": as_segments(retriever), "question": RunnablePassthrough()}
    return (context | CHAT_PROMPT | model | StrOutputParser()).invoke(QUESTION)


@entry("`SegmentsPlaceholder`", "in a chain", todo=BOUNDARIES, models=ALL)
def placeholder(model: Any, retriever: BaseRetriever) -> str:
    context = {"context": retriever, "question": RunnablePassthrough()}
    return (context | PLACEHOLDER | model | StrOutputParser()).invoke(QUESTION)


@entry("`SegmentsPlaceholder`", "documents retrieved before", todo=BOUNDARIES, models=ALL, documents=FOUR)
def placeholder_of_retrieved(model: Any, retriever: BaseRetriever) -> str:
    return ask(model, PLACEHOLDER, retriever.invoke(QUESTION))


@entry("`SegmentsPlaceholder`", "one document within another", todo=BOUNDARIES, models=ALL, documents=NESTED)
def placeholder_of_nested(model: Any, retriever: BaseRetriever) -> str:
    return placeholder(model, retriever)


@entry("`create_invariant_documents_chain`", todo=BOUNDARIES, models=ALL)
def our_chain(model: Any, retriever: BaseRetriever) -> str:
    chain = create_invariant_documents_chain(model, PLACEHOLDER)
    return chain.invoke({"context": retriever.invoke(QUESTION), "question": QUESTION})


def stuffed(model: Any, retriever: BaseRetriever, **options: Any) -> str:
    chain = create_stuff_documents_chain(model, CHAT_PROMPT, **options)
    return chain.invoke({"context": retriever.invoke(QUESTION), "question": QUESTION})


@entry(MARKED, "in the stuff chain", todo=BOUNDARIES, models=ALL)
def segment_prompt(model: Any, retriever: BaseRetriever) -> str:
    return stuffed(model, retriever, document_prompt=SEGMENT_PROMPT)


@entry(MARKED, "with a `document_separator`", todo=BOUNDARIES, models=ALL)
def segment_prompt_and_separator(model: Any, retriever: BaseRetriever) -> str:
    return stuffed(model, retriever, document_prompt=SEGMENT_PROMPT, document_separator="\n---\n")


@entry(MARKED, 'with `+ "\\n"`', todo=BOUNDARIES, models=ALL)
def segment_prompt_and_line_break(model: Any, retriever: BaseRetriever) -> str:
    return stuffed(model, retriever, document_prompt=SEGMENT_PROMPT + "\n")


@entry(MARKED, "in a `format_docs` that numbers", todo=BOUNDARIES, models=ALL)
def numbered_marks(model: Any, retriever: BaseRetriever) -> str:
    found = [format_document(document, SEGMENT_PROMPT) for document in retriever.invoke(QUESTION)]
    return ask(model, CHAT_PROMPT, "\n".join(f"[{number}] {text}" for number, text in enumerate(found, 1)))


KEYWORDS: dict[str, Callable[[Any, list[Document]], Any]] = {
    "on `invoke`": lambda model, documents: model.invoke(QUESTION, documents=documents),
    "on `ainvoke`": lambda model, documents: asyncio.run(model.ainvoke(QUESTION, documents=documents)),
    "on `stream`": lambda model, documents: [*model.stream(QUESTION, documents=documents)],
    "on `batch`": lambda model, documents: model.batch([QUESTION, "Who?"], documents=documents),
    "bound": lambda model, documents: model.bind(documents=documents).invoke(QUESTION),
    "bound, in a chain": lambda model, documents: (
        PromptTemplate.from_template("{question}") | model.bind(documents=documents)
    ).invoke({"question": QUESTION}),
    "on a chain whose first step is the model": lambda model, documents: (model | StrOutputParser()).invoke(
        QUESTION, documents=documents
    ),
    "a generator": lambda model, documents: model.invoke(QUESTION, documents=(each for each in documents)),
    "bound, with `with_retry`": lambda model, documents: (
        model.bind(documents=iter(documents)).with_retry().invoke(QUESTION)
    ),
}


def add_keywords() -> None:
    """Register one entry for each call that takes `documents=`."""
    for variant, call in KEYWORDS.items():
        entry(KEYWORD, variant, todo=BOUNDARIES, models=ALL)(
            lambda model, retriever, call=call: text_of(call(model, retriever.invoke(QUESTION)))
        )


add_keywords()


@entry(
    KEYWORD,
    "on `prompt | model`, which passes it to the prompt",
    todo="bind it: `prompt | model.bind(documents=documents)`",
    warns=True,
    drops=True,
    models=ALL,
)
def keyword_of_a_chain(model: Any, retriever: BaseRetriever) -> str:
    chain = PromptTemplate.from_template("{question}") | model | StrOutputParser()
    return chain.invoke({"question": QUESTION}, documents=retriever.invoke(QUESTION))


def history(message: ToolMessage) -> list[Any]:
    call = AIMessage("", tool_calls=[{"name": "search", "args": {"query": "ferry"}, "id": "1"}])
    return [HumanMessage(QUESTION), call, message]


@entry(TOOL, "documents in the artifact", todo=BOUNDARIES, models=("chat", "canonical", "vote"))
def artifact(model: Any, retriever: BaseRetriever) -> str:
    found = retriever.invoke(QUESTION)
    return text_of(model.invoke(history(ToolMessage(joined(found), tool_call_id="1", artifact=found))))


@entry(TOOL, "`Segments` as its text", todo=BOUNDARIES, models=("chat", "canonical", "vote"))
def marked_tool_message(model: Any, retriever: BaseRetriever) -> str:
    found = retriever.invoke(QUESTION)
    return text_of(model.invoke(history(ToolMessage(str(Segments(found)), tool_call_id="1"))))


@entry(TOOL, "joined texts, retrieved before", todo=PASS_SEGMENTS, warns=True, models=("chat", "canonical", "vote"))
def joined_tool_message(model: Any, retriever: BaseRetriever) -> str:
    found = retriever.invoke(QUESTION)
    return text_of(model.invoke(history(ToolMessage(joined(found), tool_call_id="1"))))
