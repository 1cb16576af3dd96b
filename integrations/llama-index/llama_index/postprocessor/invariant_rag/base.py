"""Nodes whose text for the LLM is a marked segment."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import BaseContentBlock, TextBlock
from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle, TextNode

from invariant_rag.prompts import mark
from invariant_rag.segments import Segment


class MarkedNode(TextNode):
    """A text node whose LLM content is a marked segment. Text and metadata are those of the original node."""

    set_size: int = Field(description="Number of nodes that were retrieved together.", exclude=True)
    retrieval_score: float | None = Field(default=None, description="The retriever's score.", exclude=True)

    @classmethod
    def of(cls, node: BaseNode, set_size: int, score: float | None = None) -> MarkedNode:
        """Return a marked copy of a node."""
        shared: dict[str, Any] = {name: getattr(node, name) for name in TextNode.model_fields if hasattr(node, name)}
        return cls(**{**shared, "text": node.get_content(), "set_size": set_size, "retrieval_score": score})

    def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
        """Return the text with the metadata of that mode; for `MetadataMode.LLM` as a marked segment."""
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
    """Marks nodes so that `InvariantLLM` finds them in prompts of `compact`, `tree_summarize` and `ContextChatEngine`.

    Put it last among the postprocessors. The input nodes are not changed. If a response mode splits nodes, or spreads
    them over several calls, the LLM issues an `OrderWarning`.
    """

    @classmethod
    def class_name(cls) -> str:
        """Return the stable id of this class."""
        return "SegmentMarkerPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=MarkedNode.of(each.node, len(nodes), each.score), score=each.score) for each in nodes
        ]
