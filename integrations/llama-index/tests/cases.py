"""A question over three nodes, a retriever that lists them in a given order, and an embedding without weights."""

from __future__ import annotations

import hashlib
from itertools import permutations
from typing import Any

from invariant_rag import Segment, SegmentSet
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

QUERY = "When does the ferry leave?"
TEXTS = (
    "The ferry to Ostra leaves the harbour at noon.",
    "The mill of Brenn grinds barley.",
    "A copper bridge crosses the river Senn.",
)
ORDERS = list(permutations(range(len(TEXTS))))


def nodes_of(order: Any = (0, 1, 2), **metadata: Any) -> list[NodeWithScore]:
    """The nodes in an order, each with the score that is its own."""
    return [
        NodeWithScore(node=TextNode(text=TEXTS[i], id_=f"node {i}", metadata=metadata), score=1.0 / (i + 2))
        for i in order
    ]


def scored() -> SegmentSet:
    """The segments that these nodes are."""
    return SegmentSet(Segment(each.text, score=each.score) for each in nodes_of())


class ListRetriever(BaseRetriever):
    """Retrieves these nodes, in this order."""

    def __init__(self, nodes: list[NodeWithScore]) -> None:
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self._nodes


class WordEmbedding(BaseEmbedding):
    """Counts of hashed words: deterministic, and near where words are shared."""

    def _embed(self, text: str) -> list[float]:
        vector = [0.01] * 64
        for word in text.lower().split():
            vector[hashlib.sha256(word.strip(".,?!").encode()).digest()[0] % 64] += 1.0
        return vector

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._embed(text)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._embed(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._embed(query)
