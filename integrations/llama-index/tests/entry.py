"""What an entry is, and who is asked: an InvariantLLM that shows every bit, and LLMs behind an API."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from cases import TEXTS as THREE
from cases import WordEmbedding
from invariant_rag import InvariantModel
from llama_index.core import Settings
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata
from llama_index.core.llms import LLM, CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.schema import NodeWithScore, TextNode
from transformers import LogitsProcessor, LogitsProcessorList

from llama_index.llms.invariant_rag import InvariantLLM, canonical, vote

Nodes: TypeAlias = list[NodeWithScore]
Ask: TypeAlias = Callable[[Any, Nodes], str]
"""Builds everything anew around an LLM and nodes in the order given, and returns the answer."""

GLOBAL = "nothing but `Settings.llm = InvariantLLM(...)`"
MORE = "nothing more"
TEXTS = (*THREE, "The bell of Varn rings twice a day.")
NAMES = ("ferry", "mill", "bridge", "bell")


def node_id(i: int) -> str:
    """The id of a node: no running number, as those of LlamaIndex are none."""
    return f"node of {NAMES[i]}"


@dataclass(frozen=True)
class Entry:
    """One way in which retrieved nodes reach a model.

    Attributes:
        topic: What the entry belongs to: a row of the table lists the entries of one topic that behave alike.
        name: The entry, as a user would write it.
        expected: `invariant`: one answer for all orders, and no warning. `warns`: several, and a warning at each.
        todo: What a user has to do.
        ask: How it is asked.
        wrapper: What stands around the LLM: `InvariantLLM` is one itself; the others are around an LLM behind an API.
    """

    topic: str
    name: str
    expected: Literal["invariant", "warns"]
    todo: str
    ask: Ask
    wrapper: str = "InvariantLLM"

    @property
    def title(self) -> str:
        return f"{self.topic}: {self.name}"

    def answer(self, llm: LLM, nodes: Nodes) -> str:
        """Return the answer of an LLM, which is LlamaIndex's global one meanwhile."""
        Settings.llm, Settings.embed_model = llm, WordEmbedding()
        return self.ask(llm, nodes)

    def nodes(self, order: Sequence[int]) -> Nodes:
        """Return nodes in an order, tied, as a reader of files makes them; no other entry has the same texts."""
        page = zlib.crc32(self.title.encode()) % 10_000

        def node(i: int) -> TextNode:
            metadata = {"file_name": f"{NAMES[i]}.txt"}
            return TextNode(text=f"{TEXTS[i]} See page {page}.", id_=node_id(i), metadata=metadata)

        return [NodeWithScore(node=node(i), score=0.5) for i in order]

    def around(self, wrapper: str) -> Entry:
        """Return the same entry with a wrapper around the LLM."""
        todo = self.todo.replace(GLOBAL, f"nothing but `Settings.llm = {wrapper}(llm)`")
        return replace(self, name=self.title, todo=todo, wrapper=wrapper, topic=f"`{wrapper}(llm)`")


def invariant(topic: str, todo: str, asks: Mapping[str, Ask]) -> list[Entry]:
    """Return entries of a topic that give one answer for all orders."""
    return [Entry(topic, name, "invariant", todo, ask) for name, ask in asks.items()]


def warns(topic: str, todo: str, asks: Mapping[str, Ask]) -> list[Entry]:
    """Return entries of a topic whose user is warned."""
    return [Entry(topic, name, "warns", todo, ask) for name, ask in asks.items()]


class HashingLLM(CustomLLM):
    """An LLM behind an API, as far as order is concerned: another prompt gets another answer. Or it says one thing."""

    says: str = ""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=4096, num_output=64, is_chat_model=True)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=self.says or hashlib.sha256(prompt.encode()).hexdigest()[:12])

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer as `complete` does, to all blocks: an API reads citable blocks and documents, too."""
        text = self.complete("".join(message.model_dump_json() for message in messages), formatted=True).text
        return ChatResponse(message=ChatMessage(text, role="assistant"))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        text = self.complete(prompt, formatted=True).text
        return (CompletionResponse(text=text[: i + 4], delta=text[i : i + 4]) for i in range(0, len(text), 4))


class EveryBit(LogitsProcessor):
    """Chooses each letter by a hash of the scores, so that an answer shows every bit in which two prompts differ."""

    def __init__(self, tokenizer: Any) -> None:
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
        self._letters = torch.tensor(tokenizer.encode(letters, add_special_tokens=False))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        digest = hashlib.sha256(scores.float().numpy().tobytes()).digest()
        chosen = torch.full_like(scores, float("-inf"))
        chosen[:, self._letters[digest[0] % len(self._letters)]] = 0.0
        return chosen


def local_llm(model: InvariantModel) -> InvariantLLM:
    processors = LogitsProcessorList([EveryBit(model.tokenizer)])
    return InvariantLLM(model, max_tokens=2, generation_kwargs={"logits_processor": processors})


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
