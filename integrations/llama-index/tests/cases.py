"""A question over three nodes, what lists them as told, and LLMs behind an API; without torch."""

import hashlib
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
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index.llms.invariant_rag import SegmentBlock

QUERY = "When does the ferry leave?"
TEXTS = (
    "The ferry to Ostra leaves the harbour at noon.",
    "The mill of Brenn grinds barley.",
    "A copper bridge crosses the river Senn.",
)
ORDERS = list(permutations(range(len(TEXTS))))
USAGE = {"prompt_tokens": 10, "completion_tokens": 2}
EIGHT = [f"{prefix}{name}" for name in ("complete", "chat") for prefix in ("", "stream_", "a", "astream_")]


def node(text, **metadata):
    return NodeWithScore(node=TextNode(text=text, metadata=metadata), score=0.5)


def nodes_of(order=(0, 1, 2), **metadata):
    """The nodes in an order, each with the score that is its own."""
    return [
        NodeWithScore(node=TextNode(text=TEXTS[i], id_=f"node {i}", metadata=metadata), score=1.0 / (i + 2))
        for i in order
    ]


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


class ListedIndex(VectorStoreIndex):
    """An index whose retriever lists these nodes in this order, however many are asked for."""

    def as_retriever(self, **kwargs):
        return ListRetriever(self.listed)


def index_of(nodes):
    index = ListedIndex([], embed_model=MockEmbedding(1))
    index.listed = nodes
    return index


def engine_of(nodes, **options):
    if "response_synthesizer" in options:  # else LlamaIndex looks for an LLM of its settings
        options.pop("llm", None)
        return RetrieverQueryEngine(ListRetriever(nodes), **options)
    return RetrieverQueryEngine.from_args(ListRetriever(nodes), **options)


# --- LLMs behind an API ---


class HashingLLM(CustomLLM):
    """An LLM behind an API, as far as order is concerned: another prompt gets another answer. Or it says one thing."""

    says: str = ""
    requests: list[str] = Field(default_factory=list)

    @property
    def metadata(self):
        return LLMMetadata(context_window=4096, num_output=64, is_chat_model=True)

    def read(self, text):
        self.requests.append(text)
        return self.says or hashlib.sha256(text.encode()).hexdigest()[:12]

    @llm_completion_callback()
    def complete(self, prompt, formatted=False, **kwargs):
        return CompletionResponse(text=self.read(prompt), raw={"usage": USAGE})

    @llm_chat_callback()
    def chat(self, messages, **kwargs):
        """Answer as `complete` does, to all blocks: an API reads citable blocks and documents, too."""
        read = [getattr(block, "text", None) or repr(block) for message in messages for block in message.blocks]
        return ChatResponse(message=ChatMessage(self.read("".join(read)), role="assistant"), raw={"usage": USAGE})

    @llm_completion_callback()
    def stream_complete(self, prompt, formatted=False, **kwargs):
        text = self.read(prompt)
        return (CompletionResponse(text=text[: i + 4], delta=text[i : i + 4]) for i in range(0, len(text), 4))


class Recorder(MockFunctionCallingLLM):
    """It keeps what it is asked, calls the first tool (in text if it has to), and says one thing or what it read."""

    asked: list[str] = Field(default_factory=list)
    says: str = "Noon."
    calls: dict[str, Any] = Field(default_factory=lambda: {"input": "ferry"})
    is_chat_model: bool | None = True

    def __init__(self, **kwargs):
        super().__init__(is_chat_model=True, response_generator=self._answer, **kwargs)

    def _answer(self, messages, tools=(), **kwargs):
        self.asked.append("\0".join("".join(getattr(each, "text", "") for each in one.blocks) for one in messages))
        if tools and messages[-1].role != "tool":
            call = ToolCallBlock(tool_call_id="1", tool_name=tools[0].metadata.name, tool_kwargs=self.calls)
            return ChatMessage(role="assistant", blocks=[call])
        if "Action Input:" not in (messages[0].content or ""):
            return ChatMessage(self.says or messages[-1].content, role="assistant")
        acted = "Observation:" in (messages[-1].content or "")
        action = 'Thought: I search.\nAction: harbour\nAction Input: {"input": "ferry"}'
        return ChatMessage(f"Thought: I know.\nAnswer: {self.says}" if acted else action, role="assistant")

    @llm_completion_callback()
    def complete(self, prompt, formatted=False, **kwargs):
        return CompletionResponse(text=self._answer([ChatMessage(prompt)]).content or "")
