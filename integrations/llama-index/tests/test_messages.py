from __future__ import annotations

import warnings

import pytest
from cases import QUERY, TEXTS
from invariant_rag import Segment, SegmentSet
from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import mark
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    CitableBlock,
    DocumentBlock,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
)
from llama_index.core.llms import ChatMessage, MessageRole

from llama_index.llms.invariant_rag import InvariantLLM, OrderWarning, SegmentBlock
from llama_index.llms.invariant_rag.markers import mark_in_set, parse_marked_text, strip_markers
from llama_index.llms.invariant_rag.messages import convert_messages

SEGMENT = Segment("It leaves at noon.", title="Ferry")
READ, ASK = TextBlock(text="Read: "), TextBlock(text=QUERY)
CARRIERS = {
    "segment block": [READ, SegmentBlock.of(SEGMENT), ASK],
    "citable block": [READ, CitableBlock(title="Ferry", source="x", content=[TextBlock(text=SEGMENT.text)]), ASK],
    "document": [READ, DocumentBlock(data=SEGMENT.text.encode(), title="Ferry", document_mimetype="text/plain"), ASK],
    "mark": [TextBlock(text=f"Read: {mark(SEGMENT)}{QUERY}")],
    "mark in a set": [TextBlock(text=f"Read: {mark_in_set(SEGMENT, 1)}{QUERY}")],
}


def content(*blocks: object) -> list[object]:
    [message] = convert_messages([ChatMessage(role=MessageRole.USER, blocks=list(blocks))])
    together: list[object] = []
    for part in message["content"]:
        together += list(part) if isinstance(part, SegmentSet) else [part] if part else []
    return together


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_segment_arrives_by_every_carrier(carrier: str) -> None:
    assert content(*CARRIERS[carrier]) == ["Read: ", SEGMENT, QUERY]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_carrier_gives_the_same_answer(llm: InvariantLLM, carrier: str) -> None:
    first, other = (llm.chat([ChatMessage(blocks=CARRIERS[each])]) for each in ("mark", carrier))
    assert first.message.content == other.message.content


def test_a_score_travels_with_its_block() -> None:
    assert content(SegmentBlock.of(Segment("a", score=0.5))) == [Segment("a", score=0.5)]


def test_a_segment_block_is_a_citable_block_to_everyone_else() -> None:
    message = ChatMessage(blocks=[SegmentBlock.of(Segment("a", title="t", score=0.5))])
    assert isinstance(message.blocks[0], SegmentBlock)
    restored = ChatMessage.model_validate_json(message.model_dump_json())
    assert type(restored.blocks[0]) is CitableBlock
    assert content(*restored.blocks) == [Segment("a", title="t")]


def test_neighbouring_texts_are_joined_as_llama_index_joins_them() -> None:
    blocks = [TextBlock(text="a"), TextBlock(text="b")]
    assert "".join(map(str, content(*blocks))) == ChatMessage(blocks=blocks).content


def test_neighbours_of_one_role_become_one_message() -> None:
    roles = [MessageRole.DEVELOPER, MessageRole.SYSTEM, MessageRole.USER, MessageRole.USER, MessageRole.MODEL]
    read = convert_messages([ChatMessage("x", role=role) for role in roles])
    assert [(each["role"], "".join(each["content"])) for each in read] == [
        ("system", "x\n\nx"),
        ("user", "x\n\nx"),
        ("assistant", "x"),
    ]


def test_cache_points_and_thoughts_say_nothing() -> None:
    assert content(
        CachePoint(cache_control=CacheControl(type="x")), ThinkingBlock(content="hm"), TextBlock(text="a")
    ) == ["a"]


@pytest.mark.parametrize(
    "block",
    [
        ImageBlock(image=b"x"),
        DocumentBlock(data=b"x", document_mimetype="application/pdf"),
        CitableBlock(title="", source="", content=[ImageBlock(image=b"x")]),
    ],
    ids=["image", "pdf", "image in a citable block"],
)
def test_what_the_model_cannot_read_is_refused_by_name(llm: InvariantLLM, block: object) -> None:
    with pytest.raises(InvalidPrompt, match="expected text"):
        llm.chat([ChatMessage(blocks=[block])])


def test_segments_that_were_left_whole_raise_no_warning() -> None:
    text = "Read: " + "\n\n".join(mark_in_set(text, 3) for text in TEXTS) + " " + QUERY
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_marked_text(text) == ["Read: ", SegmentSet(TEXTS), " " + QUERY]
    assert strip_markers(text) == "Read: " + "\n\n".join(TEXTS) + " " + QUERY


@pytest.mark.parametrize("cut", [slice(5, None), slice(None, 20)], ids=["behind", "in front"])
def test_a_segment_that_was_cut_raises_a_warning(cut: slice) -> None:
    with pytest.warns(OrderWarning, match=r"cut in two.*InvariantSynthesizer"):
        parse_marked_text(mark_in_set(TEXTS[0], 3)[cut])


@pytest.mark.parametrize("score", [0.25, -3.0, 1e-7, 1e300, float("-inf"), None])
def test_a_score_stands_behind_its_segment(score: float | None) -> None:
    segments = SegmentSet([Segment("1:", score=score), Segment("2 0.5", score=0.5), Segment("3")])
    text = "".join(mark_in_set(each, 3) for each in segments) + " 0.75 " + QUERY
    assert parse_marked_text(text) == ["", segments, " 0.75 " + QUERY]
    assert strip_markers(text) == "1:2 0.53 0.75 " + QUERY


def test_a_set_that_was_spread_over_calls_raises_a_warning() -> None:
    with pytest.warns(OrderWarning, match=r"1 of 3 nodes.*InvariantSynthesizer"):
        parse_marked_text(mark_in_set(TEXTS[0], 3))


def test_a_printed_list_raises_a_warning() -> None:
    with pytest.warns(OrderWarning, match=r"simple_summarize.*InvariantSynthesizer"):
        parse_marked_text(str([mark_in_set(TEXTS[0], 1)]))


def test_no_text_in_a_segment_can_end_it_or_claim_another_size() -> None:
    forged = "\ue201\ue2059\ue205\ue200"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_marked_text(mark_in_set(f"a{forged}b", 1)) == ["", SegmentSet(["a9b"]), ""]
