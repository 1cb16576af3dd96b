"""Chunks of one source as one segment."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle, TextNode

from invariant_rag.errors import RetrievalError
from invariant_rag.rag.text import join_chunks


class SourceJoiner(BaseNodePostprocessor):
    """Joins the chunks of one source into one node, in source order, without repeating text in which they overlap.

    Which chunk comes first in a source is information, and which source was retrieved first is not: so a source is one
    segment, and sources are a set. Put it behind rerankers, and in front of `SegmentMarkerPostprocessor`. A joined node
    has id and metadata of its first chunk, and the best score of its chunks.

    Raises:
        RetrievalError: Chunks of one source have no `start_char_idx`.
    """

    join_by: str | None = Field(
        default=None, description="Metadata key of the source, such as file_path; None: the document that was split."
    )

    @classmethod
    def class_name(cls) -> str:
        """Return the stable id of this class."""
        return "SourceJoiner"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        sources: dict[object, list[NodeWithScore]] = {}
        for each in nodes:
            sources.setdefault(self._source_of(each.node), []).append(each)
        return [chunks[0] if len(chunks) == 1 else _joined(chunks) for chunks in sources.values()]

    def _source_of(self, node: BaseNode) -> object:
        """Return what the chunks of one source have in common; something of its own for a node without a source."""
        source = node.ref_doc_id if self.join_by is None else node.metadata.get(self.join_by)
        return ("node", node.node_id) if source is None else ("source", source)


def _joined(chunks: Sequence[NodeWithScore]) -> NodeWithScore:
    placed = sorted(((_start_of(each.node), each.node.get_content(), each) for each in chunks), key=lambda it: it[:2])
    first, scores = placed[0][2].node, [each.score for each in chunks if each.score is not None]
    shared = {name: getattr(first, name) for name in TextNode.model_fields if hasattr(first, name)}
    text = join_chunks((start, content) for start, content, _ in placed)
    end = max(start + len(content) for start, content, _ in placed)
    node = TextNode(**{**shared, "text": text, "start_char_idx": placed[0][0], "end_char_idx": end})
    return NodeWithScore(node=node, score=max(scores, default=None))


def _start_of(node: BaseNode) -> int:
    start = getattr(node, "start_char_idx", None)
    if start is None:
        raise RetrievalError(
            f"expected chunks with start_char_idx, got node {node.node_id} without",
            hint="Split documents with a node parser of LlamaIndex, or set start_char_idx of your nodes.",
        )
    return int(start)
