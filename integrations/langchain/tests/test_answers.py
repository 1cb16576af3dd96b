"""What an answer is and says: the same however a model is asked, about whatever order, among what other calls."""

import asyncio
import re
import sys
import time
from collections import ChainMap
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from functools import partial
from itertools import permutations
from typing import Annotated, Literal

import pytest
from framework_cases import Writing, call_text, ended, spoken_model, tiny_weights
from invariant_rag import InvariantModel
from invariant_rag.errors import ContextOverflow, IncompleteObject, InvalidObject, UnsupportedCombination
from invariant_rag.generation.json_schema import validate_value
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.prompts import mark_set, parse_marked
from invariant_rag.testing import toy_tokenizer
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage, convert_to_messages
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import AfterValidator, create_model
from transformers import MaxTimeCriteria
from typing_extensions import TypedDict

from langchain_invariant_rag import ChatInvariant, InvariantLLM, Segments, canonical, vote
from langchain_invariant_rag.documents import chat_messages, to_segment, to_turn

from . import shared
from .shared import DOCUMENTS, ORDERS, QUESTION, TEXTS, WAYS, Departure, forwards, now, said, search, text

both = pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])


def test_an_answer_says_what_was_read_and_written_and_completions_do_too_each_by_itself_and_together(lm):
    answer = ChatInvariant(model=lm, max_tokens=8).invoke(QUESTION, documents=DOCUMENTS)
    messages = [{"role": "user", "content": [*map(to_segment, DOCUMENTS), QUESTION]}]
    generation = lm.generate(lm.chat_prompt(messages=messages), max_new_tokens=8)
    read, both = generation.usage.prompt_tokens, generation.usage.total_tokens
    counted = {"input_tokens": read, "output_tokens": 8, "total_tokens": both}
    assert answer.usage_metadata == {**counted, "input_token_details": {"cache_read": 0}}
    told = answer.response_metadata
    assert told["order"] == [to_segment(DOCUMENTS[index]).content_hash for index in generation.order]
    assert (told["finish_reason"], told["model_name"], told["model_provider"]) == ("length", lm.name, "invariant-rag")
    result = InvariantLLM(model=lm, max_tokens=8).generate([QUESTION, "Who?"], documents=DOCUMENTS)
    told = [each.generation_info for (each,) in result.generations]
    assert [(len(each["order"]), each["usage_metadata"]["output_tokens"]) for each in told] == [(3, 8), (3, 8)]
    read = sum(each["usage_metadata"]["input_tokens"] for each in told)
    usage = {"prompt_tokens": read, "completion_tokens": 16, "total_tokens": read + 16}
    assert result.llm_output == {"token_usage": usage, "model_name": lm.name}


@both
@pytest.mark.parametrize("micro_batching", [False, True])
def test_what_does_not_fit_is_an_overflow_for_langchain_too_or_named(lm, kind, micro_batching):
    model, long = kind(model=lm, max_tokens=4, micro_batching=micro_batching), "long " * 2000
    for ask in WAYS.values():
        with pytest.raises(ContextOverflowError) as error:
            ask(model, long)
        assert isinstance(error.value, ContextOverflow)
        assert "drop_last" in error.value.hint
    spare = RunnableLambda(lambda _: "spare")
    assert model.with_fallbacks([spare], exceptions_to_handle=(ContextOverflowError,)).invoke(long) == "spare"
    chat = ChatInvariant(model=lm, max_tokens=4, overflow="drop_last", micro_batching=micro_batching)
    told = chat.invoke(QUESTION, documents=[f"{number} " * 400 for number in range(6)]).response_metadata
    assert (len(told["order"]) + len(told["dropped"]), bool(told["dropped"])) == (6, True)
    with pytest.raises(ContextOverflowError):
        chat.get_num_tokens_from_messages([HumanMessage(long)])


def test_a_call_may_ask_for_another_model_for_several_answers_and_for_no_usage(lm):
    chat = ChatInvariant(model=lm, max_tokens=4)
    assert chat.invoke(QUESTION, model=lm.with_method("pine")).response_metadata["method"] == "pine"
    (answers,) = chat.generate([[HumanMessage(QUESTION)]], n=3, temperature=2.0, seed=1).generations
    assert len({each.text for each in answers}) == 3
    silent = chat.model_copy(update={"stream_usage": False})
    assert {chunk.usage_metadata is None for chunk in silent.stream(QUESTION)} == {True}
    for chunks in (silent.stream(QUESTION, stream_usage=True), chat.stream(QUESTION)):
        assert [*chunks][-1].usage_metadata


def test_one_call_with_three_documents_takes_few_calls_and_reads_no_weights_without_a_cache(lm):
    """Python calls of this package and the core, and of all packages. Never raised."""
    chat = ChatInvariant(model=lm, max_tokens=2)
    chat.invoke(QUESTION, documents=DOCUMENTS)
    # What transformers 5.24 and later wrap around every layer and output to rename an argument is nobody's call.
    renames = ("wrap_func", "wrapped_func", "_replace_old_cache_name", "_rename_kwargs_for_bc", "is_tracing")
    called = []

    def record(frame, event, argument):
        if event == "call" and not (frame.f_code.co_name in renames and "transformers" in frame.f_code.co_filename):
            called.append(frame.f_code)

    sys.setprofile(record)
    try:
        Context().run(chat.invoke, QUESTION, documents=DOCUMENTS)  # in which no other test has retrieved anything
    finally:
        sys.setprofile(None)
    ours = [code.co_qualname for code in called if "invariant_rag" in code.co_filename]
    assert len(ours) <= 350, ours
    assert len(called) <= 3900
    assert "model_digest" not in ours


@pytest.mark.parametrize("kept", ["by the model", "by a chat model", "with a method", "with routing"])
def test_documents_that_were_read_before_are_not_read_again_in_any_order(lm, kept):
    own = {} if kept == "by the model" else {"key_value_cache": KeyValueCache()}
    model = lm if own else lm.with_cache(KeyValueCache())
    routed = model.with_routing(-2.0, plain_order="canonical") if kept == "with routing" else model
    method = {"method": "pine"} if kept == "with a method" else {}
    chat = ChatInvariant(model=routed, max_tokens=6, **own, **method)
    found = [ask(chat, QUESTION, documents=order) for ask, order in zip(WAYS.values(), ORDERS, strict=True)]
    ((_, read),) = {(each.content, each.usage_metadata["input_tokens"]) for each in found}
    first, *others = (each.usage_metadata["input_token_details"]["cache_read"] for each in found)
    assert (first, len({*others})) == (0, 1)
    assert len(QUESTION) < read - others[0] < 2 * len(QUESTION), "all but the text behind the documents is kept"
    assert "key_value_cache" not in chat.model_dump()


def test_reasoning_stands_apart_from_the_answer(spoken):
    chat, variables = ChatInvariant(model=spoken, max_tokens=110), {"template_kwargs": {"enable_thinking": True}}
    asked = ended(spoken, "It is early.\n</think>\n\nAt noon.")
    for bound in (chat.model_copy(update=variables).bind(**asked), chat.bind(**asked, **variables)):
        answer = bound.invoke(QUESTION)
        assert (answer.content, answer.additional_kwargs) == ("At noon.", {"reasoning_content": "It is early."})
        assert [block["type"] for block in answer.content_blocks] == ["reasoning", "text"]
        assert sum("reasoning_content" in chunk.additional_kwargs for chunk in bound.stream(QUESTION)) > 3


def test_log_probabilities_come_in_the_shape_of_openai(lm):
    def listed(answer):
        return answer.response_metadata["logprobs"]["content"]

    chat = ChatInvariant(model=lm, logprobs=True, max_tokens=12)
    tokens = listed(chat.invoke(QUESTION))
    prompt = lm.chat_prompt(messages=[{"role": "user", "content": QUESTION}])
    assert [each["logprob"] for each in tokens] == list(lm.generate(prompt, max_new_tokens=12).logprobs)
    assert all(bytes(each["bytes"]).decode() == each["token"] and each["top_logprobs"] == [] for each in tokens)
    for stop in (None, tokens[5]["token"] + tokens[6]["token"]):
        answer = chat.invoke(QUESTION, stop=stop)
        assert "".join(each["token"] for each in listed(answer)) == answer.content
    for silent in (ChatInvariant(model=lm, max_tokens=2), chat.bind(logprobs=False, max_tokens=2)):
        assert "logprobs" not in silent.invoke(QUESTION).response_metadata
    top = ChatInvariant(model=lm, top_logprobs=3, max_tokens=5)
    for each in listed(top.invoke(QUESTION)):  # greedy: the first is the chosen one
        best = [one["logprob"] for one in each["top_logprobs"]]
        assert (len(best), best[0], best) == (3, each["logprob"], sorted(best, reverse=True))
    with pytest.raises(UnsupportedCombination, match="one beam"):
        top.invoke(QUESTION, num_beams=2)


def test_sentences_are_cited_with_their_documents_and_the_answer_stays_as_it_is_written(lm):
    url, text = "https://ostra.example/ferry", "It leaves at noon. Or so they say. Who knows. See [2]."
    documents = [
        Document("It leaves at noon.", id="f-17", metadata={"source": url, "page": 3}),
        Document("Or so they say.", metadata={"source": "town.txt"}),
        Document("Who knows.", metadata={"title": "Doubts"}),
    ]
    cites = ChatInvariant(model=lm, max_tokens=80, citations=True)

    def asked(model, ask="invoke", **options):
        return getattr(model, ask)(QUESTION, documents=documents, **ended(lm, text), **options)

    answer = asked(cites)
    assert StrOutputParser().invoke(answer) == answer.text == asked(cites, citations=False).content == text
    assert asked(cites.model_copy(update={"citations": False}).bind(citations=True)).content == answer.content
    first, second, third = answer.content_blocks[0]["annotations"]
    extras = {"id": to_segment(documents[0]).content_hash, "metadata": documents[0].metadata, "document_id": "f-17"}
    place = {"start_index": 0, "end_index": 18, "cited_text": "It leaves at noon.", "url": url, "title": url}
    assert first == {"type": "citation", **place, "extras": extras}
    assert ("url" in second, second["title"], "document_id" in second["extras"]) == (False, "town.txt", False)
    assert ("url" in third, third["title"]) == (False, "Doubts")
    chunks = list(asked(cites, "stream"))
    assert [chunk for chunk in chunks if any("annotations" in each for each in chunk.content)] == [chunks[-1]]
    again = [[HumanMessage("a"), each, HumanMessage("b")] for each in (answer, AIMessage(answer.text))]
    assert len({cites.invoke(each, max_tokens=8).text for each in again}) == 1
    called = cites.bind_tools([search], tool_choice="any", max_tokens=160).invoke(QUESTION)
    assert (called.content, [block["type"] for block in called.content_blocks]) == ([], ["tool_call"])


# --- objects --------------------------------------------------------------------------------------------------------


class Pair(TypedDict):
    """A pair."""

    one: Literal["pier", "mill", "ferry", "lamp", "barge", "salt", "rope", "tide"]
    two: Literal[1, 2, 3, 4, 5, 6, 7, 8]


def never(value):
    raise ValueError("no number will do")


Small = create_model("Small", number=(Annotated[int, AfterValidator(never)], ...))


@pytest.mark.parametrize(("schema", "most"), [(Pair, 3), (Departure, 3), (Small, 20)])
def test_what_is_cut_off_or_rejected_by_a_validator_is_an_error_and_no_dict_with_missing_keys(lm, schema, most):
    writer, error, told, reason = ChatInvariant(model=lm, max_tokens=200), InvalidObject, "no number will do", "stop"
    if schema is not Small:
        error, told, reason = IncompleteObject, "expected a complete JSON text", "length"
        model = writer.with_structured_output(schema, stopping_criteria=[MaxTimeCriteria(0.0)])
        for ask in WAYS.values():
            with pytest.raises(error, match=told):
                ask(model, QUESTION)
    with pytest.raises(error, match=told):
        writer.with_structured_output(schema, max_tokens=most).invoke(QUESTION)
    found = writer.with_structured_output(schema, include_raw=True, max_tokens=most).invoke(QUESTION)
    assert found["raw"].response_metadata["finish_reason"] == reason
    assert (found["parsed"], type(found["parsing_error"])) == (None, error)


def test_documents_of_a_call_are_read_in_every_way_with_and_without_the_raw_message(lm):
    writer = ChatInvariant(model=lm, max_tokens=200)
    plain, raw = (writer.with_structured_output(Pair, include_raw=raw) for raw in (False, True))
    read = raw.invoke(QUESTION, documents=DOCUMENTS)["raw"].response_metadata
    assert (read["sets"], read["finish_reason"]) == ([3], "stop")
    expected = plain.invoke(QUESTION, documents=DOCUMENTS)
    assert expected != plain.invoke(QUESTION), "the documents make a difference"
    for way in ("invoke", "ainvoke", "batch", "abatch"):
        assert WAYS[way](plain, QUESTION, documents=DOCUMENTS) == expected, way
        assert WAYS[way](raw, QUESTION, documents=DOCUMENTS)["parsed"] == expected, way
    assert [*plain.stream(QUESTION, documents=DOCUMENTS)][-1] == expected
    merged = ChainMap(*reversed([*raw.stream(QUESTION, documents=DOCUMENTS)]))
    assert (merged["parsed"], merged["parsing_error"]) == (expected, None)


# --- tools ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat(spoken):
    return ChatInvariant(model=spoken, max_tokens=160, sort_segments=False)


def add(one: int, two: int) -> int:
    """Add."""
    return one + two


DESCRIBED = {"type": "function", "function": {"name": "described", "parameters": Departure.model_json_schema()}}
KINDS = {"search": search, "add": add, "Departure": Departure, "described": DESCRIBED}
"""Tools of every kind that LangChain knows, by name."""
CALL = {"name": "search", "args": {"query": "ferry", "limit": 3}, "id": "call_1", "type": "tool_call"}
OPENAI_CHOICE = {"type": "function", "function": {"name": "add"}}
ANTHROPIC_CHOICE = {"type": "tool", "name": "Departure"}


@pytest.mark.parametrize("choice", ["any", "required", True, *KINDS, OPENAI_CHOICE, ANTHROPIC_CHOICE], ids=str)
@pytest.mark.parametrize("template", ["knows tools", "does not"])
def test_a_forced_answer_is_a_call_that_parses(spoken, lm, template, choice):
    chat = ChatInvariant(model=spoken if template == "knows tools" else lm, max_tokens=160)
    bound = chat.bind_tools([*KINDS.values()], tool_choice=choice, strict=True, parallel_tool_calls=False)
    answer = bound.invoke(QUESTION)
    (call,) = answer.tool_calls
    named = {str(OPENAI_CHOICE): "add", str(ANTHROPIC_CHOICE): "Departure"}.get(str(choice), choice)
    assert call["name"] == named or named in ("any", "required", True)
    validate_value(call["args"], convert_to_openai_tool(KINDS[call["name"]])["function"]["parameters"])
    assert (answer.content, answer.invalid_tool_calls) == ("", [])
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    assert [block["type"] for block in answer.content_blocks] == ["tool_call"]


def test_calls_are_parallel_unless_that_is_not_wanted_and_a_completion_model_has_none(chat, lm):
    twice = 2 * call_text("search", CALL["args"])
    for parallel, expected in ((None, 2), (True, 2), (False, 1)):
        bound = chat.bind_tools([search, now], tool_choice="any", parallel_tool_calls=parallel, max_tokens=300)
        calls = bound.invoke(QUESTION, **ended(chat.lm, twice)).tool_calls
        assert [call["args"] for call in calls] == [CALL["args"]] * expected
        assert len({call["id"] for call in calls}) == expected
    for wrong in ({"tools": [search]}, {"tool_choice": "find"}, {"template_kwargs": {"enable_thinking": False}}):
        with pytest.raises(UnsupportedCombination, match="expected a prompt without tools"):
            InvariantLLM(model=lm).invoke(QUESTION, **wrong)


def test_with_tools_and_a_schema_an_answer_is_calls_or_an_object_and_tools_are_counted(chat):
    def asked(written, **options):
        writing = Writing(chat.lm, written)
        return chat.bind_tools([search], **{**wanted, **options}, logits_processor=[writing]).invoke(QUESTION)

    wanted = ProviderStrategy(Departure).to_model_kwargs()
    answer = asked(call_text("Departure", {"vessel": "ferry", "hour": 12}))
    assert Departure.model_validate_json(answer.text) == Departure(vessel="ferry", hour=12)
    assert (answer.tool_calls, answer.response_metadata["finish_reason"]) == ([], "stop")
    for called in (asked(call_text("search", CALL["args"])), asked("", tool_choice="any", parallel_tool_calls=False)):
        assert (called.content, [call["name"] for call in called.tool_calls]) == ("", ["search"])
    assert Departure.model_validate_json(asked("", tool_choice="none", response_format=Departure).text)
    counted = chat.get_num_tokens_from_messages([HumanMessage(QUESTION)], tools=[search])
    assert counted == chat.bind_tools([search]).invoke(QUESTION, max_tokens=1).usage_metadata["input_tokens"]
    assert counted > chat.get_num_tokens_from_messages([HumanMessage(QUESTION)])


def test_calls_and_results_keep_their_roles(chat):
    calls = [CALL, {**CALL, "id": "call_2"}]
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "I search.", "tool_calls": calls, "reasoning_content": "Hm."},
        {"role": "tool", "content": "one", "tool_call_id": "call_1", "name": "search"},
        {"role": "tool", "content": "two", "tool_call_id": "call_2", "name": "search"},
        {"role": "user", "content": "And?"},
    ]
    history = convert_to_messages([*turns, ("human", "So?")])
    turns[-1]["content"] += "\nSo?"
    converted, _ = chat_messages(history, map(to_turn, history))
    assert [{**each, "content": "".join(each["content"])} for each in converted] == turns
    prompt = chat.lm.chat_prompt(messages=turns)
    assert chat.invoke(history, max_tokens=8).content == chat.lm.generate(prompt, max_new_tokens=8).text


def test_results_stand_in_the_order_of_their_calls_and_an_error_is_said_to_be_one(chat):
    def asked(listed, calls=("call_1",), model=chat):
        called = AIMessage("", tool_calls=[{**CALL, "id": call} for call in calls])
        return model.invoke([HumanMessage(QUESTION), called, *listed, HumanMessage("So?")], max_tokens=8).content

    found = {"call_1": DOCUMENTS[:2], "call_2": DOCUMENTS[2:], "call_3": []}
    results = [ToolMessage(str(Segments(each)), tool_call_id=call) for call, each in found.items()]
    assert len({asked(order, found) for order in permutations(results)}) == 1
    assert asked(results, found) != asked(results, ["call_2", "call_1", "call_3"])  # another order of the calls
    sent = canonical(RunnableLambda(lambda messages: messages[2]))  # says which result is the first
    assert {asked(order, found, sent) for order in permutations(results)} == {asked(results, found, sent)}

    def told(text, status):
        return asked([ToolMessage(text, tool_call_id="call_1", status=status)])

    failed, plain = told("no such file", "error"), told("no such file", "success")
    assert told("Error: no such file", "error") == told("Error: no such file", "success") == failed != plain


# --- in every way and order, and among other calls ---

LM, SPOKEN = InvariantModel(tiny_weights(), toy_tokenizer()), spoken_model()


def short(**options):
    return ChatInvariant(**{"model": LM, "max_tokens": 8, **options})


def long(**options):
    return short(**{"model": SPOKEN, "max_tokens": 160, **options})


def talks(text, **options):
    """Return a chat model that writes a text."""
    return long(**options).bind(**ended(SPOKEN, text))


def calls(**options):
    return long(**options).bind_tools([search, now], tool_choice="any")


SERVED = {
    "chat": lambda **where: ChatInvariant(max_tokens=16, method="set-based", citations=True, **where),
    "calls": lambda **where: ChatInvariant(max_tokens=96, **where).bind_tools([now, search], tool_choice="any"),
    "an object": lambda **where: ChatInvariant(max_tokens=96, **where).bind_tools([], response_format=Departure),
    "completion": lambda **where: InvariantLLM(max_tokens=8, **where),
    "log-probabilities": lambda **where: ChatInvariant(max_tokens=16, logprobs=True, **where),
}
OURS = {
    "chat": short(),
    "chat that streams": short(streaming=True),
    "micro-batched chat": short(micro_batching=True),
    "log-probabilities": short(top_logprobs=2),
    "reasoning": talks("Early.\n</think>\n\nAt noon.", template_kwargs={"enable_thinking": True}),
    "citations": talks(f"{TEXTS[1]} {TEXTS[0]}", citations=True),
    "calls": calls(),
    "calls that are cut off": calls(max_tokens=40),
    "two calls of which one is cut off": calls(max_tokens=150).bind(
        **ended(SPOKEN, 2 * call_text("search", {"query": "ferry", "limit": 3}))
    ),
    "calls that stream and are cut off": calls(max_tokens=40, streaming=True),
    "an object beside tools": long().bind_tools(
        [search], response_format=Departure, **ended(SPOKEN, call_text("Departure", {"vessel": "ferry", "hour": 12}))
    ),
    "plain branch": short(model=LM.with_routing(2.0, plain_order="canonical")),
    "invariant branch": short(model=LM.with_routing(-2.0, plain_order="canonical")),
    "completion": InvariantLLM(model=LM, max_tokens=8),
    "canonical of one of ours": canonical(short()),
    "canonical of calls": canonical(calls()),
    "canonical of calls that are cut off": canonical(calls(max_tokens=40)),
    "vote of one of ours": vote(short()),
}
OTHERS = {
    f"{wrap.__name__} of {name}": wrap(model)
    for wrap in (canonical, vote)
    for name, model in {
        "a chat model": shared.Reader(),
        "one that streams": shared.StreamingReader(),
        "one with tools": shared.Reader().bind_tools([Departure]),
        "a completion model": shared.TextReader(),
        "a function": RunnableLambda(lambda asked: re.findall(r"Document: (.*)", asked)[0]),
    }.items()
}
MODELS = {**OURS, **OTHERS, **{f"{name} of a server": make for name, make in SERVED.items()}}
STREAMS = ("chat that streams", "calls that stream and are cut off", "canonical of one that streams")
"""Models that tell callbacks the text as it comes however they are asked."""
ONE_BY_ONE = [(name, 1) for name in MODELS]
AT_ONCE = [(name, None) for name in OTHERS if name not in STREAMS]  # ours would take turns in writing a given text


@pytest.mark.parametrize(("name", "most"), [*ONE_BY_ONE, *AT_ONCE])
def test_an_answer_is_the_same_in_every_way_of_asking_and_every_order(name, most, base_url):
    model, found, kind = MODELS[name], {}, name.removesuffix(" of a server")
    if kind != name:
        model = model(base_url=base_url)
    for (way, ask), order in zip(WAYS.items(), ORDERS, strict=True):
        heard = shared.Heard()
        answer = ask(model, QUESTION, {"callbacks": [heard], "max_concurrency": most}, documents=order)
        found[way] = said(answer)
        written = text(answer)
        assert written or answer.tool_calls or answer.invalid_tool_calls, way
        if not name.endswith((" of a completion model", " of a function")):  # which are called as what they are
            count = 2 if "batch" in way else 1
            streams = "stream" in way or name in STREAMS
            assert (heard.begun, heard.ended, heard.text) == (count, count, count * written if streams else ""), way
        if "cut off" in name:  # how many are complete is the core's
            assert (answer.response_metadata["finish_reason"], bool(answer.invalid_tool_calls)) == ("length", True)
        if name.startswith("two calls"):
            assert [each["args"] for each in answer.tool_calls] == [{"query": "ferry", "limit": 3}]
    assert found == dict.fromkeys(WAYS, found["invoke"])
    if name == "calls":
        assert sum(len(piece.tool_call_chunks) for piece in model.stream(QUESTION)) > 3, "they come as they are written"
    if kind != name:
        local = SERVED[kind]().invoke(QUESTION, documents=ORDERS[0])
        assert found["invoke"] == said(local), "a server answers as a model in memory"


@pytest.mark.parametrize("micro_batching", [False, True])
@both
@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_concurrent_calls_answer_as_they_do_alone_and_micro_batches_are_decoded_together(lm, kind, way, micro_batching):
    ask = partial(WAYS[way], kind(model=lm, max_tokens=12, micro_batching=micro_batching), documents=DOCUMENTS)
    prompts = [f"{QUESTION} {number * 'and '}" for number in range(6)]
    alone = list(map(ask, prompts))
    shapes, pause = [], lm.model.register_forward_hook(lambda *_: time.sleep(0.005))  # for the others to get in line
    with pause, forwards(lm, shapes), ThreadPoolExecutor(6) as pool:
        together = list(pool.map(ask, prompts))
    assert list(map(text, together)) == list(map(text, alone))
    assert (max(rows for rows, _ in shapes) > 1) == micro_batching
    if kind is ChatInvariant:
        assert (False in {each.response_metadata.get("bitwise") for each in together}) == micro_batching


@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_prompts_of_one_call_are_decoded_in_batches_of_a_size_and_are_the_same_texts(lm, size):
    prompts = [f"{mark_set(map(to_segment, DOCUMENTS))}{QUESTION}", "a", f"{mark_set('ab')}Who?", "What is it?", "b"]
    alone = [lm.generate(parse_marked(prompt), max_new_tokens=8).text for prompt in prompts]
    llm, shapes = InvariantLLM(model=lm, max_tokens=8, batch_size=size), []
    with forwards(lm, shapes):
        assert llm.batch(prompts) == alone
    assert max(rows for rows, _ in shapes) == min(size, len(prompts))
    assert asyncio.run(llm.abatch(prompts)) == alone


async def test_the_loop_goes_on_while_a_model_generates(lm):
    chat = ChatInvariant(model=lm, max_tokens=100)
    for work in (chat.ainvoke(QUESTION), shared.collected(chat.astream(QUESTION))):
        task, ticks = asyncio.ensure_future(work), 0
        while not task.done():
            await asyncio.sleep(0.001)
            ticks += 1
        await task
        assert ticks > 10


@pytest.mark.parametrize("leaves", ["a call", "a stream", "a stream whose text is held back"])
async def test_who_leaves_stops_the_model(lm, leaves):
    chat, shapes = ChatInvariant(model=lm, max_tokens=1500), []
    whole = (await chat.ainvoke(QUESTION, max_tokens=300)).text
    with forwards(lm, shapes):
        if leaves == "a stream":
            stream = chat.astream(QUESTION)
            await anext(stream)
            await stream.aclose()
        else:
            # Every text so far may become the stop sequence, so the first piece comes when nearly all is written.
            held_back = chat.astream(QUESTION, max_tokens=300, stop=[f"{whole}never"])
            task = asyncio.ensure_future(chat.ainvoke(QUESTION) if leaves == "a call" else anext(held_back))
            while len(shapes) < 5:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await chat.ainvoke(QUESTION, max_tokens=1)  # waits until the model is free
        assert len(shapes) < 150
