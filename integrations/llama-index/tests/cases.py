"""A question over three nodes, retrievers and an index that list them as told, and an embedding without weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import permutations
from typing import Any

from llama_index.core import VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQuery, VectorStoreQueryResult

QUERY = "When does the ferry leave?"
TEXTS = (
    "The ferry to Ostra leaves the harbour at noon.",
    "The mill of Brenn grinds barley.",
    "A copper bridge crosses the river Senn.",
)
ORDERS = list(permutations(range(len(TEXTS))))
EIGHT = [f"{prefix}{name}" for name in ("complete", "chat") for prefix in ("", "stream_", "a", "astream_")]


def nodes_of(order: Any = (0, 1, 2), **metadata: Any) -> list[NodeWithScore]:
    """The nodes in an order, each with the score that is its own."""
    return [
        NodeWithScore(node=TextNode(text=TEXTS[i], id_=f"node {i}", metadata=metadata), score=1.0 / (i + 2))
        for i in order
    ]


class ListRetriever(BaseRetriever):
    """Retrieves these nodes, in this order."""

    def __init__(self, nodes: list[NodeWithScore]) -> None:
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._nodes


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
        ids = [node.node_id for node in self.listed]
        return VectorStoreQueryResult(nodes=self.listed, similarities=[0.5] * len(ids), ids=ids)


def index_of(nodes: list[NodeWithScore]) -> VectorStoreIndex:
    """An index whose retriever lists the nodes in this order."""
    return VectorStoreIndex.from_vector_store(ListedStore(listed=[each.node for each in nodes]))


def engine_of(nodes: list[NodeWithScore], **options: Any) -> RetrieverQueryEngine:
    if "response_synthesizer" in options:  # else LlamaIndex looks for an LLM of its settings
        options.pop("llm", None)
        return RetrieverQueryEngine(ListRetriever(nodes), **options)
    return RetrieverQueryEngine.from_args(ListRetriever(nodes), **options)


class WordEmbedding(BaseEmbedding):
    """Counts of hashed words: deterministic, and near where words are shared."""

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = [0.01] * 64
        for word in text.lower().split():
            vector[hashlib.sha256(word.strip(".,?!").encode()).digest()[0] % 64] += 1.0
        return vector

    _get_query_embedding = _get_text_embedding

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)
