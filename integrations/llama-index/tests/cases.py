"""A question over three nodes, who lists them, an LLM behind an API, and what a response says; without torch."""

import asyncio
import inspect
from itertools import permutations
from typing import Any

from invariant_rag.prompts import mark
from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.bridge.pydantic import Field
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import ChatMessage, ChatResponse, CompletionResponse, CustomLLM, LLMMetadata, TextBlock
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.mock import MockFunctionCallingLLM, MockLLM
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index.llms.invariant_rag import SegmentBlock

QUERY = "When does the ferry leave?"
TEXTS = (
    "The ferry to Ostra leaves the harbour at noon.",
    "The mill of Brenn grinds barley.",
    "A copper bridge crosses the river Senn.",
)
ORDERS = list(permutations(range(len(TEXTS))))
SEARCH = 'Thought: I search.\nAction: harbour\nAction Input: {"input": "ferry"}'
"""How an agent asks for a search that can only write text."""
USAGE = {"prompt_tokens": 10, "completion_tokens": 2}
EIGHT = [f"{prefix}{name}" for name in ("complete", "chat") for prefix in ("", "stream_", "a", "astream_")]


def node(text, score=0.5, name=None, **metadata):
    """A node; its name is its id."""
    return NodeWithScore(node=TextNode(text=text, metadata=metadata, **({"id_": name} if name else {})), score=score)


def nodes_of(order=(0, 1, 2), **metadata):
    """The nodes in an order, each with the score that is its own."""
    return [node(TEXTS[i], 1.0 / (i + 2), f"node {i}", **metadata) for i in order]


def message_of(segments, question=QUERY):
    """A user's message with these segments and a question."""
    return ChatMessage(blocks=[*map(SegmentBlock.of, segments), TextBlock(text=question)])


def asked(name, order=(0, 1, 2), texts=TEXTS):
    """What one of the eight methods is asked: a text with marks, or messages with blocks."""
    if name.endswith("complete"):
        return f"Read:\n{''.join(mark(texts[i]) for i in order)}\n{QUERY}\n"
    return [ChatMessage("Be brief.", role="system"), message_of(texts[i] for i in order)]


def told_by_tool(text, call="1"):
    return ChatMessage(text, role="tool", additional_kwargs={"tool_call_id": call})


class ListRetriever(BaseRetriever):
    """Retrieves these nodes, in this order."""

    def __init__(self, nodes):
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle):
        return self._nodes


def index_of(nodes):
    """Return an index whose retriever lists these nodes in this order, however many are asked for."""
    index = VectorStoreIndex([], embed_model=MockEmbedding(1))
    index.as_retriever = lambda **_: ListRetriever(nodes)
    return index


def engine_of(nodes, **options):
    if "response_synthesizer" in options:  # it brings its own LLM, but LlamaIndex looks for the global one
        options.setdefault("llm", MockLLM())
    return index_of(nodes).as_query_engine(**options)


class Reader(CustomLLM):
    """An LLM behind an API, without tools: it keeps what it is asked, and says one thing.

    Or it says what a function makes of the prompt, of which all messages are one text; so are the arguments of a call.
    """

    asked: list[str] = Field(default_factory=list)
    says: Any = "Noon."
    calls: Any = Field(default_factory=lambda: {"input": "ferry"})

    @property
    def metadata(self):
        return LLMMetadata(is_chat_model=True, is_function_calling_model=isinstance(self, Recorder))

    def _made(self, given):
        return given(self.asked[-1]) if callable(given) else given

    def _response(self, prompt):
        self.asked.append(prompt)
        return CompletionResponse(text=self._made(self.says), raw={"usage": USAGE})

    @llm_completion_callback()
    def complete(self, prompt, formatted=False, **kwargs):
        return self._response(prompt)

    @llm_completion_callback()
    def stream_complete(self, prompt, formatted=False, **kwargs):
        text = self._response(prompt).text
        return (CompletionResponse(text=text[: i + 4], delta=text[i : i + 4]) for i in range(0, len(text), 4))

    @llm_chat_callback()
    def chat(self, messages, tools=(), **kwargs):
        blocks = [[getattr(block, "text", None) or repr(block) for block in each.blocks] for each in messages]
        answer = self._response("\0".join(map("".join, blocks)))
        said = [TextBlock(text=answer.text)]
        if tools and messages[-1].role != "tool":
            name, given = tools[0].metadata.name, self._made(self.calls)
            said = [ToolCallBlock(tool_call_id="1", tool_name=name, tool_kwargs=given)]
        elif "Action Input:" in (messages[0].content or ""):
            acted = "Observation:" in (messages[-1].content or "")
            said = [TextBlock(text=f"Thought: I know.\nAnswer: {answer.text}" if acted else SEARCH)]
        return ChatResponse(message=ChatMessage(role="assistant", blocks=said), raw=answer.raw)


class Recorder(Reader, MockFunctionCallingLLM):
    """One that calls the first tool, in text if it has to."""


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
