"""Entries through the chains of LangChain that join documents, or ask about them in several calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_classic.chains import (
    ConversationalRetrievalChain,
    RetrievalQA,
    RetrievalQAWithSourcesChain,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.output_parsers import RegexParser
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.retrievers import BaseRetriever

from langchain_invariant_rag import SEGMENT_PROMPT, as_segments

from .base import ALL, FOUR, NOTHING, ONE_CALL, PASS_SEGMENTS, QUESTION, entry

PROMPT = ChatPromptTemplate.from_messages([("system", "Answer from this:\n\n{context}"), ("human", "{input}")])
HISTORY = [HumanMessage("Is there a ferry?"), AIMessage("Yes.")]
SOURCE_PROMPT = PromptTemplate.from_template("Source: {source}\nContent: {page_content}")

STUFF = "`create_retrieval_chain` with `create_stuff_documents_chain`"
QA = "`RetrievalQA`"


class AnyScore(RegexParser):
    """Takes any text for an answer; all are as good."""

    def parse(self, text: str) -> dict[str, str]:
        return {"answer": text, "score": "1"}


def retrieval_chain(model: Any, retriever: Any, **options: Any) -> str:
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(model, PROMPT, **options))
    return chain.invoke({"input": QUESTION})["answer"]


@entry(STUFF, "default", todo=NOTHING, models=ALL, documents=FOUR)
def default_retrieval_chain(model: Any, retriever: BaseRetriever) -> str:
    return retrieval_chain(model, retriever)


OPTIONS: dict[str, dict[str, Any]] = {
    "`document_prompt` with the source": {"document_prompt": SOURCE_PROMPT},
    "`document_separator`": {"document_separator": "\n\n---\n\n"},
    "both": {"document_prompt": SOURCE_PROMPT, "document_separator": "\n***\n"},
    "`SEGMENT_PROMPT`": {"document_prompt": SEGMENT_PROMPT},
}


def add_options() -> None:
    """Register one entry for each option of the stuff chain."""
    for variant, options in OPTIONS.items():
        entry(STUFF, variant, todo=NOTHING, models=ALL)(
            lambda model, retriever, options=options: retrieval_chain(model, retriever, **options)
        )


add_options()


@entry(STUFF, "over `as_segments(retriever)`", todo=NOTHING, models=ALL)
def stuffed_segments(model: Any, retriever: BaseRetriever) -> str:
    return retrieval_chain(model, as_segments(retriever))


@entry(STUFF, "with `create_history_aware_retriever`", todo=NOTHING, models=ALL)
def history_aware(model: Any, retriever: BaseRetriever) -> str:
    condense = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("human", "{input}"), ("human", "Say it in one question.")]
    )
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer from this:\n\n{context}"), MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )
    aware = create_history_aware_retriever(model, retriever, condense)
    chain = create_retrieval_chain(aware, create_stuff_documents_chain(model, prompt))
    return chain.invoke({"input": QUESTION, "chat_history": HISTORY})["answer"]


@entry("`create_stuff_documents_chain` over documents retrieved before", todo=PASS_SEGMENTS, warns=True, models=ALL)
def stuff_chain_alone(model: Any, retriever: BaseRetriever) -> str:
    chain = create_stuff_documents_chain(model, PROMPT)
    return chain.invoke({"context": retriever.invoke(QUESTION), "input": QUESTION})


def retrieval_qa(model: Any, retriever: BaseRetriever, kind: str, **options: Any) -> str:
    chain = RetrievalQA.from_chain_type(llm=model, chain_type=kind, retriever=retriever, chain_type_kwargs=options)
    return chain.invoke({"query": QUESTION})["result"]


@entry(QA, "`stuff`", todo=NOTHING, models=ALL)
def retrieval_qa_stuff(model: Any, retriever: BaseRetriever) -> str:
    return retrieval_qa(model, retriever, "stuff")


@entry(QA, "`stuff` with a `document_prompt`", todo=NOTHING, models=ALL)
def retrieval_qa_with_sources(model: Any, retriever: BaseRetriever) -> str:
    return retrieval_qa(model, retriever, "stuff", document_prompt=SOURCE_PROMPT)


@entry("`RetrievalQAWithSourcesChain`", todo=NOTHING, models=ALL)
def with_sources_chain(model: Any, retriever: BaseRetriever) -> str:
    prompt = PromptTemplate.from_template("{summaries}\n\n{question}")  # the default one is long, which takes time
    options = {"prompt": prompt}
    chain = RetrievalQAWithSourcesChain.from_chain_type(model, "stuff", retriever=retriever, chain_type_kwargs=options)
    return chain.invoke({"question": QUESTION})["answer"]


@entry("`ConversationalRetrievalChain`", todo=NOTHING, models=ALL)
def conversational(model: Any, retriever: BaseRetriever) -> str:
    chain = ConversationalRetrievalChain.from_llm(llm=model, retriever=retriever)
    return chain.invoke({"question": QUESTION, "chat_history": [("Is there a ferry?", "Yes.")]})["answer"]


RERANK_PROMPT = PromptTemplate(
    template="{context}\n\n{question}",
    input_variables=["context", "question"],
    output_parser=AnyScore(regex="(.*)", output_keys=["answer", "score"]),
)
SHORT_PROMPT = PromptTemplate.from_template("{context}\n\n{question}")
REDUCE_PROMPT = PromptTemplate.from_template("{summaries}\n\n{question}")
SEVERAL_CALLS: dict[str, Callable[[Any, BaseRetriever], str]] = {
    "`map_reduce`": lambda model, retriever: retrieval_qa(
        model, retriever, "map_reduce", question_prompt=SHORT_PROMPT, combine_prompt=REDUCE_PROMPT
    ),
    "`refine`": lambda model, retriever: retrieval_qa(model, retriever, "refine"),
    "`map_rerank`": lambda model, retriever: retrieval_qa(model, retriever, "map_rerank", prompt=RERANK_PROMPT),
}


def add_several_calls() -> None:
    """Register the chain types that ask about documents one by one."""
    for variant, answer in SEVERAL_CALLS.items():
        entry(QA, variant, todo=ONE_CALL, warns=True, models=ALL)(answer)


add_several_calls()


@entry("every document summarised by a call of its own, summaries joined", todo=ONE_CALL, warns=True, models=ALL)
def summaries(model: Any, retriever: BaseRetriever) -> str:
    one = ChatPromptTemplate.from_template("In one sentence: {text}") | model | StrOutputParser()
    texts = retriever | (lambda documents: [{"text": each.page_content} for each in documents]) | one.map()
    chain = texts | (lambda found: {"context": "\n\n".join(found), "input": QUESTION}) | PROMPT | model
    return (chain | StrOutputParser()).invoke(QUESTION)
