"""What an entry is, and what entries are made of: nodes, an index that lists them as told, and other LLMs."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from cases import TEXTS as THREE
from cases import ListRetriever, WordEmbedding
from invariant_rag import InvariantModel
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata
from llama_index.core.llms import LLM, CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import BaseNode, NodeWithScore, TextNode
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQuery, VectorStoreQueryResult
from transformers import LogitsProcessor, LogitsProcessorList

from llama_index.llms.invariant_rag import InvariantLLM, canonical, vote

Expected: TypeAlias = Literal["invariant", "warns"]
Nodes: TypeAlias = list[NodeWithScore]
Ask: TypeAlias = Callable[[Any, Nodes], str]
"""Builds everything anew around an LLM and nodes in the order given, and returns the answer."""

GLOBAL = "nothing but `Settings.llm = InvariantLLM(...)`"
MORE = "nothing more"
TEXTS = (*THREE, "The bell of Varn rings twice a day.")
NAMES = ("ferry", "mill", "bridge", "bell")


def node_id(i: int) -> str:
    """Return the id of a node: no running number, as those of LlamaIndex are none."""
    return f"node of {NAMES[i]}"


@dataclass(frozen=True)
class Entry:
    """One way in which retrieved nodes reach a model.

    Attributes:
        name: The entry, as a user would write it.
        todo: What a user has to do, for the table in the README.
        expected: `invariant`: one answer for all orders, and no warning. `warns`: several, and a warning at each.
        ask: Builds everything anew around an LLM and nodes in the order given, and returns the answer.
        wrapper: What stands around the LLM: `InvariantLLM` is one itself; the others are around an LLM behind an API.
        ordered: Whether a plain model answers by the order of the nodes. Not so where it reads none of them, or where
            the entry puts them in order whatever the model.
        sizes: How many nodes are permuted.
        topic: What the entry belongs to: a row of the table lists the entries of one topic that behave alike.
    """

    name: str
    todo: str
    expected: Expected
    ask: Ask
    wrapper: str = "InvariantLLM"
    ordered: bool = True
    sizes: tuple[int, ...] = (3,)
    topic: str = ""

    @property
    def title(self) -> str:
        """The name, with its topic."""
        return f"{self.topic}: {self.name}"

    def answer(self, llm: LLM, nodes: Nodes) -> str:
        """Return the answer of an LLM, which is LlamaIndex's global one meanwhile."""
        Settings.llm, Settings.embed_model = llm, WordEmbedding()
        return self.ask(llm, nodes)

    def nodes(self, order: Sequence[int]) -> Nodes:
        """Return nodes in an order, as a reader of files makes them, all with one score: they are tied.

        Each entry has texts of its own, so that no entry sees what another one retrieved.
        """
        page = zlib.crc32(self.title.encode()) % 10_000
        return [
            NodeWithScore(
                node=TextNode(
                    text=f"{TEXTS[i]} See page {page}.", id_=node_id(i), metadata={"file_name": f"{NAMES[i]}.txt"}
                ),
                score=0.5,
            )
            for i in order
        ]

    def around(self, wrapper: str) -> Entry:
        """Return the same entry with a wrapper around the LLM."""
        todo = self.todo.replace(GLOBAL, f"nothing but `Settings.llm = {wrapper}(llm)`")
        return replace(self, name=self.title, todo=todo, wrapper=wrapper, sizes=(3,), topic=f"`{wrapper}(llm)`")


def invariant(name: str, ask: Ask, todo: str = GLOBAL, **options: Any) -> Entry:
    """Return an entry that gives one answer for all orders."""
    return Entry(name, todo, "invariant", ask, **options)


def warns(name: str, ask: Ask, todo: str, **options: Any) -> Entry:
    """Return an entry whose user is warned."""
    return Entry(name, todo, "warns", ask, **options)


def under(topic: str, *entries: Entry) -> list[Entry]:
    """Return entries with their topic."""
    return [replace(each, topic=topic) for each in entries]


class HashingLLM(CustomLLM):
    """An LLM behind an API, as far as order is concerned: another prompt gets another answer."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=4096, num_output=64, is_chat_model=True)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=hashlib.sha256(prompt.encode()).hexdigest()[:12])

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer as `complete` does, to all blocks: an API reads citable blocks and documents, too."""
        text = self.complete("".join(message.model_dump_json() for message in messages), formatted=True).text
        return ChatResponse(message=ChatMessage(text, role="assistant"))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        text = self.complete(prompt, formatted=True).text
        return (CompletionResponse(text=text[: i + 4], delta=text[i : i + 4]) for i in range(0, len(text), 4))


class SayingLLM(HashingLLM):
    """Another LLM, which plans, chooses or writes what an entry has to parse: always the same."""

    says: str

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=self.says)


class EveryBit(LogitsProcessor):
    """Chooses each letter by a hash of the scores, so that an answer shows every bit in which two prompts differ."""

    def __init__(self, tokenizer: Any) -> None:
        self._letters = torch.tensor(tokenizer.encode("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        digest = hashlib.sha256(scores.float().numpy().tobytes()).digest()
        chosen = torch.full_like(scores, float("-inf"))
        chosen[:, self._letters[digest[0] % len(self._letters)]] = 0.0
        return chosen


def local_llm(model: InvariantModel) -> InvariantLLM:
    processors = LogitsProcessorList([EveryBit(model.tokenizer)])
    return InvariantLLM(model, max_tokens=4, generation_kwargs={"logits_processor": processors})


WRAPPERS: dict[str, Callable[[InvariantModel], LLM]] = {
    "InvariantLLM": local_llm,
    "canonical": lambda _: canonical(HashingLLM()),
    "vote": lambda _: vote(HashingLLM(), votes=3),
}
CONTROLS: dict[str, Callable[[InvariantModel], LLM]] = {
    "InvariantLLM": lambda model: local_llm(model.with_method("sequential", ordering="given")),
    "canonical": lambda _: HashingLLM(),
    "vote": lambda _: HashingLLM(),
}


class ListedStore(BasePydanticVectorStore):
    """A vector store that finds these nodes in this order, however many are asked for."""

    stores_text: bool = True
    listed: list[BaseNode]

    @property
    def client(self) -> None:
        return None

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        raise NotImplementedError

    def delete(self, ref_doc_id: str, **kwargs: Any) -> None:
        raise NotImplementedError

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return VectorStoreQueryResult(
            nodes=self.listed, similarities=[0.5] * len(self.listed), ids=[node.node_id for node in self.listed]
        )


def index_of(nodes: Nodes) -> VectorStoreIndex:
    """Return an index whose retriever lists the nodes in this order."""
    return VectorStoreIndex.from_vector_store(ListedStore(listed=[each.node for each in nodes]))


def engine_of(nodes: Nodes, **options: Any) -> RetrieverQueryEngine:
    """Return a query engine over these nodes."""
    return RetrieverQueryEngine.from_args(ListRetriever(nodes), **options)
