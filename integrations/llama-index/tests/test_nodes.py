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
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    CitableBlock,
    DocumentBlock,
    TextBlock,
    ThinkingBlock,
)
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import ImageNode, IndexNode, MediaResource, MetadataMode, Node, NodeWithScore, TextNode

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor, SourceJoiner

SEGMENT = Segment("It leaves at noon.", title="Ferry")
READ, ASK, TEXT = TextBlock(text="Read: "), TextBlock(text=QUERY), TextBlock(text=SEGMENT.text)
CARRIERS = {
    "segment block": [READ, SegmentBlock.of(SEGMENT), ASK],
    "citable block": [READ, CitableBlock(title="Ferry", source="x", content=[TEXT]), ASK],
    "document": [READ, DocumentBlock(data=SEGMENT.text.encode(), title="Ferry", document_mimetype="text/plain"), ASK],
    "mark": [TextBlock(text=f"Read: {mark(SEGMENT)}{QUERY}")],
    "mark in a set": [TextBlock(text=f"Read: {mark(SEGMENT, 1)}{QUERY}")],
}


def content(llm: InvariantLLM, *messages: ChatMessage) -> list[tuple[str, list[Any]]]:
    """Return what the model is asked: roles, with texts, and segments one by one."""
    asked = []
    for message in llm._chat_call(messages, {}).request.messages:
        parts = [[part] if isinstance(part, str) else list(part) for part in message["content"]]
        asked.append((message["role"], [each for part in parts for each in part if each]))
    return asked


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_segment_arrives_by_every_carrier(llm: InvariantLLM, carrier: str) -> None:
    assert content(llm, ChatMessage(blocks=CARRIERS[carrier])) == [("user", ["Read: ", SEGMENT, QUERY])]


def test_a_segment_block_carries_its_score_and_is_a_citable_block_to_everyone_else(llm: InvariantLLM) -> None:
    message = ChatMessage(blocks=[SegmentBlock.of(Segment("a", title="t", score=0.5))])
    restored = ChatMessage.model_validate_json(message.model_dump_json())
    assert type(restored.blocks[0]) is CitableBlock
    for asked, score in ((message, 0.5), (restored, None)):
        assert content(llm, asked) == [("user", [Segment("a", title="t", score=score)])]


def test_texts_and_roles_are_joined_as_llama_index_joins_them(llm: InvariantLLM) -> None:
    silent = [CachePoint(cache_control=CacheControl(type="x")), ThinkingBlock(content="hm")]
    blocks = [*silent, TextBlock(text="a"), TextBlock(text="b")]
    assert content(llm, ChatMessage(blocks=blocks)) == [("user", [ChatMessage(blocks=blocks).content])]
    roles = [MessageRole.DEVELOPER, MessageRole.SYSTEM, MessageRole.USER, MessageRole.USER, MessageRole.MODEL]
    found = [(role, "".join(parts)) for role, parts in content(llm, *(ChatMessage("x", role=role) for role in roles))]
    assert found == [("system", "x\n\nx"), ("user", "x\n\nx"), ("assistant", "x")]


def test_marks_that_arrive_whole_are_a_set_and_others_raise_a_warning(llm: InvariantLLM) -> None:
    marked = [mark(text, 3) for text in TEXTS]
    whole = "Read: " + "\n\n".join(marked) + QUERY
    assert without_marks(whole) == "Read: " + "\n\n".join(TEXTS) + QUERY
    printed = [str([marked[i] for i in order]) for order in ORDERS]  # as a Python list, which `simple_summarize` writes
    response, messages = caught(lambda: llm.complete(whole))
    assert (response.raw["sets"], messages) == ([3], [])
    for text in printed:  # escaped, they are no marks any more
        response, messages = caught(lambda text=text: llm.complete(text))
        assert (response.raw["sets"], len(messages)) == ([], 1)
    joined = "".join(marked)
    for text, got in ((joined[5:], "2 of the 3"), (joined[:-20], "2 of the 3"), (marked[0], "1 of the 3")):
        messages = caught(lambda text=text: llm.complete(text + QUERY))[1]
        assert any(f"{got} segments" in each and "Pass all documents" in each for each in messages)
    for text in ("Icons: \ue200cite\ue202turn0 \ue201 \ueca0.", r"The characters \ue200 and \ueca0."):
        response, messages = caught(lambda text=text: llm.complete(text))
        assert (response.raw["sets"], messages) == ([], []), "characters of others are no marks"


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
    def nodes(*texts: str, starts: Any) -> list[NodeWithScore]:
        made = zip(texts, starts, strict=True)
        file = {"file": "a.txt"}
        return [NodeWithScore(node=TextNode(text=text, start_char_idx=at, metadata=file)) for text, at in made]

    found = nodes("five six", "four five", starts=[5, 0])
    (joined,) = SourceJoiner(join_by="file").postprocess_nodes(found)
    assert joined.text == "four five six"
    assert len(SourceJoiner().postprocess_nodes(found)) == 2
    with pytest.raises(RetrievalError, match="start_char_idx"):
        SourceJoiner(join_by="file").postprocess_nodes(nodes("a", "b", starts=[None, None]))
    assert len(nodes_of()) == len(SourceJoiner().postprocess_nodes(nodes_of()))
