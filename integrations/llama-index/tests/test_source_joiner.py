"""Chunks of one source become one segment."""

from __future__ import annotations

from itertools import permutations

import pytest
from invariant_rag.errors import RetrievalError
from llama_index.core import Document
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import NodeWithScore, TextNode

from llama_index.postprocessor.invariant_rag import SourceJoiner

TEXT = "The ferry leaves at noon. The mill grinds barley. A bridge crosses the river. The bell rings twice a day."


def chunks() -> list[NodeWithScore]:
    """Return a document in chunks that overlap, and a node without a source."""
    splitter = SentenceSplitter(chunk_size=14, chunk_overlap=7)
    nodes = splitter.get_nodes_from_documents([Document(text=TEXT, id_="town", metadata={})])
    assert len(nodes) > 2
    assert sum(len(each.text) for each in nodes) > len(TEXT)
    found = [NodeWithScore(node=each, score=0.1 * place) for place, each in enumerate(nodes)]
    return [*found, NodeWithScore(node=TextNode(text="alone"), score=None)]


def test_overlapping_chunks_are_joined_without_repeating_text_in_every_order() -> None:
    for order in permutations(chunks()):
        joined = SourceJoiner().postprocess_nodes(list(order))
        assert sorted(each.text for each in joined) == [TEXT, "alone"]
        assert max(each.score or 0.0 for each in joined) == max(each.score or 0.0 for each in order)


def test_what_is_missing_between_chunks_is_a_line_end() -> None:
    first, *_, last, _ = chunks()
    (joined,) = SourceJoiner().postprocess_nodes([last, first])
    assert joined.text == f"{first.text}\n{last.text}"
    assert (joined.node.start_char_idx, joined.node.end_char_idx) == (0, len(TEXT))


def test_a_metadata_key_may_name_the_source() -> None:
    nodes = [
        NodeWithScore(node=TextNode(text=text, start_char_idx=start, metadata={"file": "a.txt"}))
        for start, text in ((5, "five six"), (0, "four five"))
    ]
    (joined,) = SourceJoiner(join_by="file").postprocess_nodes(nodes)
    assert joined.text == "four five six"
    assert len(SourceJoiner().postprocess_nodes(nodes)) == 2


def test_chunks_without_a_place_are_refused() -> None:
    nodes = [NodeWithScore(node=TextNode(text=text, metadata={"file": "a.txt"})) for text in "ab"]
    with pytest.raises(RetrievalError, match="start_char_idx"):
        SourceJoiner(join_by="file").postprocess_nodes(nodes)
