"""Asking in every order, and what a response says: its text, and what was read."""

import asyncio
import inspect

from cases import ORDERS
from llama_index.core.llms import ChatResponse


def same(ask, ways=ORDERS):
    """Ask in each order of the nodes, or in other ways, and return the answer, which is one for all of them."""
    first, *others = map(ask, ways)
    assert all(other == first for other in others), [first, *others]
    return first


def text_of(response):
    return str(response.message.content if isinstance(response, ChatResponse) else response)


async def pieces_of(asked):
    """Return the pieces of a stream; else the response alone."""
    found = await asked if inspect.isawaitable(asked) else asked
    if inspect.isasyncgen(found):
        return [each async for each in found]
    return list(found) if inspect.isgenerator(found) else [found]


async def consumed(asked):
    """Return the text of a response, and the response, or the last piece of a stream of an LLM, once all is read."""
    is_async = inspect.isawaitable(asked)
    response = await asked if is_async else asked
    if "Streaming" in type(response).__name__:  # of an engine
        return "".join(await pieces_of(response.async_response_gen() if is_async else response.response_gen)), response
    if inspect.isasyncgen(response) or inspect.isgenerator(response):
        pieces = await pieces_of(response)
        return "".join(each.delta or "" for each in pieces), pieces[-1]
    return text_of(response), response


def read(asked):
    """Return what `consumed` does, where no event loop runs."""
    return asyncio.run(consumed(asked))


def report_of(response):
    """What a response says was read; nothing if it says nothing, such as a text."""
    for said in ((getattr(response, "metadata", None) or {}).get("invariant_rag"), getattr(response, "raw", None)):
        if isinstance(said, dict) and "invariant" in said:
            return said
    return {}
