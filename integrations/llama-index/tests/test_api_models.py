"""`canonical` and `vote` around LLMs of others: what these are sent, and what comes back; and audits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import Any

import pytest
from cases import EIGHT, ORDERS, QUERY, TEXTS, HashingLLM, ListRetriever, Recorder, consumed, engine_of, nodes_of
from invariant_rag import InvariantModel, Segment
from invariant_rag.audit import Question, audit
from invariant_rag.audit.systems import as_system
from invariant_rag.errors import InvalidChoice, UnknownName, UnsupportedCombination, UnsupportedModel
from invariant_rag.orderings import Score
from invariant_rag.prompts import mark
from llama_index.core import Settings, get_response_synthesizer
from llama_index.core.base.llms.types import ImageBlock, TextBlock
from llama_index.core.bridge.pydantic import BaseModel, Field
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage, ChatResponse, CompletionResponse, CustomLLM, LLMMetadata
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.mock import MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine
from llama_index.core.tools import FunctionTool

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock, canonical, vote
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

USAGE = {"prompt_tokens": 10, "completion_tokens": 2}


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
        return self.favourite if self.favourite in documents[:-1] else [*documents, "nothing"][0]

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        with self.lock:
            self.requests.append(prompt)
        return CompletionResponse(text=self.read(prompt), raw={"usage": USAGE})

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        words = re.findall(r"\S+\s*", self.complete(prompt).text)
        return (CompletionResponse(text="".join(words[: i + 1]), delta=words[i]) for i in range(len(words)))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        if any(not isinstance(block, TextBlock) for message in messages for block in message.blocks):
            raise TypeError("expected text")
        prompt = "\n".join(f"{message.role.value}: {message.content}" for message in messages)
        with self.lock:
            self.requests.append(prompt)
        return ChatResponse(message=ChatMessage(self.read(prompt), role="assistant"), raw={"usage": USAGE})

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
        words = re.findall(r"\S+\s*", self.chat(messages).message.content)
        return (ChatResponse(message=ChatMessage("".join(words[: i + 1])), delta=w) for i, w in enumerate(words))


def messages_of(order: Any) -> list[ChatMessage]:
    return [ChatMessage(blocks=[*(SegmentBlock.of(TEXTS[i]) for i in order), TextBlock(text=QUERY)])]


def text_of(order: Any) -> str:
    return "".join(mark(TEXTS[i]) for i in order) + QUERY


@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("wrap", [canonical, vote])
async def test_answers_ignore_the_order_of_segments(wrap: Any, name: str) -> None:
    reader = Reader()
    make = text_of if name.endswith("complete") else messages_of
    answers = {(await consumed(getattr(wrap(reader), name)(make(order))))[0] for order in ORDERS}
    assert len(answers) == 1
    assert answers <= set(TEXTS)
    assert not any(re.search("[\ueca0-\ueca3]", text) for text in reader.requests), "no mark leaves the process"
    assert all(f"Document: {text}\n" in request for text in TEXTS for request in reader.requests)
    assert len(set(reader.requests)) == (5 if wrap is vote else 1)


def test_messages_without_segments_are_sent_as_they_are_and_sets_stay_in_their_messages() -> None:
    def requests(messages: list[ChatMessage]) -> list[list[ChatMessage]]:
        return list(canonical(MockLLM())._messages(messages, {}).inputs)

    image = ImageBlock(url="https://example.org/map.png")
    messages = [ChatMessage("Be brief.", role="system"), ChatMessage(blocks=[TextBlock(text="a"), image])]
    messages += [ChatMessage(f"As {mark('x')} says.", role="assistant"), ChatMessage("And?")]
    assert requests(messages) == [messages], "what a model said, too"
    [[last]] = requests([ChatMessage(blocks=[SegmentBlock.of("b"), image])])
    assert last.blocks == [TextBlock(text="Document: b\n"), image]
    one, two, three = (SegmentBlock.of(text) for text in sorted(TEXTS))
    apart = [ChatMessage(blocks=[one]), ChatMessage("Well.", role="assistant"), ChatMessage(blocks=[two, three])]
    [[first, *_]] = requests(apart)
    assert first.content == f"Document: {min(TEXTS)}\n"


def test_a_vote_takes_what_most_orders_say_and_of_a_tie_the_canonical_answer() -> None:
    loved = min(TEXTS)  # canonical order lists it last
    reader = Reader(favourite=loved)
    assert canonical(reader).complete(text_of(ORDERS[0])).text != loved
    reader.requests.clear()
    response = vote(reader, votes=6).complete(text_of(ORDERS[0]))
    assert Counter(map(reader.read, reader.requests))[loved] == 4
    assert (response.text, response.additional_kwargs["vote"]) == (loved, {"calls": 6, "agreed": 4})
    assert response.raw["order"][-1] != Segment(loved).content_hash, "the ledger is that of the order that won"
    first = canonical(Reader()).complete(text_of(ORDERS[0])).text
    tied = vote(Reader(), votes=20).complete(text_of(ORDERS[3]))  # no order is asked about twice
    assert tied.text == first == vote(Reader(), votes=1).complete(text_of(ORDERS[2])).text
    assert tied.additional_kwargs["vote"] == {"calls": 6, "agreed": 2}
    own = vote(Reader(), votes=6, answer_of=lambda response: "the" in response.text)
    assert own.complete(text_of(ORDERS[0])).additional_kwargs["vote"]["agreed"] > 2
    assert len(list(canonical(Reader()).stream_complete(text_of(ORDERS[0])))) > 1
    assert len(list(vote(Reader()).stream_complete(text_of(ORDERS[0])))) == 1


@pytest.mark.parametrize("when", ["llm", "after", "settings", "settings first", "synthesizer"])
async def test_tokens_of_all_calls_are_counted_once_wherever_the_handler_is_set(when: str) -> None:
    for wrap, calls in ((canonical, 1), (vote, 5)):
        Settings._callback_manager = None
        counter = TokenCountingHandler(tokenizer=str.split)
        manager = CallbackManager([counter])
        if when == "settings first":
            Settings.callback_manager = manager
        reader = Reader(callback_manager=manager) if when == "llm" else Reader()
        llm = wrap(reader)
        if when == "after":
            llm.callback_manager = manager
        if when.startswith("settings"):
            Settings.llm, Settings.callback_manager = llm, manager
        synthesizer = InvariantSynthesizer(
            None if when.startswith("settings") else llm, manager if when == "synthesizer" else None
        )
        RetrieverQueryEngine(ListRetriever(nodes_of()), synthesizer).query(QUERY)
        assert counter.total_llm_token_count == 12 * len(reader.requests) == 12 * calls
    assert (await llm.achat(messages_of(ORDERS[0]))).additional_kwargs["total_tokens"] == 5 * 12


class Place(BaseModel):
    """A place."""

    name: str


class Caller(Recorder):
    """It calls the first tool with the first document; without tools it says it. Whether it has to is remembered."""

    required: list[bool] = Field(default_factory=list)

    def _answer(self, messages: Sequence[ChatMessage], tools: Any = (), **kwargs: Any) -> ChatMessage:
        said = re.findall(r"Document: (.*)", "\n".join(message.content or "" for message in messages))[0]
        self.says, self.calls = said, {"name": said}
        return super()._answer(messages, tools)

    def _prepare_chat_with_tools(self, tools: Any, *args: Any, tool_required: bool = False, **kwargs: Any) -> Any:
        self.required.append(tool_required)
        return super()._prepare_chat_with_tools(tools, *args, tool_required=tool_required, **kwargs)


@pytest.mark.parametrize("wrap", [canonical, vote])
async def test_tools_and_objects_pass_through(wrap: Any) -> None:
    def visit(name: str) -> str:
        """Go there."""
        return name

    tool, seen = FunctionTool.from_defaults(visit), set[str]()
    template = PromptTemplate("{context}\nWhere?")
    for order in ORDERS:
        caller = Caller()
        llm = wrap(caller)
        assert llm.metadata.is_function_calling_model
        for response in (
            llm.chat_with_tools([tool], chat_history=messages_of(order)),
            await llm.achat_with_tools([tool], chat_history=messages_of(order), tool_required=True),
        ):
            [call] = llm.get_tool_calls_from_response(response)
            seen.add(call.tool_kwargs["name"])
        assert caller.required == [False, True]
        seen.add(llm.structured_predict(Place, template, context=text_of(order)).name)
        seen.add((await llm.astructured_predict(Place, template, context=text_of(order))).name)
        seen.add(InvariantSynthesizer(llm, output_cls=Place).get_response(QUERY, [TEXTS[i] for i in order]).name)
        seen.add(llm.as_structured_llm(Place).chat(messages_of(order)).raw.name)
    assert len(seen) == 1
    with pytest.raises(UnsupportedCombination, match="calls tools, got Reader"):
        wrap(Reader()).chat_with_tools([tool], QUERY)


@pytest.mark.parametrize("way", ["query", "aquery", "streaming", "object", "aobject", "structured"])
async def test_scores_and_the_query_reach_the_ordering(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, sort_keys = [], Score.sort_keys
    scores = {each.node.get_content(): each.score for each in nodes_of()}

    def spy(self: Score, candidates: Any, query: str) -> Any:
        seen.append((query, {each.segment.text: each.segment.score for each in candidates}))
        return sort_keys(self, candidates, query)

    monkeypatch.setattr(Score, "sort_keys", spy)
    for wrap in (canonical, vote):
        llm: Any = wrap(Caller(), ordering="score")
        llm = llm.as_structured_llm(Place) if way == "structured" else llm
        options: dict[str, Any] = {"output_cls": Place} if way.endswith("object") else {}
        synthesizer, answers = InvariantSynthesizer(llm, streaming=way == "streaming", **options), set()
        for order in ORDERS:
            engine = engine_of(nodes_of(order), response_synthesizer=synthesizer)
            answers.add(str(await engine.aquery(QUERY) if way.startswith("a") else engine.query(QUERY)))
        assert len(answers) == 1
    assert seen == [(QUERY, scores)] * 2 * len(ORDERS)


@pytest.mark.parametrize("wrap", [canonical, vote])
def test_choices_are_checked_and_described(wrap: Any) -> None:
    for llm, options, error, said in (
        (Reader(), {"ordering": "given"}, UnsupportedCombination, "given"),
        (Reader(), {"ordering": "alphabetical"}, UnknownName, "lexical"),
        ("gpt-4", {}, UnsupportedModel, "LLM of LlamaIndex, got str"),
        (None, {}, UnsupportedModel, "LLM of LlamaIndex, got NoneType"),
    ):
        with pytest.raises(error, match=said):
            wrap(llm, **options)
    with pytest.raises(InvalidChoice, match="votes"):
        vote(Reader(), votes=0)
    described = wrap(MockLLM(max_tokens=3)).to_dict()
    assert (described["class_name"], described["votes"]) == ("CanonicalLLM", None if wrap is canonical else 5)
    assert described["llm"]["max_tokens"] == 3


QUESTIONS = [
    {"question": f"Which is number {number}?", "segments": [f"{name} {number}" for name in ("one", "two", "three")]}
    for number in range(3)
]


def test_our_llm_is_audited_with_its_own_parameters(model: InvariantModel) -> None:
    options = {"temperature": 0.9, "seed": 1, "stop": ["x"], "system_prompt": "Be brief."}
    system = as_system(InvariantLLM(model, max_tokens=3, **options))
    sampling = {"do_sample": True, "temperature": 0.9, "seed": 1}
    assert system.generation == {"max_new_tokens": 3, **sampling, "stop_strings": ["x"]}
    assert system.message == "Be brief."
    assert system.name != as_system(InvariantLLM(model, max_tokens=3)).name


class Echo(CustomQueryEngine):
    def custom_query(self, query_str: str) -> str:
        return query_str


def test_engines_of_llamaindex_are_recognized() -> None:
    asked = Question("Who?", (Segment("It was Ann.", "Page"), Segment("Nobody.")), ("Ann",))
    synthesizer = get_response_synthesizer(MockLLM())
    engine = RetrieverQueryEngine(ListRetriever(nodes_of()), synthesizer)
    chat = SimpleChatEngine.from_defaults(llm=MockLLM())
    for system in (MockLLM(), Echo(), synthesizer, engine, chat):
        assert "It was Ann." in as_system(system).ask(asked, asked.segments).text
    assert len({as_system(chat).ask(asked, asked.segments).text for _ in range(2)}) == 1, "it forgets earlier questions"
    found = audit(engine, [{"question": "q", "answer": "barley"}], remedies=())
    assert found.asked[0].question.segments[1].text == nodes_of()[1].text
    with pytest.raises(UnsupportedCombination, match="to_input"):
        as_system(engine, to_input=lambda question, segments: question)


def test_our_llms_do_not_flip_and_others_do(model: InvariantModel) -> None:
    plain = InvariantLLM(model.with_method("sequential", ordering="given"), max_tokens=6)
    others = [(HashingLLM(), 3), (canonical(HashingLLM()), 0), (vote(HashingLLM()), 0)]
    for llm, flipped in [*others, (InvariantLLM(model, max_tokens=6), 0), (plain, None)]:
        flips = len(audit(llm, QUESTIONS, remedies=[]).flips)
        assert flips > 0 if flipped is None else flips == flipped
