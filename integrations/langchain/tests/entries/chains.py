"""Entries in which a function, a template, a chain or a retriever of LangChain stands between documents and model."""

from __future__ import annotations

import json
import pickle
import pprint
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from langchain_classic.chains import (
    RetrievalQA,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MultiQueryRetriever,
    ParentDocumentRetriever,
)
from langchain_classic.retrievers.document_compressors import DocumentCompressorPipeline
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate, format_document
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import CharacterTextSplitter

from langchain_invariant_rag import (
    SEGMENT_PROMPT,
    Segments,
    SegmentsPlaceholder,
    as_segments,
    create_invariant_documents_chain,
)

from .base import (
    BOUNDARIES,
    CHAT_PROMPT,
    FOUR,
    NESTED,
    NOTHING,
    PASS_SEGMENTS,
    QUESTION,
    QUOTED,
    Answer,
    Entry,
    each_as,
    joined,
    lcel,
    rows,
)

FORMAT_DOCS = '`{"context": retriever | format_docs} | prompt | model`'
TEMPLATE = "documents formatted in the prompt template"
STUFF = "`create_retrieval_chain` with `create_stuff_documents_chain`"
WHOLE_TEXTS = "format documents whole and alike, or pass them as segments"
ONE_CALL = "ask once about all documents: chain type `stuff`"

SYSTEM = ChatPromptTemplate.from_messages([("system", "Answer from this:\n\n{context}"), ("human", "{question}")])
TWICE = ChatPromptTemplate.from_template("{context}\n\n{question}\nRead it again:\n\n{context}\n\n{question}")
PLACEHOLDER = ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])
SOURCE_PROMPT = PromptTemplate.from_template("Source: {source}\nContent: {page_content}")
SHORT_PROMPT = PromptTemplate.from_template("{context}\n\n{question}")
REDUCE_PROMPT = PromptTemplate.from_template("{summaries}\n\n{question}")

UNDERSTOOD: dict[str, Any] = {
    "joined by an empty line": joined,
    "bullets": each_as("- {text}", "\n"),
    '`<doc id="…">` with an id of the metadata': each_as('<doc id="{id}">{text}</doc>', "\n"),
    "`Source: …`, `Content: …`": each_as("Source: {source}\nContent: {text}"),
    "text, then `(source, page)`": each_as("{text} ({source}, p. {page})", "\n"),
    "JSON lines": lambda documents: "\n".join(
        json.dumps({"source": each.metadata["source"], "text": each.page_content}) for each in documents
    ),
}
NOT_UNDERSTOOD: dict[str, Any] = {
    "numbered `[1]`": each_as("[{n}] {text}"),
    "`Document 1 of 3`": each_as("Document {n} of 3\n{text}"),
    "XML with index and source": each_as('<document index="{n}"><source>{source}</source>{text}</document>', "\n"),
    "JSON list of texts": lambda documents: json.dumps([each.page_content for each in documents]),
    "`pprint`": pprint.pformat,
    "lettered": lambda documents: "\n".join(f"{chr(65 + n)}) {each.page_content}" for n, each in enumerate(documents)),
    "cut to 20 characters": lambda documents: "\n\n".join(each.page_content[:20] for each in documents),
    "upper case": lambda documents: joined(documents).upper(),
    "the first two only": lambda documents: joined(documents[:2]),
}


def variable_per_document(model: Any, retriever: Any) -> Any:
    prompt = ChatPromptTemplate.from_template("Document 1: {a}\nDocument 2: {b}\nDocument 3: {c}\n{question}")
    texts = {name: retriever | (lambda documents, n=n: documents[n].page_content) for n, name in enumerate("abc")}
    return ({**texts, "question": RunnablePassthrough()} | prompt | model).invoke(QUESTION)


def two_places(model: Any, retriever: Any) -> Any:
    other = retriever.model_copy(update={"documents": [Document("Bread costs two crowns."), Document("It rains.")]})
    prompt = ChatPromptTemplate.from_template("Facts:\n{facts}\n\nNews:\n{news}\n\n{question}")
    inputs = {
        "facts": itemgetter("question") | retriever | each_as("- {text}", "\n"),
        "news": itemgetter("question") | other | each_as("- {text}", "\n"),
        "question": itemgetter("question"),
    }
    return (inputs | prompt | model).invoke({"question": QUESTION})


in_template: dict[str, Answer] = {
    "the list in `{context}`": lcel(RunnablePassthrough()),
    "an f-string with one variable per document": variable_per_document,
}


# --- documents that keep their boundaries -------------------------------------------------------------------------


def found(ask: Callable[[Any, list[Document]], Any]) -> Answer:
    """Retrieve first, on its own, and then ask the model about the documents."""
    return lambda model, retriever: ask(model, retriever.invoke(QUESTION))


def formatted(shape: Callable[[list[Document]], Any], prompt: Any = CHAT_PROMPT) -> Answer:
    return found(lambda model, documents: (prompt | model).invoke({"context": shape(documents), "question": QUESTION}))


def stuffed(**options: Any) -> Answer:
    def ask(model: Any, documents: list[Document]) -> Any:
        chain = create_stuff_documents_chain(model, CHAT_PROMPT, **options)
        return chain.invoke({"context": documents, "question": QUESTION})

    return found(ask)


SHAPES: dict[str, Callable[[list[Document]], Any]] = {
    "as they are": Segments,
    "a sum with a list": lambda documents: Segments(documents[:1]) + documents[1:],
    "pickled": lambda documents: pickle.loads(pickle.dumps(Segments(documents))),
    "in an f-string": lambda documents: f"Read this:\n{Segments(documents)}",
}
KEYWORDS: dict[str, Callable[[Any, list[Document]], Any]] = {
    "on `invoke`": lambda model, documents: model.invoke(QUESTION, documents=documents),
    "on `stream`": lambda model, documents: [*model.stream(QUESTION, documents=documents)],
    "on `batch`": lambda model, documents: model.batch([QUESTION, "Who?"], documents=documents),
    "bound, in a chain": lambda model, documents: (
        PromptTemplate.from_template("{question}") | model.bind(documents=documents)
    ).invoke({"question": QUESTION}),
}


def numbered_marks(documents: list[Document]) -> str:
    return "\n".join(f"[{n}] {format_document(each, SEGMENT_PROMPT)}" for n, each in enumerate(documents, 1))


# --- chains -------------------------------------------------------------------------------------------------------


def retrieval_chain(over: Any = None, **options: Any) -> Answer:
    def answer(model: Any, retriever: Any) -> Any:
        retrieved = retriever if over is None else over(model, retriever)
        prompt = ChatPromptTemplate.from_messages([("system", "Answer from this:\n\n{context}"), ("human", "{input}")])
        chain = create_retrieval_chain(retrieved, create_stuff_documents_chain(model, prompt, **options))
        return chain.invoke({"input": QUESTION, "chat_history": [HumanMessage("Is there a ferry?"), AIMessage("Yes.")]})

    return answer


def history_aware(model: Any, retriever: Any) -> Any:
    condense = ChatPromptTemplate.from_messages([MessagesPlaceholder("chat_history"), ("human", "{input} In short?")])
    return create_history_aware_retriever(model, retriever, condense)


def retrieval_qa(kind: str, **options: Any) -> Answer:
    return lambda model, retriever: RetrievalQA.from_chain_type(
        llm=model, chain_type=kind, retriever=retriever, chain_type_kwargs=options
    ).invoke({"query": QUESTION})


# --- retrievers over others ---------------------------------------------------------------------------------------


class ListedStore(InMemoryVectorStore):
    """A vector store that finds everything, in the order in which it was added, and equally near."""

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return [each for each, _ in self.similarity_search_with_relevance_scores(query)]

    def similarity_search_with_relevance_scores(self, query: str, k: int = 4, **kwargs: Any) -> Any:
        stored = self.store.values()
        return [(Document(each["text"], id=each["id"], metadata=dict(each["metadata"])), 1.0) for each in stored]


def listed_store(documents: list[Document]) -> ListedStore:
    store = ListedStore(DeterministicFakeEmbedding(size=8))
    store.add_documents(list(documents))  # no retriever runs: nothing is known from before
    return store


def words(size: int) -> CharacterTextSplitter:
    return CharacterTextSplitter(separator=" ", chunk_size=size, chunk_overlap=0)


def split_anew(model: Any, retriever: Any) -> Any:
    pipeline = DocumentCompressorPipeline(transformers=[words(20)])
    return ContextualCompressionRetriever(base_compressor=pipeline, base_retriever=retriever)


def parents(model: Any, retriever: Any) -> Any:
    both = ParentDocumentRetriever(vectorstore=listed_store([]), docstore=InMemoryStore(), child_splitter=words(15))
    both.add_documents(list(retriever.documents))
    return both


OVER: dict[str, Any] = {
    "`VectorStoreRetriever`": lambda model, retriever: listed_store(retriever.documents).as_retriever(),
    "`EnsembleRetriever`": lambda model, retriever: EnsembleRetriever(retrievers=[retriever] * 2, weights=[0.5, 0.5]),
    "`MultiQueryRetriever`": lambda model, retriever: MultiQueryRetriever.from_llm(retriever, model),
    "`ContextualCompressionRetriever` that splits": split_anew,
    "`ParentDocumentRetriever`": parents,
}
OVER_OTHERS = "a retriever over others, then `format_docs`"

ENTRIES: list[Entry] = [
    *rows(FORMAT_DOCS, NOTHING, {name: lcel(each) for name, each in UNDERSTOOD.items()}),
    *rows(FORMAT_DOCS, NOTHING, {"context in the system message": lcel(prompt=SYSTEM)}),
    *rows(FORMAT_DOCS, NOTHING, {"a prompt template for completion models": lcel(prompt=SHORT_PROMPT)}),
    *rows(FORMAT_DOCS, WHOLE_TEXTS, {name: lcel(each) for name, each in NOT_UNDERSTOOD.items()}, warns=True),
    *rows(FORMAT_DOCS, WHOLE_TEXTS, {"one document within another": lcel()}, warns=True, documents=NESTED),
    *rows(FORMAT_DOCS, WHOLE_TEXTS, {"context twice": lcel(prompt=TWICE)}, warns=True),
    *rows(
        FORMAT_DOCS, WHOLE_TEXTS, {"JSON that escapes": lcel(NOT_UNDERSTOOD["JSON list of texts"])},
        warns=True, documents=QUOTED,
    ),
    *rows(TEMPLATE, WHOLE_TEXTS, in_template, warns=True),
    *rows(TEMPLATE, NOTHING, {"two retrievers, two places": two_places}),
    *rows("`Segments` in a text template", BOUNDARIES, {name: formatted(each) for name, each in SHAPES.items()}),
    *rows(
        "`as_segments(retriever)` in front of a text template", BOUNDARIES,
        {"": lcel(RunnablePassthrough(), over=lambda model, retriever: as_segments(retriever))},
    ),
    *rows("`SegmentsPlaceholder`", BOUNDARIES, {"in a chain": lcel(RunnablePassthrough(), PLACEHOLDER)}),
    *rows("`SegmentsPlaceholder`", BOUNDARIES, {"retrieved before": formatted(list, PLACEHOLDER)}, documents=FOUR),
    *rows("`SegmentsPlaceholder`", BOUNDARIES, {"nested": lcel(RunnablePassthrough(), PLACEHOLDER)}, documents=NESTED),
    *rows(
        "`create_invariant_documents_chain`", BOUNDARIES,
        {"": found(lambda model, documents: create_invariant_documents_chain(model, PLACEHOLDER).invoke(
            {"context": documents, "question": QUESTION}))},
    ),
    *rows(
        "`document_prompt=SEGMENT_PROMPT`", BOUNDARIES,
        {
            "in the stuff chain": stuffed(document_prompt=SEGMENT_PROMPT),
            'with `+ "\\n"`': stuffed(document_prompt=SEGMENT_PROMPT + "\n"),
        },
    ),
    *rows(
        "`document_prompt=SEGMENT_PROMPT`", PASS_SEGMENTS,
        {"in a `format_docs` that numbers": formatted(numbered_marks)}, warns=True,
    ),
    *rows("`documents=`", BOUNDARIES, {name: found(each) for name, each in KEYWORDS.items()}),
    *rows(
        "`documents=`", "bind it, or no document is read: `prompt | model.bind(documents=documents)`",
        {"on `prompt | model`, which passes it to the prompt": found(
            lambda model, documents: (SHORT_PROMPT.partial(context="") | model).invoke(
                {"question": QUESTION}, documents=documents))},
        drops=True,
    ),
    *rows(STUFF, NOTHING, {"default": retrieval_chain()}, documents=FOUR),
    *rows(
        STUFF, NOTHING,
        {
            "`document_prompt` with the source": retrieval_chain(document_prompt=SOURCE_PROMPT),
            "over `as_segments(retriever)`": retrieval_chain(lambda model, retriever: as_segments(retriever)),
            "with `create_history_aware_retriever`": retrieval_chain(history_aware),
        },
    ),
    *rows("`create_stuff_documents_chain` over documents retrieved before", PASS_SEGMENTS, {"": stuffed()}, warns=True),
    *rows("`RetrievalQA`", NOTHING, {"`stuff`": retrieval_qa("stuff")}),
    *rows(
        "`RetrievalQA`", ONE_CALL,
        {
            "`map_reduce`": retrieval_qa("map_reduce", question_prompt=SHORT_PROMPT, combine_prompt=REDUCE_PROMPT),
            "`refine`": retrieval_qa("refine"),
        },
        warns=True,
    ),
    *rows(OVER_OTHERS, NOTHING, {name: lcel(over=each) for name, each in OVER.items()}),
    *rows(
        "`vector_store.similarity_search`, no retriever", PASS_SEGMENTS,
        {"numbered texts": lcel(each_as("Document {n}: {text}"), over=lambda model, retriever: RunnableLambda(
            listed_store(retriever.documents).similarity_search))},
        warns=True,
    ),
]  # fmt: skip
