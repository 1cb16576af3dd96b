"""`canonical` and `vote` around LLMs of others: what these are sent, and what comes back; and audits.

How votes are counted is decided, and tested, in the core.
"""

import asyncio
import hashlib
import pickle
import re
from collections import Counter
from functools import partial

import pytest
from cases import EIGHT, QUERY, TEXTS, Reader, Recorder, asked, engine_of, index_of, nodes_of, read, report_of, same
from framework_cases import WHO, caught, flips
from invariant_rag import Segment
from invariant_rag.audit import audit
from invariant_rag.audit.systems import as_system
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.prompts import mark
from llama_index.core import PromptTemplate, Settings, get_response_synthesizer
from llama_index.core.bridge.pydantic import create_model
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage, ImageBlock, MockLLM, TextBlock
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.tools import FunctionTool

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock, canonical, vote
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

both = pytest.mark.parametrize(("wrap", "calls"), [(canonical, 1), (vote, 5)])


def first_document(asked, favourite=""):
    """Answer with the first document that is read, or with a favourite unless that stands last."""
    documents = re.findall(r"Document: (.*)", asked)
    return favourite if favourite in documents[:-1] else [*documents, "nothing"][0]


@pytest.mark.parametrize("name", EIGHT)
@both
def test_answers_ignore_the_order_of_segments(wrap, calls, name):
    reader = Reader(says=first_document)
    assert same(lambda order: read(getattr(wrap(reader), name)(asked(name, order)))[0]) in TEXTS
    assert not any(re.search("[\ueca0-\ueca3]|Block", text) for text in reader.asked), "all that they get is text"
    assert all(f"Document: {text}\n" in request for text in TEXTS for request in reader.asked)
    assert len(set(reader.asked)) == calls


def test_messages_without_segments_are_sent_as_they_are_and_sets_stay_in_their_messages():
    def requests(messages):
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


@pytest.mark.parametrize("wrap", [canonical, vote])
@pytest.mark.parametrize("place", ["model", "base_url"])
def test_a_model_of_ours_gets_text_of_a_wrapper_which_alone_reports(lm, base_url, wrap, place):
    llm = wrap(InvariantLLM(**{place: {"model": lm, "base_url": base_url}[place]}, max_tokens=4))

    def ask(asker, way, question):
        (text, response), messages = caught(lambda: read(getattr(asker, way)(question)))
        return text, {**report_of(response), "usage": None}, messages

    def ask_engine(way):
        return ask(index_of(nodes_of()).as_chat_engine("context", llm=llm), way, QUERY)

    for asks in (ask_engine, lambda way: ask(llm, way, asked("chat", (0, 2, 1)))):
        _, report, messages = same(asks, EIGHT[4:])  # whole or streamed
        assert (report["method"], report["invariant"], messages) == (wrap.__name__, True, [])


def test_a_vote_takes_what_most_orders_say_and_reports_the_order_that_won():
    loved = min(TEXTS)  # canonical order lists it last
    fond = partial(first_document, favourite=loved)
    assert canonical(Reader(says=fond)).complete(asked("complete")).text != loved
    reader = Reader(says=fond)
    response = vote(reader, votes=6).complete(asked("complete"))
    assert Counter(map(fond, reader.asked))[loved] == 4
    assert (response.text, response.additional_kwargs["vote"]) == (loved, {"calls": 6, "agreed": 4})
    assert response.additional_kwargs["total_tokens"] == 6 * 12
    assert response.raw["order"][-1] != Segment(loved).content_hash, "the ledger is that of the order that won"
    own = vote(Reader(says=first_document), votes=6, answer_of=lambda response: "the" in response.text)
    assert own.complete(asked("complete")).additional_kwargs["vote"]["agreed"] > 2
    assert len(list(canonical(reader).stream_complete(asked("complete")))) > 1
    assert len(list(vote(reader).stream_complete(asked("complete")))) == 1


@pytest.mark.parametrize("when", ["llm", "after", "settings", "settings first", "synthesizer"])
@both
def test_tokens_of_all_calls_are_counted_once_wherever_the_handler_is_set(wrap, calls, when):
    counter = TokenCountingHandler(tokenizer=str.split)
    manager = CallbackManager([counter])
    if when == "settings first":
        Settings.callback_manager = manager
    reader = Reader(says=first_document, callback_manager=manager if when == "llm" else None)
    llm = wrap(reader)
    if when == "after":
        llm.callback_manager = manager
    if when.startswith("settings"):
        Settings.llm, Settings.callback_manager, llm = llm, manager, None
    own = InvariantSynthesizer(llm, manager if when == "synthesizer" else None)
    engine_of(nodes_of(), response_synthesizer=own).query(QUERY)
    assert counter.total_llm_token_count == 12 * len(reader.asked) == 12 * calls


Place = create_model("Place", __doc__="A place.", name=(str, ...))


@pytest.mark.parametrize("wrap", [canonical, vote])
def test_tools_and_objects_pass_through(wrap, monkeypatch):
    tool = FunctionTool.from_defaults(lambda name: name, name="visit", description="Go there.")
    template, prepare, required = PromptTemplate("{context}\nWhere?"), Recorder._prepare_chat_with_tools, []

    def spy(self, *args, tool_required=False, **kwargs):
        required.append(tool_required)
        return prepare(self, *args, tool_required=tool_required, **kwargs)

    monkeypatch.setattr(Recorder, "_prepare_chat_with_tools", spy)

    async def names(order):
        llm = wrap(Recorder(says=first_document, calls=lambda asked: {"name": first_document(asked)}))
        history = asked("chat", order)
        called = [llm.chat_with_tools([tool], chat_history=history)]
        called.append(await llm.achat_with_tools([tool], chat_history=history, tool_required=True))
        assert (required[-2:], llm.metadata.is_function_calling_model) == ([False, True], True)
        return {
            *(call.tool_kwargs["name"] for each in called for call in llm.get_tool_calls_from_response(each)),
            llm.structured_predict(Place, template, context=asked("complete", order)).name,
            (await llm.astructured_predict(Place, template, context=asked("complete", order))).name,
            InvariantSynthesizer(llm, output_cls=Place).get_response(QUERY, [TEXTS[i] for i in order]).name,
            llm.as_structured_llm(Place).chat(history).raw.name,
        }

    assert len(same(lambda order: asyncio.run(names(order)))) == 1


@pytest.mark.parametrize(("wrap", "votes"), [(canonical, None), (vote, 5)])
def test_a_wrapper_is_described_and_pickled_with_the_llm_in_it(wrap, votes):
    llm = wrap(MockLLM(max_tokens=3))
    said = llm.to_dict()
    assert (said["class_name"], said["votes"], said["llm"]["max_tokens"]) == ("CanonicalLLM", votes, 3)
    assert pickle.loads(pickle.dumps(llm)).complete(QUERY).text == llm.complete(QUERY).text
    llm.callback_manager = manager = CallbackManager([TokenCountingHandler(tokenizer=lambda text: [text])])
    assert pickle.loads(pickle.dumps(llm)).to_dict() == said
    assert llm.callback_manager is manager, "LlamaIndex takes what cannot be pickled from the object itself, too"


class Echo(CustomQueryEngine):
    def custom_query(self, query_str: str):
        return query_str


def test_llms_and_engines_are_audited_and_ours_with_their_own_parameters_and_without_a_flip(lm):
    options = {"temperature": 0.9, "seed": 1, "stop": ["x"], "system_prompt": "Be brief."}
    system, plain = (as_system(InvariantLLM(lm, max_tokens=3, **each)) for each in (options, {}))
    generation = {"max_new_tokens": 3, "do_sample": True, "temperature": 0.9, "seed": 1, "stop_strings": ["x"]}
    assert (system.generation, system.message, system.name == plain.name) == (generation, "Be brief.", False)
    synthesizer, chat = get_response_synthesizer(MockLLM()), SimpleChatEngine.from_defaults(llm=MockLLM())
    engine = engine_of(nodes_of(), response_synthesizer=synthesizer)
    for each in (MockLLM(), Echo(), synthesizer, engine, chat):
        said = [as_system(each).ask(WHO, WHO.segments).text for _ in range(2)]
        assert ("It was Ann." in said[0], said[0] == said[1]) == (True, True), "it forgets earlier questions"
    found = audit(engine, [{"question": "q", "answer": "barley"}], remedies=())
    assert found.asked[0].question.segments[1].text == nodes_of()[1].text
    with pytest.raises(UnsupportedCombination, match="to_input"):
        as_system(engine, to_input=lambda question, segments: question)
    api = Reader(says=lambda asked: hashlib.sha256(asked.encode()).hexdigest()[:12])
    ours = [canonical(api), vote(api), InvariantLLM(lm, max_tokens=6)]
    others = [api, InvariantLLM(lm.with_method("sequential", ordering="given"), max_tokens=6)]
    assert [flips(llm) for llm in ours] == [0.0] * 3
    assert all(map(flips, others))
