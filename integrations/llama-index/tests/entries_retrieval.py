"""Entries: retrievers around retrievers, postprocessors, and other indices."""

from __future__ import annotations

from typing import Any

from cases import QUERY, ListRetriever, engine_of
from entries_query import query
from entry import GLOBAL, MORE, HashingLLM, Nodes, invariant, node_id
from llama_index.core import DocumentSummaryIndex, StorageContext, SummaryIndex
from llama_index.core.postprocessor import (
    LongContextReorder,
    MetadataReplacementPostProcessor,
    PrevNextNodePostprocessor,
    SimilarityPostprocessor,
)
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.retrievers import AutoMergingRetriever, QueryFusionRetriever, RecursiveRetriever
from llama_index.core.schema import Document, IndexNode, NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore

from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor, SourceJoiner

# --- retrievers around retrievers ---


def over(retriever: Any, **options: Any) -> str:
    return str(engine_of([], **options).with_retriever(retriever).query(QUERY))


def fused(nodes: Nodes, **options: Any) -> str:
    retriever = QueryFusionRetriever(
        [ListRetriever(nodes)], llm=HashingLLM(says="When?"), use_async=False, similarity_top_k=9, **options
    )
    return over(retriever)


def merging(nodes: Nodes) -> str:
    """Retrieve leaves, of which two have one parent, which takes their place."""
    leaves = [*nodes, NodeWithScore(node=TextNode(text="It needs an hour.", id_="leaf"), score=0.5)]
    first = next(each.node for each in nodes if each.node.node_id == node_id(0))
    children = [first, leaves[-1].node]
    parent = TextNode(text=f"{first.get_content()} It needs an hour.", id_="parent")
    parent.relationships[NodeRelationship.CHILD] = [each.as_related_node_info() for each in children]
    for each in children:
        each.relationships[NodeRelationship.PARENT] = parent.as_related_node_info()
    storage = StorageContext.from_defaults()
    storage.docstore.add_documents([parent, *(each.node for each in leaves)])
    return over(AutoMergingRetriever(ListRetriever(leaves), storage))


def recursive(nodes: Nodes) -> str:
    """Retrieve references, each of which leads to its node."""
    references = [
        NodeWithScore(node=IndexNode(text=each.text[:9], index_id=each.node.node_id), score=0.5) for each in nodes
    ]
    known = {each.node.node_id: each.node for each in nodes}
    return over(RecursiveRetriever("root", {"root": ListRetriever(references)}, node_dict=known))


# --- postprocessors ---


def processed(nodes: Nodes, *processors: BaseNodePostprocessor) -> str:
    return query(nodes, node_postprocessors=list(processors))


def windows(nodes: Nodes) -> Nodes:
    """Return sentences, each with its window of sentences, as a `SentenceWindowNodeParser` writes them."""
    for each in nodes:
        each.node.metadata["window"] = f"Before it. {each.text} After it."
        each.node.excluded_llm_metadata_keys = ["window", "file_name"]
    return nodes


def neighbours(nodes: Nodes) -> PrevNextNodePostprocessor:
    """Return a postprocessor that adds what stands behind each node in its file."""
    store = SimpleDocumentStore()
    for each in nodes:
        following = TextNode(text=f"So much of {each.node.metadata['file_name']}.", id_=f"behind {each.node.node_id}")
        each.node.relationships[NodeRelationship.NEXT] = following.as_related_node_info()
        following.relationships[NodeRelationship.PREVIOUS] = each.node.as_related_node_info()
        store.add_documents([each.node, following])
    return PrevNextNodePostprocessor(docstore=store, num_nodes=1, mode="next")


def chunks(nodes: Nodes) -> Nodes:
    """Return nodes of which two are chunks of one document that overlap."""
    for each in nodes:
        place = {node_id(0): 0, node_id(1): len(each.text) - 10}.get(each.node.node_id)
        if place is not None:
            each.node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="atlas")
            each.node.start_char_idx = place
    return nodes


# --- other indices ---


def listed(nodes: Nodes, **options: Any) -> str:
    return str(SummaryIndex([each.node for each in nodes]).as_query_engine(**options).query(QUERY))


def summaries(nodes: Nodes) -> str:
    documents = [Document(text=each.text, id_=each.node.node_id, metadata=each.node.metadata) for each in nodes]
    synthesized = DocumentSummaryIndex.from_documents(documents, llm=HashingLLM(says="Of boats."))
    return str(synthesized.as_query_engine(retriever_mode="embedding", similarity_top_k=len(nodes)).query(QUERY))


WINDOW = MetadataReplacementPostProcessor(target_metadata_key="window")
MARKER = SegmentMarkerPostprocessor()
SIMILAR = SimilarityPostprocessor(similarity_cutoff=0.1)
ENTRIES = [
    *invariant("retrievers around others", GLOBAL, {
        "`QueryFusionRetriever`": lambda _, nodes: fused(nodes, num_queries=1, mode="reciprocal_rerank"),
        "`QueryFusionRetriever` with written queries": lambda _, nodes: fused(nodes),
        "`AutoMergingRetriever`": lambda _, nodes: merging(nodes),
        "`RecursiveRetriever`": lambda _, nodes: recursive(nodes),
    }),
    *invariant("postprocessors", GLOBAL, {
        "sentence windows by `MetadataReplacementPostProcessor`": lambda _, nodes: processed(windows(nodes), WINDOW),
        "`LongContextReorder`": lambda _, nodes: processed(nodes, LongContextReorder()),
        "`SimilarityPostprocessor`": lambda _, nodes: processed(nodes, SIMILAR),
        "`PrevNextNodePostprocessor`": lambda _, nodes: processed(nodes, neighbours(nodes)),
        "`SourceJoiner` of this package": lambda _, nodes: processed(chunks(nodes), SourceJoiner()),
    }),
    *invariant("postprocessors with `SegmentMarkerPostprocessor`", MORE, {
        "behind sentence windows": lambda _, nodes: processed(windows(nodes), WINDOW, MARKER),
        "behind `LongContextReorder`": lambda _, nodes: processed(nodes, LongContextReorder(), MARKER),
        "behind `PrevNextNodePostprocessor`": lambda _, nodes: processed(nodes, neighbours(nodes), MARKER),
        "in front of `PrevNextNodePostprocessor`": lambda _, nodes: processed(nodes, MARKER, neighbours(nodes)),
        "behind `SourceJoiner`": lambda _, nodes: processed(chunks(nodes), SourceJoiner(), MARKER),
    }),
    *invariant("other indices", GLOBAL, {
        "`SummaryIndex`": lambda _, nodes: listed(nodes),
        '`SummaryIndex`, `response_mode="tree_summarize"`': lambda _, nodes: listed(
            nodes, response_mode="tree_summarize"
        ),
        "`DocumentSummaryIndex`": lambda _, nodes: summaries(nodes),
    }),
]  # fmt: skip
