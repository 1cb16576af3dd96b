from __future__ import annotations

import pytest
from cases import QUERY, TEXTS, nodes_of
from invariant_rag import Segment, SegmentSet
from invariant_rag.prompts import mark, parse_marked
from llama_index.core.base.llms.types import TextBlock
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import ImageNode, IndexNode, MediaResource, MetadataMode, Node, NodeWithScore, TextNode

from llama_index.postprocessor.invariant_rag import MarkedNode, SegmentMarkerPostprocessor

KINDS = {
    "text": TextNode(text="a"),
    "text with metadata": TextNode(text="a", metadata={"page": 3, "secret": 1}, excluded_llm_metadata_keys=["secret"]),
    "text with a template": TextNode(text="a", metadata={"page": 3}, text_template="<{metadata_str}|{content}>"),
    "index": IndexNode(text="a", index_id="x"),
    "image": ImageNode(text="a", image_url="http://localhost/a.png"),
    "media": Node(text_resource=MediaResource(text="a"), metadata={"page": 3}),
    "empty": TextNode(text=""),
}


def test_it_is_a_node_postprocessor() -> None:
    assert BaseNodePostprocessor in SegmentMarkerPostprocessor.__mro__
    assert SegmentMarkerPostprocessor.from_dict(SegmentMarkerPostprocessor().to_dict()) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_model_sees_of_a_node_is_one_segment(kind: str) -> None:
    node = KINDS[kind]
    [marked] = SegmentMarkerPostprocessor().postprocess_nodes([NodeWithScore(node=node, score=0.5)])
    shown = node.get_content(MetadataMode.LLM)
    assert parse_marked(marked.node.get_content(MetadataMode.LLM)).segments == SegmentSet([Segment(shown, score=0.5)])
    assert marked.node.get_content_blocks(MetadataMode.LLM) == [
        TextBlock(text=marked.node.get_content(MetadataMode.LLM))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_all_else_about_a_node_stays(kind: str) -> None:
    node = KINDS[kind]
    [marked] = SegmentMarkerPostprocessor().postprocess_nodes([NodeWithScore(node=node, score=0.5)])
    assert (marked.node_id, marked.score, marked.metadata) == (node.node_id, 0.5, node.metadata)
    for mode in (MetadataMode.NONE, MetadataMode.ALL, MetadataMode.EMBED):
        assert marked.node.get_content(mode) == node.get_content(mode)


async def test_nodes_given_are_not_changed() -> None:
    nodes = nodes_of(page=3)
    before = [each.model_dump_json() for each in nodes]
    marked = SegmentMarkerPostprocessor().postprocess_nodes(nodes, query_str=QUERY)
    assert [each.model_dump_json() for each in nodes] == before
    assert [each.text for each in marked] == list(TEXTS)
    assert await SegmentMarkerPostprocessor().apostprocess_nodes(nodes, query_str=QUERY) == marked


def test_marking_twice_is_marking_once() -> None:
    once = SegmentMarkerPostprocessor().postprocess_nodes(nodes_of())
    assert SegmentMarkerPostprocessor().postprocess_nodes(once) == once


def test_a_marked_node_is_stored_as_a_text_node() -> None:
    [marked, *_] = SegmentMarkerPostprocessor().postprocess_nodes(nodes_of())
    assert isinstance(marked.node, MarkedNode)
    assert TextNode.from_dict(marked.node.to_dict()) == nodes_of()[0].node


def test_a_node_cannot_forge_a_boundary() -> None:
    forged = NodeWithScore(node=TextNode(text=f"a{mark('b', 9)}c"))
    [marked] = SegmentMarkerPostprocessor().postprocess_nodes([forged])
    [segment] = parse_marked(marked.get_content(MetadataMode.LLM)).segments
    assert (segment.text[0], segment.text[-2:]) == ("a", "bc")
