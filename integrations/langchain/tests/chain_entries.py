"""Entries in which a function, a template, a chain or a retriever of LangChain stands between documents and model."""

import json
import pickle
import pprint
from functools import partial

from langchain_classic import chains, retrievers
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers.document_compressors import DocumentCompressorPipeline
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate, format_document
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import CharacterTextSplitter

from langchain_invariant_rag import SEGMENT_PROMPT, Segments, as_segments, create_invariant_documents_chain

from .entries import BOUNDARIES, NOTHING, PASS_SEGMENTS, add, each_as, lcel
from .shared import DOCUMENTS, PLACEHOLDER, QUESTION, TEMPLATE, Listed, joined

WHOLE_TEXTS = "format documents whole and alike, or pass them as segments"
FOUR = (*DOCUMENTS, Document("Salt is sold in Brenn.", metadata={"source": "trade.txt", "id": "s-2", "page": 1}))
QUOTED = (
    Document('The pilot said "noon",\nand left.', metadata={"source": "ferry.txt"}),
    Document("It's two bakeries:\n- Alma's\n- Timo's", metadata={"source": "town.txt"}),
    Document('Carno\'s "light" has a \\ on its door.', metadata={"source": "coast.txt"}),
)
NESTED = tuple(map(Document, ("The ferry leaves at noon.", "The ferry leaves at noon. It is salt.", "It is salt.")))
LIST = RunnablePassthrough()
"""In place of a `format_docs`."""

# --- documents formatted as text ----------------------------------------------------------------------------------

FORMAT_DOCS = '`{"context": retriever | format_docs} | prompt | model`'
SYSTEM = ChatPromptTemplate.from_messages([("system", "Answer from this:\n\n{context}"), ("human", "{question}")])
SHORT_PROMPT = PromptTemplate.from_template("{context}\n\n{question}")
TWICE = ChatPromptTemplate.from_template("{context}\n\n{question}\nRead it again:\n\n{context}\n\n{question}")
BULLETS = each_as("- {text}", "\n")


def json_lines(documents):
    listed = [{"source": each.metadata["source"], "text": each.page_content} for each in documents]
    return "\n".join(map(json.dumps, listed))


def json_list(documents):
    return json.dumps([each.page_content for each in documents])


add(FORMAT_DOCS, NOTHING, {
    "joined by an empty line": lcel(),
    "bullets": lcel(BULLETS),
    '`<doc id="…">` with an id of the metadata': lcel(each_as('<doc id="{id}">{text}</doc>', "\n")),
    "`Source: …`, `Content: …`": lcel(each_as("Source: {source}\nContent: {text}")),
    "text, then `(source, page)`": lcel(each_as("{text} ({source}, p. {page})", "\n")),
    "JSON lines": lcel(json_lines),
    "context in the system message": lcel(prompt=SYSTEM),
    "a prompt template for completion models": lcel(prompt=SHORT_PROMPT),
})  # fmt: skip
add(FORMAT_DOCS, WHOLE_TEXTS, {
    "numbered `[1]`": lcel(each_as("[{n}] {text}")),
    "`Document 1 of 3`": lcel(each_as("Document {n} of 3\n{text}")),
    "XML with index and source": lcel(each_as('<document index="{n}"><source>{source}</source>{text}</document>')),
    "JSON list of texts": lcel(json_list),
    "`pprint`": lcel(pprint.pformat),
    "lettered": lcel(each_as("{letter}) {text}", "\n")),
    "cut to 20 characters": lcel(lambda documents: "\n\n".join(each.page_content[:20] for each in documents)),
    "upper case": lcel(lambda documents: joined(documents).upper()),
    "the first two only": lcel(lambda documents: joined(documents[:2])),
}, warns=True)  # fmt: skip
add(FORMAT_DOCS, WHOLE_TEXTS, {"one document within another": lcel()}, warns=True, documents=NESTED)
add(FORMAT_DOCS, WHOLE_TEXTS, {"context twice": lcel(prompt=TWICE)}, warns=True)
add(FORMAT_DOCS, WHOLE_TEXTS, {"JSON that escapes": lcel(json_list)}, warns=True, documents=QUOTED)

FORMATTED = "documents formatted in the prompt template"
SEPARATE = ChatPromptTemplate.from_template("Document 1: {a}\nDocument 2: {b}\nDocument 3: {c}\n{question}")
TWO_PLACES = ChatPromptTemplate.from_template("Facts:\n{facts}\n\nNews:\n{news}\n\n{question}")
NEWS = Listed(documents=[Document("Bread costs two crowns."), Document("It rains.")])


def by_letter(documents):
    a, b, c = (each.page_content for each in documents)
    return {"a": a, "b": b, "c": c, "question": QUESTION}


add(FORMATTED, WHOLE_TEXTS, {
    "the list in `{context}`": lcel(LIST),
    "an f-string with one variable per document": lambda model, retriever: (
        retriever | by_letter | SEPARATE | model
    ).invoke(QUESTION),
}, warns=True)  # fmt: skip
add(FORMATTED, NOTHING, {
    "two retrievers, two places": lambda model, retriever: (
        {"facts": retriever | BULLETS, "news": NEWS | BULLETS, "question": LIST} | TWO_PLACES | model
    ).invoke(QUESTION),
})  # fmt: skip

# --- documents that keep their boundaries -------------------------------------------------------------------------


def found(ask):
    """Retrieve first, on its own, and then ask the model about the documents."""
    return lambda model, retriever: ask(model, retriever.invoke(QUESTION))


def formatted(shape, prompt=TEMPLATE):
    return found(lambda model, documents: (prompt | model).invoke({"context": shape(documents), "question": QUESTION}))


def stuffed(create=create_stuff_documents_chain, prompt=TEMPLATE, **options):
    asked = {"question": QUESTION}
    return found(lambda model, documents: create(model, prompt, **options).invoke({"context": documents, **asked}))


def numbered_marks(documents):
    return "\n".join(f"[{n}] {format_document(each, SEGMENT_PROMPT)}" for n, each in enumerate(documents, 1))


def over_segments(model, retriever):
    return as_segments(retriever)


add("`Segments` in a text template", BOUNDARIES, {
    "as they are": formatted(Segments),
    "a sum with a list": formatted(lambda documents: Segments(documents[:1]) + documents[1:]),
    "pickled": formatted(lambda documents: pickle.loads(pickle.dumps(Segments(documents)))),
    "in an f-string": formatted(lambda documents: f"Read this:\n{Segments(documents)}"),
})  # fmt: skip
add("`as_segments(retriever)` in front of a text template", BOUNDARIES, {"": lcel(LIST, over=over_segments)})
add("`SegmentsPlaceholder`", BOUNDARIES, {"in a chain": lcel(LIST, PLACEHOLDER)})
add("`SegmentsPlaceholder`", BOUNDARIES, {"retrieved before": formatted(list, PLACEHOLDER)}, documents=FOUR)
add("`SegmentsPlaceholder`", BOUNDARIES, {"nested": lcel(LIST, PLACEHOLDER)}, documents=NESTED)
add("`create_invariant_documents_chain`", BOUNDARIES, {"": stuffed(create_invariant_documents_chain, PLACEHOLDER)})
SEGMENT_PROMPTED = "`document_prompt=SEGMENT_PROMPT`"
add(SEGMENT_PROMPTED, BOUNDARIES, {"in the stuff chain": stuffed(document_prompt=SEGMENT_PROMPT)})
add(SEGMENT_PROMPTED, BOUNDARIES, {'with `+ "\\n"`': stuffed(document_prompt=SEGMENT_PROMPT + "\n")})
add(SEGMENT_PROMPTED, PASS_SEGMENTS, {"in a `format_docs` that numbers": formatted(numbered_marks)}, warns=True)

ASKED_OF = PromptTemplate.from_template("{question}")
add("`documents=`", BOUNDARIES, {
    "on `invoke`": found(lambda model, documents: model.invoke(QUESTION, documents=documents)),
    "on `stream`": found(lambda model, documents: [*model.stream(QUESTION, documents=documents)]),
    "on `batch`": found(lambda model, documents: model.batch([QUESTION, "Who?"], documents=documents)),
    "bound, in a chain": found(lambda model, documents: (ASKED_OF | model.bind(documents=documents)).invoke(QUESTION)),
})  # fmt: skip
add("`documents=`", "bind it, or no document is read: `prompt | model.bind(documents=documents)`", {
    "on `prompt | model`, which passes it to the prompt": found(
        lambda model, documents: (ASKED_OF | model).invoke(QUESTION, documents=documents)
    ),
}, drops=True)  # fmt: skip

# --- chains -------------------------------------------------------------------------------------------------------

STUFF = "`create_retrieval_chain` with `create_stuff_documents_chain`"
SOURCE_PROMPT = PromptTemplate.from_template("Source: {source}\nContent: {page_content}")
REDUCE_PROMPT = PromptTemplate.from_template("{summaries}\n\n{question}")
FROM_INPUT = ChatPromptTemplate.from_messages([("system", "Answer from this:\n\n{context}"), ("human", "{input}")])
CONDENSE = ChatPromptTemplate.from_messages([MessagesPlaceholder("chat_history"), ("human", "{input} In short?")])


def retrieval_chain(model, retriever, over=lambda model, retriever: retriever, **options):
    answering = create_stuff_documents_chain(model, FROM_INPUT, **options)
    chain = chains.create_retrieval_chain(over(model, retriever), answering)
    return chain.invoke({"input": QUESTION, "chat_history": [HumanMessage("Is there a ferry?"), AIMessage("Yes.")]})


def retrieval_qa(kind, **options):
    return lambda model, retriever: chains.RetrievalQA.from_chain_type(
        llm=model, chain_type=kind, retriever=retriever, chain_type_kwargs=options
    ).invoke({"query": QUESTION})


add(STUFF, NOTHING, {"default": retrieval_chain}, documents=FOUR)
add(STUFF, NOTHING, {
    "`document_prompt` with the source": partial(retrieval_chain, document_prompt=SOURCE_PROMPT),
    "over `as_segments(retriever)`": partial(retrieval_chain, over=over_segments),
    "with `create_history_aware_retriever`": partial(
        retrieval_chain, over=partial(chains.create_history_aware_retriever, prompt=CONDENSE)
    ),
})  # fmt: skip
add("`create_stuff_documents_chain` over documents retrieved before", PASS_SEGMENTS, {"": stuffed()}, warns=True)
add("`RetrievalQA`", NOTHING, {"`stuff`": retrieval_qa("stuff")})
add("`RetrievalQA`", "ask once about all documents: chain type `stuff`", {
    "`map_reduce`": retrieval_qa("map_reduce", question_prompt=SHORT_PROMPT, combine_prompt=REDUCE_PROMPT),
    "`refine`": retrieval_qa("refine"),
}, warns=True)  # fmt: skip

# --- retrievers over others ---------------------------------------------------------------------------------------


class ListedStore(InMemoryVectorStore):
    """A vector store that finds everything, in the order in which it was added, and equally near."""

    def similarity_search(self, query, k=4, **kwargs):
        return [each for each, _ in self.similarity_search_with_relevance_scores(query)]

    def similarity_search_with_relevance_scores(self, query, k=4, **kwargs):
        stored = self.store.values()
        return [(Document(each["text"], id=each["id"], metadata=dict(each["metadata"])), 1.0) for each in stored]


def listed_store(documents):
    store = ListedStore(DeterministicFakeEmbedding(size=8))
    store.add_documents(list(documents))  # no retriever runs: nothing is known from before
    return store


def words(size):
    return CharacterTextSplitter(separator=" ", chunk_size=size, chunk_overlap=0)


def parents(model, retriever):
    places = {"vectorstore": listed_store([]), "docstore": InMemoryStore()}
    both = retrievers.ParentDocumentRetriever(**places, child_splitter=words(15))
    both.add_documents(list(retriever.documents))
    return both


OVER = {
    "`VectorStoreRetriever`": lambda model, retriever: listed_store(retriever.documents).as_retriever(),
    "`EnsembleRetriever`": lambda model, retriever: retrievers.EnsembleRetriever(retrievers=[retriever] * 2),
    "`MultiQueryRetriever`": lambda model, retriever: retrievers.MultiQueryRetriever.from_llm(retriever, model),
    "`ContextualCompressionRetriever` that splits": lambda model, retriever: retrievers.ContextualCompressionRetriever(
        base_compressor=DocumentCompressorPipeline(transformers=[words(20)]), base_retriever=retriever
    ),
    "`ParentDocumentRetriever`": parents,
}
add("a retriever over others, then `format_docs`", NOTHING, {name: lcel(over=each) for name, each in OVER.items()})
add("`vector_store.similarity_search`, no retriever", PASS_SEGMENTS, {
    "numbered texts": lcel(each_as("Document {n}: {text}"), over=lambda model, retriever: RunnableLambda(
        listed_store(retriever.documents).similarity_search
    )),
}, warns=True)  # fmt: skip
