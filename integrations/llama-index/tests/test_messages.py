from __future__ import annotations

import warnings

import pytest
from cases import QUERY, TEXTS
from invariant_rag import Segment, SegmentSet
from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import mark, without_marks
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
from llama_index.llms.invariant_rag.messages import chat_messages, to_turns
from llama_index.llms.invariant_rag.reading import Reader

SEGMENT = Segment("It leaves at noon.", title="Ferry")
READ, ASK = TextBlock(text="Read: "), TextBlock(text=QUERY)
CARRIERS = {
    "segment block": [READ, SegmentBlock.of(SEGMENT), ASK],
    "citable block": [READ, CitableBlock(title="Ferry", source="x", content=[TextBlock(text=SEGMENT.text)]), ASK],
    "document": [READ, DocumentBlock(data=SEGMENT.text.encode(), title="Ferry", document_mimetype="text/plain"), ASK],
    "mark": [TextBlock(text=f"Read: {mark(SEGMENT)}{QUERY}")],
    "mark in a set": [TextBlock(text=f"Read: {mark(SEGMENT, 1)}{QUERY}")],
}


def content(*blocks: object) -> list[object]:
    turns = to_turns([ChatMessage(role=MessageRole.USER, blocks=list(blocks))])
    [message] = chat_messages(Reader().read(turns).turns)
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
    read = chat_messages(to_turns([ChatMessage("x", role=role) for role in roles]))
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


def said(llm: InvariantLLM, text: str) -> list[str]:
    """Return the warnings that a text raises."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm.complete(text)
    return [str(each.message) for each in caught if issubclass(each.category, OrderWarning)]


def test_segments_that_were_left_whole_raise_no_warning(llm: InvariantLLM) -> None:
    text = "Read: " + "\n\n".join(mark(text, 3) for text in TEXTS) + " " + QUERY
    assert said(llm, text) == []
    assert llm.complete(text).raw["sets"] == [3]
    assert without_marks(text) == "Read: " + "\n\n".join(TEXTS) + " " + QUERY


@pytest.mark.parametrize("cut", [slice(5, None), slice(None, -20)], ids=["behind", "in front"])
def test_a_segment_that_was_cut_raises_a_warning(llm: InvariantLLM, cut: slice) -> None:
    messages = said(llm, "".join(mark(text, 3) for text in TEXTS)[cut] + QUERY)
    assert any("2 of the 3 segments" in each and "Pass all documents" in each for each in messages)


def test_a_set_that_was_spread_over_calls_raises_a_warning(llm: InvariantLLM) -> None:
    (message,) = said(llm, mark(TEXTS[0], 3) + QUERY)
    assert "1 of the 3 segments" in message
    assert "Pass all documents" in message


def test_a_printed_list_is_read_as_a_set(llm: InvariantLLM) -> None:
    printed = [str([mark(TEXTS[i], 3) for i in order]) for order in ((0, 1, 2), (2, 0, 1))]
    assert [said(llm, text) for text in printed] == [[], []]
    assert len({llm.complete(text).text for text in printed}) == 1


@pytest.mark.parametrize("text", ["Icons: \ue200cite\ue202turn0 \ue201 \ueca0.", r"The characters \ue200 and \ueca0."])
def test_characters_of_others_are_no_marks(llm: InvariantLLM, text: str) -> None:
    assert said(llm, text) == []
    assert llm.complete(text).raw["sets"] == []
