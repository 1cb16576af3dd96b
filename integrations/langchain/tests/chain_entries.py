"""Entries in which a function, a template, a chain or a retriever of LangChain stands between documents and model.

An entry is one way in which retrieved documents get to the model: a function of a model and a retriever that builds the
chain, asks, and returns an answer, or a list of answers. README.md says of each whether it is invariant.
"""

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
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate, format_document
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import CharacterTextSplitter

from langchain_invariant_rag import SEGMENT_PROMPT, Segments, as_segments, create_invariant_documents_chain

from .shared import DOCUMENTS, PLACEHOLDER, QUESTION, TEMPLATE, TEXTS, WAYS, Listed, joined, rag

ENTRIES = {}
"""Way -> variant -> entry."""
FOUR = (*DOCUMENTS, Document("Salt is sold in Brenn.", metadata={"source": "trade.txt", "id": "s-2", "page": 1}))
QUOTED = (
    Document('The pilot said "noon",\nand left.', metadata={"source": "ferry.txt"}),
    Document("It's two bakeries:\n- Alma's\n- Timo's", metadata={"source": "town.txt"}),
    Document('Carno\'s "light" has a \\ on its door.', metadata={"source": "coast.txt"}),
)
NESTED = tuple(map(Document, ("The ferry leaves at noon.", "The ferry leaves at noon. It is salt.", "It is salt.")))
EQUAL = tuple(Document(text, metadata={"year": year}) for year, text in ((1987, "a b"), (2021, "a b"), (1904, "c")))
FIELDS = tuple(Document(text, metadata={"title": text[:9], "place": f"{text[:4]}\n'12'"}) for text in TEXTS)
LIST = RunnablePassthrough()
"""In place of a `format_docs`."""

# --- documents formatted as text ----------------------------------------------------------------------------------

SYSTEM = ChatPromptTemplate.from_messages([("system", "Answer from this:\n\n{context}"), ("human", "{question}")])
SHORT_PROMPT = PromptTemplate.from_template("{context}\n\n{question}")
TWICE = ChatPromptTemplate.from_template("{context}\n\n{question}\nRead it again:\n\n{context}\n\n{question}")
SEPARATE = ChatPromptTemplate.from_template("Document 1: {a}\nDocument 2: {b}\nDocument 3: {c}\n{question}")
TWO_PLACES = ChatPromptTemplate.from_template("Facts:\n{facts}\n\nNews:\n{news}\n\n{question}")
NEWS = Listed(documents=[Document("Bread costs two crowns."), Document("It rains.")])


def each_as(template, separator="\n\n"):
    """Format every document with a template of its number, its letter, its text and its metadata."""
    return lambda documents: separator.join(
        template.format(n=n, letter=chr(64 + n), text=each.page_content, **each.metadata)
        for n, each in enumerate(documents, 1)
    )


def lcel(format_docs=joined, prompt=TEMPLATE, over=None):
    """Ask the chain of the tutorials. `over` makes another retriever of the model and the retriever."""
    return lambda model, retriever: rag(
        model | StrOutputParser(), over(model, retriever) if over else retriever, format_docs, prompt
    ).invoke(QUESTION)


BULLETS = each_as("- {text}", "\n")
JSON_LIST = lcel(lambda documents: json.dumps([each.page_content for each in documents]))
ENTRIES['`{"context": retriever | format_docs} | prompt | model`'] = {
    "joined by an empty line": lcel(),
    "bullets": lcel(BULLETS),
    '`<doc id="…">` with an id of the metadata': lcel(each_as('<doc id="{id}">{text}</doc>', "\n")),
    "`Source: …`, `Content: …`": lcel(each_as("Source: {source}\nContent: {text}")),
    "text, then `(source, page)`": lcel(each_as("{text} ({source}, p. {page})", "\n")),
    "all metadata, then text": lcel(
        lambda documents: "\n".join(f"{each.metadata}: {each.page_content}" for each in documents)
    ),
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
    "cut to 20 characters": lcel(lambda documents: "\n\n".join(each.page_content[:20] for each in documents)),
    "upper case": lcel(lambda documents: joined(documents).upper()),
    "the first two only": lcel(lambda documents: joined(documents[:2])),
    "one document within another": lcel(),
    "context twice": lcel(prompt=TWICE),
    "JSON that escapes": JSON_LIST,
}
ENTRIES["documents formatted in the prompt template"] = {
    "the list in `{context}`": lcel(LIST),
    "an f-string with one variable per document": lambda model, retriever: (
        retriever
        | (lambda documents: dict(zip("abc", (each.page_content for each in documents), strict=True)))
        | SEPARATE.partial(question=QUESTION)
        | model
    ).invoke(QUESTION),
    "two retrievers, two places": lambda model, retriever: (
        {"facts": retriever | BULLETS, "news": NEWS | BULLETS, "question": LIST} | TWO_PLACES | model
    ).invoke(QUESTION),
}

# --- documents that keep their boundaries -------------------------------------------------------------------------

ASKED_OF = PromptTemplate.from_template("{question}")


def found(ask):
    """Retrieve first, on its own, and then ask the model about the documents."""
    return lambda model, retriever: ask(model, retriever.invoke(QUESTION))


def formatted(shape, prompt=TEMPLATE):
    return found(lambda model, documents: (prompt | model).invoke({"context": shape(documents), "question": QUESTION}))


def stuffed(create=create_stuff_documents_chain, prompt=TEMPLATE, **options):
    asked = {"question": QUESTION}
    return found(lambda model, documents: create(model, prompt, **options).invoke({"context": documents, **asked}))


ENTRIES["`Segments` in a text template"] = {
    "as they are": formatted(Segments),
    "a sum with a list": formatted(lambda documents: Segments(documents[:1]) + documents[1:]),
    "pickled": formatted(lambda documents: pickle.loads(pickle.dumps(Segments(documents)))),
    "in an f-string": formatted(lambda documents: f"Read this:\n{Segments(documents)}"),
}
ENTRIES["`as_segments(retriever)`"] = {
    "in front of a text template": lcel(LIST, over=lambda model, retriever: as_segments(retriever))
}
ENTRIES["`SegmentsPlaceholder`"] = {
    "in a chain": lcel(LIST, PLACEHOLDER),
    "retrieved before": formatted(list, PLACEHOLDER),
    "nested": lcel(LIST, PLACEHOLDER),
}
ENTRIES["`create_invariant_documents_chain`"] = {
    "over documents retrieved before": stuffed(create_invariant_documents_chain, PLACEHOLDER)
}
ENTRIES["`document_prompt=SEGMENT_PROMPT`"] = {
    "in the stuff chain": stuffed(document_prompt=SEGMENT_PROMPT),
    'with `+ "\\n"`': stuffed(document_prompt=SEGMENT_PROMPT + "\n"),
    "in a `format_docs` that numbers": formatted(
        lambda listed: "\n".join(f"[{n}] {format_document(each, SEGMENT_PROMPT)}" for n, each in enumerate(listed, 1))
    ),
}
ENTRIES["`documents=`"] = {
    "on `invoke`": found(lambda model, documents: model.invoke(QUESTION, documents=documents)),
    "on `stream`": found(lambda model, documents: WAYS["stream"](model, QUESTION, documents=documents)),
    "on `batch`": found(lambda model, documents: model.batch([QUESTION, "Who?"], documents=documents)),
    "bound, in a chain": found(lambda model, documents: (ASKED_OF | model.bind(documents=documents)).invoke(QUESTION)),
    "on `prompt | model`, which passes it to the prompt": found(
        lambda model, documents: (ASKED_OF | model).invoke(QUESTION, documents=documents)
    ),
}

# --- chains -------------------------------------------------------------------------------------------------------

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


ENTRIES["`create_retrieval_chain` with `create_stuff_documents_chain`"] = {
    "default": retrieval_chain,
    "`document_prompt` with the source": partial(retrieval_chain, document_prompt=SOURCE_PROMPT),
    "over `as_segments(retriever)`": partial(retrieval_chain, over=lambda model, retriever: as_segments(retriever)),
    "with `create_history_aware_retriever`": partial(
        retrieval_chain, over=partial(chains.create_history_aware_retriever, prompt=CONDENSE)
    ),
}
ENTRIES["`create_stuff_documents_chain`"] = {"over documents retrieved before": stuffed()}
ENTRIES["`RetrievalQA`"] = {
    "`stuff`": retrieval_qa("stuff"),
    "`map_reduce`": retrieval_qa("map_reduce", question_prompt=SHORT_PROMPT, combine_prompt=REDUCE_PROMPT),
    "`refine`": retrieval_qa("refine"),
}

# --- retrievers over others ---------------------------------------------------------------------------------------


class ListedStore(InMemoryVectorStore):
    """A vector store that finds everything, in the order in which it was added."""

    def similarity_search(self, query, k=4, **kwargs):
        stored = self.store.values()
        return [Document(each["text"], id=each["id"], metadata=dict(each["metadata"])) for each in stored]


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
ENTRIES["a retriever over others, then `format_docs`"] = {name: lcel(over=each) for name, each in OVER.items()}
ENTRIES["`vector_store.similarity_search`, no retriever"] = {
    "numbered texts": lcel(
        each_as("Document {n}: {text}"),
        over=lambda model, retriever: RunnableLambda(listed_store(retriever.documents).similarity_search),
    )
}
