"""Entries in which documents are handed from step to step in other containers than a list in a dict."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypedDict

from langchain_core.documents import Document
from langchain_core.load import dumpd
from langchain_core.messages import ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel

from .base import ALL, BOUNDARIES, CHAT_PROMPT, NOTHING, QUESTION, entry, joined, text_of
from .graphs import THREAD
from .segments import history

GIVEN = "LangGraph, documents given as input"
SCORED = "`vector_store.similarity_search_with_score`, no retriever"
STATES = "LangGraph, interrupted before generation and resumed, with a state of another class"


class Given(TypedDict, total=False):
    found: Any
    more: Any
    answer: str


class Model(BaseModel):
    context: list[Document] = []
    answer: str = ""


@dataclass
class Data:
    context: list[Document] = field(default_factory=list)
    answer: str = ""


def answer_from(model: Any, context: str) -> dict[str, str]:
    return {"answer": (CHAT_PROMPT | model | StrOutputParser()).invoke({"context": context, "question": QUESTION})}


def given(model: Any, texts: Callable[[Any], str], **state: Any) -> str:
    """Ask in a graph of one node, which gets its documents from whoever calls the graph."""
    builder = StateGraph(Given)
    builder.add_node("generate", lambda found: answer_from(model, texts(found)))
    builder.add_edge(START, "generate")
    builder.add_edge("generate", END)
    return builder.compile().invoke(state)["answer"]


@entry(GIVEN, "a dict of lists", todo=NOTHING, models=ALL)
def nested(model: Any, retriever: Any) -> str:
    return given(model, lambda state: joined(state["found"]["here"]), found={"here": retriever.documents})


@entry(GIVEN, "`model_dump`, sent as JSON", todo=NOTHING, models=ALL)
def dumped(model: Any, retriever: Any) -> str:
    sent = json.loads(json.dumps([each.model_dump() for each in retriever.documents]))
    return given(model, lambda state: "\n".join(each["page_content"] for each in state["found"]), found=sent)


@entry(GIVEN, "`dumpd`", todo=NOTHING, models=ALL)
def serialized(model: Any, retriever: Any) -> str:
    sent = dumpd(retriever.documents)
    return given(model, lambda state: "\n".join(each["kwargs"]["page_content"] for each in state["found"]), found=sent)


@entry(GIVEN, "two lists", todo=NOTHING, models=ALL)
def two_lists(model: Any, retriever: Any) -> str:
    more = [Document("Bread costs two crowns."), Document("It rains.")]
    return given(
        model,
        lambda state: f"{joined(state['found'])}\n\nNews:\n\n{joined(state['more'])}",
        found=retriever.documents,
        more=more,
    )


def resumed(model: Any, retriever: Any, state: type) -> str:
    builder = StateGraph(state)
    builder.add_node("retrieve", lambda _: {"context": retriever.invoke(QUESTION)})
    builder.add_node("generate", lambda found: answer_from(model, joined(found.context)))
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "generate")
    builder.add_edge("generate", END)
    paused = builder.compile(checkpointer=InMemorySaver(), interrupt_before=["generate"])
    paused.invoke(state(), THREAD)
    return paused.invoke(None, THREAD)["answer"]


@entry(STATES, "Pydantic", todo=NOTHING, models=ALL)
def resumed_model(model: Any, retriever: Any) -> str:
    return resumed(model, retriever, Model)


@entry(STATES, "a dataclass", todo=NOTHING, models=ALL)
def resumed_data(model: Any, retriever: Any) -> str:
    return resumed(model, retriever, Data)


@entry(SCORED, "pairs, then joined texts", todo=NOTHING, models=ALL)
def scored(model: Any, retriever: Any) -> str:
    def search_with_score(query: str) -> list[tuple[Document, float]]:
        return [(each, 0.9) for each in retriever.documents]

    chain = RunnableLambda(search_with_score) | (lambda pairs: joined(each for each, _ in pairs))
    inputs = {"context": chain, "question": lambda question: question}
    return (inputs | CHAT_PROMPT | model | StrOutputParser()).invoke(QUESTION)


@entry(SCORED, "pairs as the artifact of a tool", todo=BOUNDARIES, models=("chat", "canonical", "vote"))
def scored_artifact(model: Any, retriever: Any) -> str:
    pairs = [(each, 0.9) for each in retriever.documents]
    return text_of(model.invoke(history(ToolMessage(joined(retriever.documents), tool_call_id="1", artifact=pairs))))
