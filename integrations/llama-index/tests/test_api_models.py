"""`canonical` and `vote` around LLMs of others: what these are sent, and what comes back; and audits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from cases import EIGHT, ORDERS, QUERY, TEXTS, HashingLLM, Recorder, consumed, engine_of, message_of, nodes_of
from invariant_rag import InvariantModel, Segment
from invariant_rag.audit import Question, audit
from invariant_rag.audit.systems import as_system
from invariant_rag.errors import InvalidChoice, UnsupportedCombination, UnsupportedModel
from invariant_rag.prompts import mark
from llama_index.core import Settings, get_response_synthesizer
from llama_index.core.base.llms.types import ImageBlock, TextBlock
from llama_index.core.bridge.pydantic import BaseModel, Field
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage
from llama_index.core.llms.mock import MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.tools import FunctionTool

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock, canonical, vote
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer


class Reader(HashingLLM):
    """It takes texts, and answers with the first document, or with its favourite unless that stands last."""

    requests: list[str] = Field(default_factory=list)
    favourite: str = ""

    def first(self, text: str) -> str:
        documents = re.findall(r"Document: (.*)", text)
        return self.favourite if self.favourite in documents[:-1] else [*documents, "nothing"][0]

    def read(self, text: str) -> str:
        self.requests.append(text)
        return self.first(text)


def messages_of(order: Any) -> list[ChatMessage]:
    return [message_of(TEXTS[i] for i in order)]


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
    assert not any(re.search("[\ueca0-\ueca3]|Block", text) for text in reader.requests), "all that they get is text"
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
    assert Counter(map(reader.first, reader.requests))[loved] == 4
    assert (response.text, response.additional_kwargs["vote"]) == (loved, {"calls": 6, "agreed": 4})
    assert response.additional_kwargs["total_tokens"] == 6 * 12
    assert response.raw["order"][-1] != Segment(loved).content_hash, "the ledger is that of the order that won"
    tied = vote(Reader(), votes=20).complete(text_of(ORDERS[3]))  # no order is asked about twice
    assert (tied.text, tied.additional_kwargs["vote"]) == (max(TEXTS), {"calls": 6, "agreed": 2})
    own = vote(Reader(), votes=6, answer_of=lambda response: "the" in response.text)
    assert own.complete(text_of(ORDERS[0])).additional_kwargs["vote"]["agreed"] > 2
    assert len(list(canonical(Reader()).stream_complete(text_of(ORDERS[0])))) > 1
    assert len(list(vote(Reader()).stream_complete(text_of(ORDERS[0])))) == 1


@pytest.mark.parametrize("when", ["llm", "after", "settings", "settings first", "synthesizer"])
@pytest.mark.parametrize(("wrap", "calls"), [(canonical, 1), (vote, 5)])
def test_tokens_of_all_calls_are_counted_once_wherever_the_handler_is_set(wrap: Any, calls: int, when: str) -> None:
    counter = TokenCountingHandler(tokenizer=str.split)
    manager = CallbackManager([counter])
    if when == "settings first":
        Settings.callback_manager = manager
    llm = wrap(reader := Reader(callback_manager=manager) if when == "llm" else Reader())
    if when == "after":
        llm.callback_manager = manager
    if when.startswith("settings"):
        Settings.llm, Settings.callback_manager, llm = llm, manager, None
    own = InvariantSynthesizer(llm, manager if when == "synthesizer" else None)
    engine_of(nodes_of(), response_synthesizer=own).query(QUERY)
    assert counter.total_llm_token_count == 12 * len(reader.requests) == 12 * calls


class Place(BaseModel):
    """A place."""

    name: str


class Caller(Recorder):
    """It calls the first tool with the first document; without tools it says it. Whether it has to is remembered."""

    required: list[bool] = Field(default_factory=list)

    def _answer(self, messages: Sequence[ChatMessage], tools: Any = (), **kwargs: Any) -> ChatMessage:
        self.says = re.findall(r"Document: (.*)", "\n".join(message.content or "" for message in messages))[0]
        self.calls = {"name": self.says}
        return super()._answer(messages, tools)

    def _prepare_chat_with_tools(self, tools: Any, *args: Any, tool_required: bool = False, **kwargs: Any) -> Any:
        self.required.append(tool_required)
        return super()._prepare_chat_with_tools(tools, *args, tool_required=tool_required, **kwargs)


@pytest.mark.parametrize("wrap", [canonical, vote])
async def test_tools_and_objects_pass_through(wrap: Any) -> None:
    tool, seen = FunctionTool.from_defaults(lambda name: name, name="visit", description="Go there."), set[str]()
    template = PromptTemplate("{context}\nWhere?")
    for order in ORDERS:
        caller, asked = Caller(), messages_of(order)
        llm = wrap(caller)
        called = [llm.chat_with_tools([tool], chat_history=asked)]
        called.append(await llm.achat_with_tools([tool], chat_history=asked, tool_required=True))
        seen |= {call.tool_kwargs["name"] for each in called for call in llm.get_tool_calls_from_response(each)}
        assert (caller.required, llm.metadata.is_function_calling_model) == ([False, True], True)
        seen.add(llm.structured_predict(Place, template, context=text_of(order)).name)
        seen.add((await llm.astructured_predict(Place, template, context=text_of(order))).name)
        seen.add(InvariantSynthesizer(llm, output_cls=Place).get_response(QUERY, [TEXTS[i] for i in order]).name)
        seen.add(llm.as_structured_llm(Place).chat(asked).raw.name)
    assert len(seen) == 1
    with pytest.raises(UnsupportedCombination, match="calls tools, got Reader"):
        wrap(Reader()).chat_with_tools([tool], QUERY)


@pytest.mark.parametrize("wrap", [canonical, vote])
def test_choices_are_checked_and_described(wrap: Any) -> None:
    with pytest.raises(UnsupportedCombination, match="given"):
        wrap(Reader(), ordering="given")
    for none in ("gpt-4", None):
        with pytest.raises(UnsupportedModel, match=f"LLM of LlamaIndex, got {type(none).__name__}"):
            wrap(none)
    with pytest.raises(InvalidChoice, match="votes"):
        vote(Reader(), votes=0)
    described = wrap(MockLLM(max_tokens=3)).to_dict()
    assert (described["class_name"], described["votes"]) == ("CanonicalLLM", None if wrap is canonical else 5)
    assert described["llm"]["max_tokens"] == 3


# --- audits ---


def test_our_llm_is_audited_with_its_own_parameters(model: InvariantModel) -> None:
    options = {"temperature": 0.9, "seed": 1, "stop": ["x"], "system_prompt": "Be brief."}
    system = as_system(InvariantLLM(model, max_tokens=3, **options))
    generation = {"max_new_tokens": 3, "do_sample": True, "temperature": 0.9, "seed": 1, "stop_strings": ["x"]}
    assert (system.generation, system.message) == (generation, "Be brief.")
    assert system.name != as_system(InvariantLLM(model, max_tokens=3)).name


class Echo(CustomQueryEngine):
    def custom_query(self, query_str: str) -> str:
        return query_str


def test_engines_of_llamaindex_are_recognized() -> None:
    asked = Question("Who?", (Segment("It was Ann.", "Page"), Segment("Nobody.")), ("Ann",))
    synthesizer, chat = get_response_synthesizer(MockLLM()), SimpleChatEngine.from_defaults(llm=MockLLM())
    engine = engine_of(nodes_of(), response_synthesizer=synthesizer)
    for system in (MockLLM(), Echo(), synthesizer, engine, chat):
        assert "It was Ann." in as_system(system).ask(asked, asked.segments).text
    assert len({as_system(chat).ask(asked, asked.segments).text for _ in range(2)}) == 1, "it forgets earlier questions"
    found = audit(engine, [{"question": "q", "answer": "barley"}], remedies=())
    assert found.asked[0].question.segments[1].text == nodes_of()[1].text
    with pytest.raises(UnsupportedCombination, match="to_input"):
        as_system(engine, to_input=lambda question, segments: question)


def test_our_llms_do_not_flip_and_others_do(model: InvariantModel) -> None:
    named = [[f"{name} {number}" for name in ("one", "two", "three")] for number in range(3)]
    questions = [{"question": f"Which is number {number}?", "segments": each} for number, each in enumerate(named)]
    plain = InvariantLLM(model.with_method("sequential", ordering="given"), max_tokens=6)
    ours = [canonical(HashingLLM()), vote(HashingLLM()), InvariantLLM(model, max_tokens=6)]
    flips = [len(audit(llm, questions, remedies=[]).flips) for llm in (HashingLLM(), *ours, plain)]
    assert flips[:4] == [3, 0, 0, 0]
    assert flips[4] > 0
