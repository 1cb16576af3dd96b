"""Node postprocessors: one keeps the boundaries of nodes in LlamaIndex's own response modes, one joins chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import BaseContentBlock, TextBlock
from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from invariant_rag.errors import RetrievalError
from invariant_rag.prompts import mark
from invariant_rag.rag.text_splitting import join_chunks
from invariant_rag.segments import Segment
from llama_index.llms.invariant_rag.runs import with_text


class MarkedNode(TextNode):
    """A text node whose LLM content is a marked segment. Text and metadata are those of the original node."""

    set_size: int = Field(description="Number of nodes that were retrieved together.", exclude=True)
    retrieval_score: float | None = Field(default=None, description="The retriever's score.", exclude=True)

    def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
        """Return the content of that mode; for `MetadataMode.LLM` as a marked segment."""
        content = super().get_content(metadata_mode)
        if metadata_mode != MetadataMode.LLM:
            return content
        return mark(Segment(content, score=self.retrieval_score), self.set_size)

    def get_content_blocks(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> list[BaseContentBlock]:
        """Return the content as blocks; for `MetadataMode.LLM` as one text block with the marked segment."""
        if metadata_mode == MetadataMode.LLM:
            return [TextBlock(text=self.get_content(metadata_mode))]
        return super().get_content_blocks(metadata_mode)


class SegmentMarkerPostprocessor(BaseNodePostprocessor):
    """Marks nodes, so that `InvariantLLM` recognises them in a prompt. Put it last.

    If a response mode splits nodes, or spreads them over several calls, the LLM issues an `OrderWarning`.
    """

    @classmethod
    def class_name(cls) -> str:
        """Return the stable id of this class."""
        return "SegmentMarkerPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        def marked(each: NodeWithScore) -> TextNode:
            own = {"set_size": len(nodes), "retrieval_score": each.score}
            return with_text(each.node, each.node.get_content(), MarkedNode, **own)

        return [NodeWithScore(node=marked(each), score=each.score) for each in nodes]


class SourceJoiner(BaseNodePostprocessor):
    """Joins the chunks of one source into one node, in source order, without repeating text in which they overlap.

    Put it after rerankers, and before `SegmentMarkerPostprocessor`. A joined node has id and metadata of its first
    chunk, and the best score.

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
            source = each.node.ref_doc_id if self.join_by is None else each.node.metadata.get(self.join_by)
            key = ("node", each.node.node_id) if source is None else ("source", source)
            sources.setdefault(key, []).append(each)
        return [chunks[0] if len(chunks) == 1 else _joined(chunks) for chunks in sources.values()]


def _joined(chunks: Sequence[NodeWithScore]) -> NodeWithScore:
    for each in chunks:
        if getattr(each.node, "start_char_idx", None) is None:
            raise RetrievalError(
                f"expected chunks with start_char_idx, got node {each.node_id} without",
                hint="Split documents with a node parser of LlamaIndex, or set start_char_idx of your nodes.",
            )
    nodes: list[Any] = sorted(
        (each.node for each in chunks), key=lambda node: (node.start_char_idx, node.get_content())
    )
    text = join_chunks((node.start_char_idx, node.get_content()) for node in nodes)
    end = max(node.start_char_idx + len(node.get_content()) for node in nodes)
    joined = with_text(nodes[0], text, end_char_idx=end)
    return NodeWithScore(node=joined, score=max((s.score for s in chunks if s.score is not None), default=None))
