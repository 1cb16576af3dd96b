"""What the tests share: documents in every order, a retriever that lists them, and every way of asking."""

import asyncio
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import reduce
from itertools import permutations
from operator import add
from typing import Any

from langchain_core._api.beta_decorator import LangChainBetaWarning
from langchain_core.documents import Document
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever

from langchain_invariant_rag import SegmentsPlaceholder
from langchain_invariant_rag.documents import to_block, to_segment

DOCUMENTS = [
    Document("The ferry to Ostra leaves at noon.", metadata={"source": "ferry.txt"}),
    Document("Ostra has two bakeries.", metadata={"source": "town.txt", "start_index": 40}),
    Document("The lighthouse was built by Teso Carno.", metadata={"source": "town.txt", "start_index": 0}),
]
ORDERS = [list(order) for order in permutations(DOCUMENTS)]
SOME_ORDERS = [ORDERS[0], ORDERS[3], ORDERS[5]]
"""As they are listed, turned, and reversed: each begins with another document."""
QUESTION = "When does the ferry leave?"
PLACEHOLDER = ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])
HASHES = sorted(to_segment(document).content_hash for document in DOCUMENTS)


def blocks(documents=DOCUMENTS):
    """Return documents as content blocks, as JSON has them."""
    return [dict(to_block(to_segment(each))) for each in documents]


def loaded(value, *classes):
    """Return what LangChain writes down of a value, loaded again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LangChainBetaWarning)
        return load(dumpd(value), valid_namespaces=["langchain_invariant_rag"], allowed_objects=list(classes))


class Listed(BaseRetriever):
    """Returns its documents in the order in which they are listed."""

    documents: list[Any]

    def _get_relevant_documents(self, query, *, run_manager):
        return list(self.documents)


def joined(pieces):
    """Add up the pieces of a stream."""
    return reduce(add, pieces)


async def collected(pieces):
    """Return what an asynchronous stream yields."""
    return [piece async for piece in pieces]


Way = Callable[..., Any]
WAYS = {
    "invoke": lambda model, asked, config=None, **how: model.invoke(asked, config, **how),
    "ainvoke": lambda model, asked, config=None, **how: asyncio.run(model.ainvoke(asked, config, **how)),
    "batch": lambda model, asked, config=None, **how: model.batch([asked, asked], config, **how)[1],
    "abatch": lambda model, asked, config=None, **how: asyncio.run(model.abatch([asked, asked], config, **how))[1],
    "stream": lambda model, asked, config=None, **how: joined(model.stream(asked, config, **how)),
    "astream": lambda model, asked, config=None, **how: joined(
        asyncio.run(collected(model.astream(asked, config, **how)))
    ),
}


def said(answer):
    """Return what must be the same however a model was asked."""
    if not isinstance(answer, AIMessage):
        return answer
    calls, invalid = ([dict(sorted(each.items())) for each in kind]
                      for kind in (answer.tool_calls, answer.invalid_tool_calls))  # fmt: skip
    names = ("additional_kwargs", "usage_metadata", "response_metadata")
    content = answer.content
    if not isinstance(content, str):  # pieces of a stream say which block they belong to
        content = [{name: value for name, value in block.items() if name != "index"} for block in content]
    told = {name: getattr(answer, name) for name in names}
    return {**told, "content": content, "calls": calls, "invalid": invalid}


def distinct(ask, orders=ORDERS):
    """Count the different answers over orders of the documents: over every one, unless told."""
    return len({repr(ask(order)) for order in orders})


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
