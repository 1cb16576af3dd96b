"""`canonical` and `vote` around LLMs that know of no segments: what the other LLM is sent, and what comes back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import Any

import pytest
from cases import ORDERS, QUERY, TEXTS, ListRetriever, nodes_of
from invariant_rag.errors import InvalidChoice, UnknownName, UnsupportedCombination, UnsupportedModel
from invariant_rag.orderings import Score
from invariant_rag.prompts import mark
from llama_index.core import Settings
from llama_index.core.base.llms.types import ImageBlock, TextBlock, ToolCallBlock
from llama_index.core.bridge.pydantic import BaseModel, Field
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.llms import ChatMessage, ChatResponse, CompletionResponse, CustomLLM, LLMMetadata
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.mock import MockFunctionCallingLLM, MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import MediaResource, Node, NodeWithScore
from llama_index.core.tools import FunctionTool

from llama_index.llms.invariant_rag import SegmentBlock, canonical, vote
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

MARKS = re.compile("[\ueca0-\ueca3]")
EIGHT = [f"{prefix}{name}" for name in ("complete", "chat") for prefix in ("", "stream_", "a", "astream_")]
USAGE = {"prompt_tokens": 10, "completion_tokens": 2}


def requests(messages: list[ChatMessage]) -> list[list[ChatMessage]]:
    """Return the messages that a wrapped LLM gets."""
    return list(canonical(MockLLM())._messages(messages, {}).inputs)


class Reader(CustomLLM):
    """An LLM behind an API: it takes texts only, and answers with the first document that it reads."""

    requests: list[str] = Field(default_factory=list)
    lock: Any = Field(default_factory=Lock)
    favourite: str = ""
    """Which document it answers with wherever it stands, unless it stands last."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=True)

    def read(self, text: str) -> str:
        documents = re.findall(r"Document: (.*)", text)
        if self.favourite in documents[:-1]:
            return self.favourite
        return documents[0] if documents else "nothing"

    def _asked(self, text: str) -> CompletionResponse:
        with self.lock:
            self.requests.append(text)
        return CompletionResponse(text=self.read(text), raw={"usage": USAGE})

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self._asked(prompt)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        whole = self._asked(prompt)
        words = re.findall(r"\S+\s*", whole.text)
        return (CompletionResponse(text="".join(words[: i + 1]), delta=words[i]) for i in range(len(words)))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        if any(not isinstance(block, TextBlock) for message in messages for block in message.blocks):
            raise TypeError("expected text")
        found = self._asked("\n".join(f"{message.role.value}: {message.content}" for message in messages))
        return ChatResponse(message=ChatMessage(found.text, role="assistant"), raw=found.raw)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
        text = self.chat(messages).message.content
        words = re.findall(r"\S+\s*", text)
        return (ChatResponse(message=ChatMessage("".join(words[: i + 1])), delta=w) for i, w in enumerate(words))


def messages_of(order: Any) -> list[ChatMessage]:
    return [ChatMessage(blocks=[*(SegmentBlock.of(TEXTS[i]) for i in order), TextBlock(text=QUERY)])]


def text_of(order: Any) -> str:
    return "".join(mark(TEXTS[i]) for i in order) + QUERY


async def answer(llm: Any, name: str, order: Any) -> str:
    """What one of the eight methods says."""
    response = getattr(llm, name)(text_of(order) if name.endswith("complete") else messages_of(order))
    if name.startswith("a"):
        response = await response
    if name.startswith("astream"):
        return "".join([each.delta async for each in response])
    if name.startswith("stream"):
        return "".join(each.delta for each in response)
    return str(response.text if name.endswith("complete") else response.message.content)


@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("wrap", [canonical, vote])
async def test_answers_ignore_the_order_of_segments(wrap: Any, name: str) -> None:
    reader = Reader()
    answers = {await answer(wrap(reader), name, order) for order in ORDERS}
    assert len(answers) == 1
    assert answers <= set(TEXTS)
    assert not any(MARKS.search(text) for text in reader.requests)
    assert all(f"Document: {text}\n" in request for text in TEXTS for request in reader.requests)
    assert len(set(reader.requests)) == (5 if wrap is vote else 1)


def test_the_llm_alone_would_answer_otherwise_in_another_order() -> None:
    texts = ["".join(f"Document: {TEXTS[i]}\n" for i in order) for order in ORDERS]
    assert len({Reader().complete(text).text for text in texts}) == len(TEXTS)


def test_messages_without_segments_are_sent_as_they_are() -> None:
    image = ImageBlock(url="https://example.org/map.png")
    messages = [ChatMessage("Be brief.", role="system"), ChatMessage(blocks=[TextBlock(text="a"), image])]
    assert requests(messages) == [messages]
    [[*_, last]] = requests([ChatMessage(blocks=[SegmentBlock.of("b"), image])])
    assert [type(block) for block in last.blocks] == [TextBlock, ImageBlock]
    assert last.blocks[0].text == "Document: b\n"


def test_sets_of_different_messages_stay_apart() -> None:
    first, second, third = (SegmentBlock.of(text) for text in sorted(TEXTS))
    reader = Reader()
    apart = [ChatMessage(blocks=[first]), ChatMessage("Well.", role="assistant"), ChatMessage(blocks=[second, third])]
    canonical(reader).chat(apart)
    assert reader.requests[0].index("Document: A") < reader.requests[0].index("Well.")


def test_a_vote_takes_what_most_orders_say() -> None:
    loved = min(TEXTS)  # canonical order lists it last
    reader = Reader(favourite=loved)
    assert canonical(reader).complete(text_of(ORDERS[0])).text != loved
    reader.requests.clear()
    response = vote(reader, votes=6).complete(text_of(ORDERS[0]))
    assert Counter(map(reader.read, reader.requests))[loved] == 4
    assert response.text == loved
    assert response.additional_kwargs["vote"] == {"calls": 6, "agreed": 4}


def test_a_tie_is_the_canonical_answer_and_no_order_is_asked_about_twice() -> None:
    first = canonical(Reader()).complete(text_of(ORDERS[0])).text
    tied = vote(Reader(), votes=20).complete(text_of(ORDERS[3]))
    assert tied.text == first == vote(Reader(), votes=1).complete(text_of(ORDERS[2])).text
    assert tied.additional_kwargs["vote"] == {"calls": 6, "agreed": 2}


def test_what_counts_can_be_said() -> None:
    model = vote(Reader(), votes=6, answer_of=lambda response: "the" in response.text)
    assert model.complete(text_of(ORDERS[0])).additional_kwargs["vote"]["agreed"] > 2


async def test_tokens_of_all_calls_are_told_and_counted_once() -> None:
    counter = TokenCountingHandler()
    llm = vote(Reader(callback_manager=CallbackManager([counter])), votes=4)
    assert llm.chat(messages_of(ORDERS[0])).additional_kwargs["total_tokens"] == 4 * 12
    assert counter.total_llm_token_count == 4 * 12
    assert (await llm.achat(messages_of(ORDERS[0]))).additional_kwargs["total_tokens"] == 4 * 12


@pytest.mark.parametrize("wrap", [canonical, vote])
@pytest.mark.parametrize("when", ["llm", "before", "after", "settings", "settings first", "synthesizer"])
def test_tokens_are_counted_once_wherever_the_handler_is_set(wrap: Any, when: str) -> None:
    counter = TokenCountingHandler()
    manager = CallbackManager([counter])
    reader = Reader(callback_manager=manager) if when == "llm" else Reader()
    if when == "before":
        reader.callback_manager = manager
    if when == "settings first":
        Settings.callback_manager = manager
    llm = wrap(reader)
    if when == "after":
        llm.callback_manager = manager
    if when.startswith("settings"):
        Settings.llm = llm
        Settings.callback_manager = manager
        llm = None
    synthesizer = InvariantSynthesizer(llm, manager if when == "synthesizer" else None)
    RetrieverQueryEngine(ListRetriever(nodes_of()), synthesizer).query(QUERY)
    assert reader.requests
    assert counter.total_llm_token_count == 12 * len(reader.requests)


class Looker(Reader):
    """An LLM that reads images."""

    seen: list[ChatMessage] = Field(default_factory=list)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        self.seen.extend(messages)
        blocks = [block for message in messages for block in message.blocks]
        said = "".join(
            self.read(block.text) if isinstance(block, TextBlock) else block.block_type
            for block in blocks
            if not isinstance(block, TextBlock) or "Document" in block.text
        )
        return ChatResponse(message=ChatMessage(said, role="assistant"))


@pytest.mark.parametrize("wrap", [canonical, vote])
@pytest.mark.parametrize("way", ["query", "aquery", "streaming"])
async def test_images_of_nodes_reach_an_llm_that_reads_them(wrap: Any, way: str) -> None:
    images = [
        NodeWithScore(node=Node(text_resource=MediaResource(text=text), image_resource=MediaResource(data=data)))
        for text, data in (("A map.", b"GIF89a1"), ("A plan.", b"GIF89a2"), ("", b"GIF89a3"))
    ]
    answers, requests = set(), set()
    for order in ORDERS:
        looker = Looker()
        nodes = [each for pair in zip(nodes_of(order), (images[i] for i in order), strict=True) for each in pair]
        engine = RetrieverQueryEngine(
            ListRetriever(nodes), InvariantSynthesizer(wrap(looker), streaming=way == "streaming")
        )
        response = await engine.aquery(QUERY) if way == "aquery" else engine.query(QUERY)
        answers.add(str(response.get_response() if way == "streaming" else response))
        last = looker.seen[-1]
        kinds = "".join(block.block_type[0] for block in last.blocks)
        assert kinds.count("i") == 3
        behind = [last.blocks[place - 1] for place in range(1, len(kinds)) if kinds[place - 1 : place + 1] == "ti"]
        captions = {block.text.strip().rpartition("\n")[2] for block in behind}
        assert {"Document: A map.", "Document: A plan."} <= captions
        requests.add(repr(sorted(repr(each) for each in looker.seen)))
        assert all(f"Document: {text}" in repr(last) for text in TEXTS)
        assert not MARKS.search(repr(looker.seen))
    assert len(answers) == len(requests) == 1


@pytest.mark.parametrize("wrap", [canonical, vote])
@pytest.mark.parametrize("name", [name for name in EIGHT if name.endswith("chat")])
async def test_images_of_messages_reach_the_llm(wrap: Any, name: str) -> None:
    looker, image = Looker(), ImageBlock(url="https://example.org/map.png")
    [message] = messages_of(ORDERS[0])
    response = getattr(wrap(looker), name)([ChatMessage(blocks=[*message.blocks, image])])
    response = await response if name.startswith("a") else response
    if name.startswith("astream"):
        _ = [each async for each in response]
    elif name.startswith("stream"):
        _ = list(response)
    assert looker.seen
    assert all(each.blocks[-1] == image for each in looker.seen)


def test_canonical_streams_and_a_vote_is_one_piece() -> None:
    assert len(list(canonical(Reader()).stream_complete(text_of(ORDERS[0])))) > 1
    assert len(list(vote(Reader()).stream_complete(text_of(ORDERS[0])))) == 1


class Place(BaseModel):
    """A place."""

    name: str


def calling(messages: Sequence[ChatMessage], **kwargs: Any) -> ChatMessage:
    """Call the first tool with the first document; without tools say it."""
    said = re.findall(r"Document: (.*)", "\n".join(message.content or "" for message in messages))[0]
    if not kwargs.get("tools"):
        return ChatMessage(said, role="assistant")
    name = kwargs["tools"][0].metadata.name
    block = ToolCallBlock(tool_call_id="1", tool_name=name, tool_kwargs={"name": said})
    return ChatMessage(role="assistant", blocks=[block])


@pytest.mark.parametrize("wrap", [canonical, vote])
async def test_tools_and_objects_pass_through(wrap: Any) -> None:
    def visit(name: str) -> str:
        """Go there."""
        return name

    tool = FunctionTool.from_defaults(visit)
    seen = set()
    for order in ORDERS:
        llm = wrap(MockFunctionCallingLLM(response_generator=calling, is_chat_model=True))
        assert llm.metadata.is_function_calling_model
        for response in (
            llm.chat_with_tools([tool], chat_history=messages_of(order)),
            await llm.achat_with_tools([tool], chat_history=messages_of(order), tool_required=True),
        ):
            [call] = llm.get_tool_calls_from_response(response)
            seen.add(call.tool_kwargs["name"])
        template = PromptTemplate("{context}\nWhere?")
        seen.add(llm.structured_predict(Place, template, context=text_of(order)).name)
        seen.add((await llm.astructured_predict(Place, template, context=text_of(order))).name)
        seen.add(InvariantSynthesizer(llm, output_cls=Place).get_response(QUERY, [TEXTS[i] for i in order]).name)
        seen.add(llm.as_structured_llm(Place).chat(messages_of(order)).raw.name)
    assert len(seen) == 1


@pytest.mark.parametrize("way", ["query", "aquery", "streaming", "object", "aobject", "structured"])
@pytest.mark.parametrize("wrap", [canonical, vote])
async def test_scores_and_the_query_reach_the_ordering(wrap: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    scores = {each.node.get_content(): each.score for each in nodes_of()}
    sort_keys = Score.sort_keys

    def spy(self: Score, candidates: Any, query: str) -> Any:
        seen.append((query, {each.segment.text: each.segment.score for each in candidates}))
        return sort_keys(self, candidates, query)

    monkeypatch.setattr(Score, "sort_keys", spy)
    llm: Any = wrap(MockFunctionCallingLLM(response_generator=calling, is_chat_model=True), ordering="score")
    llm = llm.as_structured_llm(Place) if way == "structured" else llm
    synthesizer = InvariantSynthesizer(
        llm, streaming=way == "streaming", output_cls=Place if way.endswith("object") else None
    )
    answers = set()
    for order in ORDERS:
        engine = RetrieverQueryEngine(ListRetriever(nodes_of(order)), synthesizer)
        answers.add(str(await engine.aquery(QUERY) if way.startswith("a") else engine.query(QUERY)))
    assert len(answers) == 1
    assert len(seen) == len(ORDERS)
    assert all(each == (QUERY, scores) for each in seen)


def test_choices_are_checked() -> None:
    for wrap in (canonical, vote):
        with pytest.raises(UnsupportedCombination, match="given"):
            wrap(Reader(), ordering="given")
        with pytest.raises(UnknownName, match="lexical"):
            wrap(Reader(), ordering="alphabetical")
        for name in ("gpt-4", None):
            with pytest.raises(UnsupportedModel, match=f"LLM of LlamaIndex, got {type(name).__name__}"):
                wrap(name)
    with pytest.raises(InvalidChoice, match="votes"):
        vote(Reader(), votes=0)


def test_it_is_described_without_losing_the_llm() -> None:
    for wrap in (canonical, vote):
        described = wrap(MockLLM(max_tokens=3)).to_dict()
        assert described["class_name"] == type(wrap(MockLLM())).class_name()
        assert described["llm"]["max_tokens"] == 3
