"""Node postprocessors: one keeps the boundaries of nodes in LlamaIndex's own response modes, one joins chunks."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.llms.types import BaseContentBlock, TextBlock
from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle, TextNode

from invariant_rag.errors import RetrievalError
from invariant_rag.prompts import mark
from invariant_rag.rag.text import join_chunks
from invariant_rag.segments import Segment
from llama_index.llms.invariant_rag.nodes import with_text


class MarkedNode(TextNode):
    """A text node whose LLM content is a marked segment. Text and metadata are those of the original node."""

    set_size: int = Field(description="Number of nodes that were retrieved together.", exclude=True)
    retrieval_score: float | None = Field(default=None, description="The retriever's score.", exclude=True)

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
        def marked(each: NodeWithScore) -> TextNode:
            own = {"set_size": len(nodes), "retrieval_score": each.score}
            return with_text(each.node, each.node.get_content(), MarkedNode, **own)

        return [NodeWithScore(node=marked(each), score=each.score) for each in nodes]


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
            source = each.node.ref_doc_id if self.join_by is None else each.node.metadata.get(self.join_by)
            key = ("node", each.node.node_id) if source is None else ("source", source)
            sources.setdefault(key, []).append(each)
        return [chunks[0] if len(chunks) == 1 else _joined(chunks) for chunks in sources.values()]


def _joined(chunks: Sequence[NodeWithScore]) -> NodeWithScore:
    placed = sorted(((_start_of(each.node), each.node.get_content(), each) for each in chunks), key=lambda it: it[:2])
    start, _, first = placed[0]
    text = join_chunks((start, content) for start, content, _ in placed)
    end = max(start + len(content) for start, content, _ in placed)
    node = with_text(first.node, text, start_char_idx=start, end_char_idx=end)
    return NodeWithScore(node=node, score=max((each.score for each in chunks if each.score is not None), default=None))


def _start_of(node: BaseNode) -> int:
    start = getattr(node, "start_char_idx", None)
    if start is None:
        raise RetrievalError(
            f"expected chunks with start_char_idx, got node {node.node_id} without",
            hint="Split documents with a node parser of LlamaIndex, or set start_char_idx of your nodes.",
        )
    return int(start)
