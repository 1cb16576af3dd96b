"""What the tests share: documents in every order, the chain of the tutorials, every way of asking, and who listens."""

import asyncio
import warnings
from contextlib import contextmanager
from functools import reduce
from itertools import permutations
from operator import add
from typing import Any

from langchain_core._api.beta_decorator import LangChainBetaWarning
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import create_retriever_tool

from langchain_invariant_rag import SegmentsPlaceholder
from langchain_invariant_rag.documents import to_block, to_segment

DOCUMENTS = [
    Document("The ferry to Ostra leaves at noon.", metadata={"source": "ferry.txt", "id": "f-17", "page": 12}),
    Document("Ostra has two bakeries.", metadata={"source": "town.txt", "id": "t-4", "page": 3}),
    Document("The lighthouse was built by Teso Carno.", metadata={"source": "coast.txt", "id": "c-9", "page": 7}),
]
TEXTS = [document.page_content for document in DOCUMENTS]
HASHES = sorted(to_segment(document).content_hash for document in DOCUMENTS)
ORDERS = [list(order) for order in permutations(DOCUMENTS)]
SOME_ORDERS = [ORDERS[0], ORDERS[3], ORDERS[5]]
"""As they are listed, turned, and reversed: each begins with another document."""
QUESTION = "When does the ferry leave?"
PLACEHOLDER = ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])
TEMPLATE = ChatPromptTemplate.from_messages(
    [("system", "Answer from the context."), ("human", "Context:\n{context}\n\nQuestion: {question}")]
)


class Listed(BaseRetriever):
    """Returns its documents in the order in which they are listed, or the first `k` of them."""

    documents: list[Any] = DOCUMENTS

    def _get_relevant_documents(self, query, *, run_manager, k=None):
        return list(self.documents)[:k]

    async def _aget_relevant_documents(self, query, *, run_manager, k=None):
        return list(self.documents)[:k]


def searching(retriever, **options):
    """Return a retriever as a tool."""
    return create_retriever_tool(retriever, "search", "Searches the town's records.", **options)


def joined(documents):
    """Return the texts of documents as the tutorials of LangChain join them."""
    return "\n\n".join(document.page_content for document in documents)


def rag(model, retriever, format_docs=joined, prompt=TEMPLATE):
    """Return the chain of the tutorials of LangChain."""
    return {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | model


def written(documents):
    """Return documents as models behind an API get them."""
    return "".join(f"Document: {each.page_content}\n" for each in documents)


def blocks(documents=DOCUMENTS):
    """Return documents as content blocks, as JSON has them."""
    return [dict(to_block(to_segment(each))) for each in documents]


def loaded(value, *classes):
    """Return what LangChain writes down of a value, loaded again."""
    with warnings.catch_warnings(action="ignore", category=LangChainBetaWarning):
        return load(dumpd(value), valid_namespaces=["langchain_invariant_rag"], allowed_objects=list(classes))


def total(pieces):
    """Add up the pieces of a stream."""
    return reduce(add, pieces)


async def collected(pieces):
    """Return what an asynchronous stream yields."""
    return [piece async for piece in pieces]


WAYS = {
    "invoke": lambda model, asked, config=None, **how: model.invoke(asked, config, **how),
    "ainvoke": lambda model, asked, config=None, **how: asyncio.run(model.ainvoke(asked, config, **how)),
    "batch": lambda model, asked, config=None, **how: model.batch([asked, asked], config, **how)[1],
    "abatch": lambda model, asked, config=None, **how: asyncio.run(model.abatch([asked, asked], config, **how))[1],
    "stream": lambda model, asked, config=None, **how: total(model.stream(asked, config, **how)),
    "astream": lambda model, asked, config=None, **how: total(
        asyncio.run(collected(model.astream(asked, config, **how)))
    ),
}


def said(answer):
    """Return what must be the same however a model was asked."""
    if not isinstance(answer, AIMessage):
        return answer
    told = answer.model_dump(include={"additional_kwargs", "usage_metadata", "response_metadata", "content"})
    if not isinstance(answer.content, str):  # pieces of a stream say which block they belong to
        told["content"] = [{name: block[name] for name in block if name != "index"} for block in answer.content]
    calls = [[dict(sorted(call.items())) for call in kind] for kind in (answer.tool_calls, answer.invalid_tool_calls)]
    return {**told, "calls": calls}


def distinct(ask, orders=ORDERS):
    """Count the different answers over orders of the documents: over every one, unless told."""
    return len({repr(ask(order)) for order in orders})


class Heard(BaseCallbackHandler):
    """What callbacks are told: how many calls begin and end, the messages of the last one, and the text as it comes."""

    def __init__(self):
        self.begun, self.ended, self.text = 0, 0, ""

    def on_chat_model_start(self, serialized, messages, **told):
        self.begun, self.messages = self.begun + 1, messages[0]

    def on_llm_start(self, serialized, prompts, **told):
        self.begun += 1

    def on_llm_new_token(self, token, *, chunk, **told):
        self.text += chunk.text

    def on_llm_end(self, response, **told):
        self.ended += 1


@contextmanager
def forwards(lm):
    """Shapes of the input ids of every pass of the model."""
    shapes = []
    handle = lm.model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield shapes
    finally:
        handle.remove()
