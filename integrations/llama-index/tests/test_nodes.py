"""Nodes and blocks as segments: carriers in messages, marks, and chunks of one source."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from cases import ORDERS, QUERY, TEXTS, caught, nodes_of
from invariant_rag import Segment, SegmentSet
from invariant_rag.errors import RetrievalError
from invariant_rag.prompts import mark, parse_marked, without_marks
from llama_index.core import Document
from llama_index.core.base.llms.types import CacheControl, CachePoint, CitableBlock, TextBlock, ThinkingBlock
from llama_index.core.base.llms.types import DocumentBlock as File
from llama_index.core.llms import ChatMessage
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import ImageNode, IndexNode, MediaResource, MetadataMode, Node, NodeWithScore, TextNode

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor, SourceJoiner

SEGMENT = Segment("It leaves at noon.", title="Ferry")
SCORED = SegmentBlock.of(Segment("It leaves at noon.", title="Ferry", score=0.5))
READ, ASK, TEXT = TextBlock(text="Read: "), TextBlock(text=QUERY), TextBlock(text=SEGMENT.text)
CARRIERS: dict[str, tuple[list[Any], float | None]] = {
    "segment block": ([READ, SegmentBlock.of(SEGMENT), ASK], None),
    "with a score": ([READ, SCORED, ASK], 0.5),
    "citable block": ([READ, CitableBlock(title="Ferry", source="x", content=[TEXT]), ASK], None),
    "document": ([READ, File(data=SEGMENT.text.encode(), title="Ferry", document_mimetype="text/plain"), ASK], None),
    "mark": ([TextBlock(text=f"Read: {mark(SEGMENT)}{QUERY}")], None),
    "mark in a set": ([TextBlock(text=f"Read: {mark(SEGMENT, 1)}{QUERY}")], None),
}
"""Blocks that carry this segment, and the score that they carry."""


def content(llm: InvariantLLM, *messages: ChatMessage) -> list[tuple[str, list[Any]]]:
    """Return what the model is asked: roles, with texts, and segments one by one."""
    asked = []
    for message in llm._chat_call(messages, {}).request.messages:
        parts = [[part] if isinstance(part, str) else list(part) for part in message["content"]]
        asked.append((message["role"], [each for part in parts for each in part if each]))
    return asked


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_segment_arrives_by_every_carrier(llm: InvariantLLM, carrier: str) -> None:
    blocks, score = CARRIERS[carrier]
    message = ChatMessage(blocks=blocks)
    segment = Segment(SEGMENT.text, title="Ferry", score=score)
    assert content(llm, message) == [("user", ["Read: ", segment, QUERY])]
    restored = ChatMessage.model_validate_json(message.model_dump_json())
    assert SegmentBlock not in map(type, restored.blocks), "it is a citable block to everyone else"
    assert content(llm, restored) == [("user", ["Read: ", SEGMENT, QUERY])]


def test_texts_and_roles_are_joined_as_llama_index_joins_them(llm: InvariantLLM) -> None:
    silent = [CachePoint(cache_control=CacheControl(type="x")), ThinkingBlock(content="hm")]
    blocks = [*silent, TextBlock(text="a"), TextBlock(text="b")]
    assert content(llm, ChatMessage(blocks=blocks)) == [("user", [ChatMessage(blocks=blocks).content])]
    messages = [ChatMessage("x", role=role) for role in ("developer", "system", "user", "user", "model")]
    found = [(role, "".join(parts)) for role, parts in content(llm, *messages)]
    assert found == [("system", "x\n\nx"), ("user", "x\n\nx"), ("assistant", "x")]


MARKED = [mark(text, 3) for text in TEXTS]
FOUND = {
    "Read: " + "\n\n".join(MARKED): ([3], False),
    **{str([MARKED[i] for i in order]): ([], True) for order in ORDERS},  # escaped, they are no marks
    "".join(MARKED)[5:]: ([2], True),
    MARKED[0]: ([1], True),
    "Icons: \ue200cite\ue202turn0 \ue201 \ueca0.": ([], False),  # characters of others
}
"""Texts with marks, the sets in them, and whether somebody is warned."""


@pytest.mark.parametrize("text", FOUND)
def test_marks_that_arrive_whole_are_a_set_and_others_raise_a_warning(llm: InvariantLLM, text: str) -> None:
    response, messages = caught(llm.complete, text + QUERY)
    assert (response.raw["sets"], bool(messages)) == FOUND[text]


# --- SegmentMarkerPostprocessor ---

KINDS = {
    "text": TextNode(text="a"),
    "metadata": TextNode(text="a", metadata={"page": 3, "secret": 1}, excluded_llm_metadata_keys=["secret"]),
    "template": TextNode(text="a", metadata={"page": 3}, text_template="<{metadata_str}|{content}>"),
    "index": IndexNode(text="a", index_id="x"),
    "image": ImageNode(text="a", image_url="http://localhost/a.png"),
    "media": Node(text_resource=MediaResource(text="a"), metadata={"page": 3}),
    "empty": TextNode(text=""),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_model_gets_of_a_node_is_one_segment_and_all_else_stays(kind: str) -> None:
    node, marker = KINDS[kind], SegmentMarkerPostprocessor.from_dict(SegmentMarkerPostprocessor().to_dict())
    before = node.model_dump_json()
    [marked] = marker.postprocess_nodes([NodeWithScore(node=node, score=0.5)])
    shown = without_marks(node.get_content(MetadataMode.LLM))
    written = marked.node.get_content(MetadataMode.LLM)
    assert parse_marked(written).segments == SegmentSet([Segment(shown, score=0.5)])
    assert marked.node.get_content_blocks(MetadataMode.LLM) == [TextBlock(text=written)]
    assert (marked.node_id, marked.score, marked.metadata) == (node.node_id, 0.5, node.metadata)
    for mode in (MetadataMode.NONE, MetadataMode.ALL, MetadataMode.EMBED):
        assert marked.node.get_content(mode) == node.get_content(mode)
    assert node.model_dump_json() == before
    assert marker.postprocess_nodes([marked]) == [marked] == await marker.apostprocess_nodes([marked])
    if type(node) is TextNode:
        assert TextNode.from_dict(marked.node.to_dict()) == node, "it is stored as a text node"


# --- SourceJoiner ---

TOWN = "The ferry leaves at noon. The mill grinds barley. A bridge crosses the river. The bell rings twice a day."


def test_overlapping_chunks_are_joined_without_repeating_text_in_every_order() -> None:
    splitter = SentenceSplitter(chunk_size=14, chunk_overlap=7)
    nodes = splitter.get_nodes_from_documents([Document(text=TOWN, id_="town", metadata={})])
    chunks = [NodeWithScore(node=each, score=0.1 * place) for place, each in enumerate(nodes)]
    assert sum(len(each.text) for each in nodes) > len(TOWN)
    alone = NodeWithScore(node=TextNode(text="alone"), score=None)
    for order in permutations([*chunks, alone]):
        joined = SourceJoiner().postprocess_nodes(list(order))
        assert sorted(each.text for each in joined) == [TOWN, "alone"]
        assert max(each.score or 0.0 for each in joined) == chunks[-1].score
    (joined,) = SourceJoiner().postprocess_nodes([chunks[-1], chunks[0]])
    assert joined.text == f"{chunks[0].text}\n{chunks[-1].text}", "what is missing between chunks is a line end"
    assert (joined.node.start_char_idx, joined.node.end_char_idx) == (0, len(TOWN))


def test_a_metadata_key_may_name_the_source_and_chunks_need_a_place() -> None:
    def nodes(starts: list[int | None]) -> list[NodeWithScore]:
        pairs = zip(("five six", "four five"), starts, strict=True)
        made = [TextNode(text=text, start_char_idx=start, metadata={"file": "a.txt"}) for text, start in pairs]
        return [NodeWithScore(node=each) for each in made]

    by_file = SourceJoiner(join_by="file")
    assert [each.text for each in by_file.postprocess_nodes(nodes([5, 0]))] == ["four five six"]
    assert len(SourceJoiner().postprocess_nodes(nodes([5, 0]))) == 2
    with pytest.raises(RetrievalError, match="start_char_idx"):
        by_file.postprocess_nodes(nodes([None, None]))
    assert len(nodes_of()) == len(SourceJoiner().postprocess_nodes(nodes_of()))
