"""One request: whole equals streamed, with citations of the right documents; and well-formed calls in every format."""

from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations
from random import Random
from threading import Event
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import validate
from tokenizers import AddedToken
from transformers import MaxTimeCriteria

from invariant_rag import InvariantModel, Prompt, Segment, SegmentSet
from invariant_rag.errors import IncompleteObject, InvalidOption, InvalidPrompt, InvalidTool, UnsupportedCombination
from invariant_rag.generation import prepare
from invariant_rag.generation.answer_parsing import AnswerParser
from invariant_rag.generation.answering import Answering, reply_all
from invariant_rag.generation.answers import Answer, AnswerRequest
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.generation.streaming import StopOnEvent, decode_keeping
from invariant_rag.generation.structured import Tool, ToolCall, ToolCalling
from invariant_rag.prompts import ReasoningFormat, template_format
from invariant_rag.prompts.template_probes import OWN_FORMAT
from invariant_rag.segments import Slot
from invariant_rag.testing import tiny_model
from tests.frameworks.framework_cases import Writing
from tests.generation.test_decode import random_schema
from tests.prompts.test_chat_template import ALL, templated

QUERY = {"query": {"type": "string", "maxLength": 12}, "limit": {"type": "integer", "minimum": 1}}
ASKED = {"type": "object", "properties": QUERY, "required": ["query"]}
SEARCH = {"type": "function", "function": {"name": "search", "description": "Search it.", "parameters": ASKED}}
NOW = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": None}}
NOWHERE = {"type": "function", "function": {"name": "nowhere", "description": "A longer name."}}
TOOLS = [SEARCH, NOW, NOWHERE]
QUESTION = [{"role": "user", "content": "When does the ferry leave?"}]
KINDS = list(ALL)
WILD = {"do_sample": True, "temperature": 4.0, "top_k": 0}


@cache
def lm_of(kind, seed=0):
    size = {"num_hidden_layers": 2, "vocab_size": 288, "max_position_embeddings": 4096}
    return InvariantModel(tiny_model("llama", seed, eos_token_id=None, **size), templated(kind))


def check(calls, tools):
    assert calls
    schemas = {each["function"]["name"]: Tool.of(each).parameters for each in tools}
    for call in calls:
        validate(call.arguments, schemas[call.name])


def generate(calling, prompt=None, **options):
    """Return an answer to a prompt, or to the question, decoded with `constrain`; and its parts."""
    prompt = prompt or calling.prompt(QUESTION)
    generation = calling.lm.generate(prompt, **calling.constrain(prompt, **options))
    text = decode_keeping(calling.lm.tokenizer, generation.token_ids, calling.kept_tokens)
    answer = Answer.join(calling.parser(prompt).parse([text]))
    answer.check_complete()
    return generation, answer


def writing(lm, text):
    return {"logits_processor": [Writing(lm, text)]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_forced_answer_is_nothing_but_calls_as_many_as_there_may_be(kind):
    numbers = []
    for seed in range(4):
        calling = ToolCalling(lm_of(kind, seed), [NOW, NOWHERE] if seed else TOOLS, tool_choice="any")
        options = {"max_new_tokens": 900, **(WILD if seed else {}), "seed": seed}
        generation, answer = generate(calling, **options)
        check(answer.tool_calls, TOOLS)
        assert (answer.content, answer.reasoning, generation.finish_reason) == ("", "", "stop")
        assert len({call.id for call in answer.tool_calls}) == len(answer.tool_calls)
        numbers.append(len(answer.tool_calls))
        name = ("search", "nowhere", "now", "now")[seed]
        named = ToolCalling(calling.lm, TOOLS, tool_choice=name, parallel=False)
        (call,) = generate(named, **options)[1].tool_calls
        assert call.name == name
        assert name == "search" or call.arguments == {}
        check((call,), TOOLS)
    assert (max(numbers) > 1) == (kind != "bare")


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_runs_out_of_tokens_says_length_and_has_no_half_call(kind):
    request = AnswerRequest(messages=QUESTION, tools=[SEARCH], tool_choice="search", parallel=False, stop=tuple('q<{"'))
    lm = lm_of(kind)
    whole = Answering(lm, replace(request, max_new_tokens=200)).reply().first
    assert (whole.finish_reason, len(whole.tool_calls), whole.cut_call) == ("tool_calls", 1, None)
    length = len(whole.generation.token_ids)
    for limit in (1, 9, length - 12, length - 4, length - 1, length):
        answering = Answering(lm, replace(request, max_new_tokens=limit))
        answer = answering.reply().first
        assert answer.finish_reason == ("length" if limit < length else "tool_calls")
        *_, streamed = answering.stream()
        assert replace(streamed.first, generation=None) == replace(answer, generation=None)
        if answer.tool_calls:  # nothing but the closing marker is missing
            assert answer.tool_calls == whole.tool_calls
        elif answer.cut_call:
            assert answer.cut_call.name == ("" if limit < 10 else "search")  # no name: it ends before the arguments
            assert answer.content == ""
            with pytest.raises(IncompleteObject, match="call 0"):
                answer.check_complete()


def test_every_forced_call_parses_and_validates():
    random, ends = Random(0), set()
    for round_ in range(12):
        schemas = [random_schema(random) for _ in range(random.randint(1, 2))]
        tools = [{"function": {"name": f"tool_{i}", "parameters": schema}} for i, schema in enumerate(schemas)]
        calling = ToolCalling(lm_of(KINDS[round_ % len(KINDS)], random.randrange(3)), tools, tool_choice="required")
        with suppress(IncompleteObject):  # there is no room
            generation, answer = generate(calling, max_new_tokens=random.randint(1, 16) * 20, seed=round_, **WILD)
            ends.add(generation.finish_reason)
            if generation.finish_reason == "stop":
                check(answer.tool_calls, tools)
    assert "stop" in ends


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_the_model_begins_is_well_formed_and_none_where_there_shall_be_none(kind):
    lm = lm_of(kind)
    calling = ToolCalling(lm, TOOLS, parallel=False)
    written = calling.form.call_format
    before = "" if written.anchored else "I look. "
    generation, answer = generate(calling, max_new_tokens=150, **writing(lm, before + written.trigger))
    check(answer.tool_calls, TOOLS)
    assert (answer.content, generation.finish_reason) == (before.rstrip(), "stop")
    calling = ToolCalling(lm, [SEARCH], tool_choice="none")
    generation, answer = generate(calling, max_new_tokens=60, **writing(lm, written.trigger * 2))
    assert answer == Answer(generation.text)


def test_text_without_a_call_is_what_the_model_writes_without_tools_also_behind_a_marker_of_the_prompt():
    lm = lm_of("hermes")
    calling = ToolCalling(lm, TOOLS)
    prompt = calling.prompt(QUESTION)
    generation, answer = generate(calling, prompt, max_new_tokens=40)
    unused = [*range(len(lm.tokenizer), 288)]  # which no grammar knows
    assert generation.token_ids == lm.generate(prompt, max_new_tokens=40, suppress_tokens=unused).token_ids
    assert answer == Answer(generation.text)
    prompt = Prompt("Calls begin with ", [], "<tool_call>")  # a tab would be no JSON
    assert generate(calling, prompt, max_new_tokens=4, **writing(lm, "\tNo."))[0].text == "\tNo."


def test_reasoning_holds_no_call_and_a_forced_call_leaves_it():
    lm = lm_of("hermes")
    calling = ToolCalling(lm, [NOW], parallel=False)
    thinking = calling.prompt(QUESTION, enable_thinking=True)
    for prompt, opening in ((thinking, ""), (calling.prompt(QUESTION), "<think>")):
        said = writing(lm, f"{opening}I may write <tool_call> here.</think>Now: <tool_call>")
        _, answer = generate(calling, prompt, max_new_tokens=200, **said)
        assert (answer.reasoning, answer.content) == ("I may write <tool_call> here.", "Now:")
        assert [call.name for call in answer.tool_calls] == ["now"]
    forced = ToolCalling(lm, [NOW], tool_choice="required", parallel=False)
    generation, answer = generate(forced, thinking, max_new_tokens=100)
    assert generation.text.startswith("\n</think>\n<tool_call>")
    assert (answer.reasoning, answer.content, len(answer.tool_calls)) == ("", "", 1)
    without = ToolCalling(lm)
    prompt = without.prompt(QUESTION, enable_thinking=True)
    assert prompt == lm.chat_prompt(messages=QUESTION, enable_thinking=True)
    said = writing(lm, "Hm, <tool_call>.\n</think>\n\nAt noon <tool_call>.")
    generation, answer = generate(without, prompt, max_new_tokens=60, **said)
    assert answer.reasoning == "Hm, <tool_call>."
    assert answer.content.startswith("At noon <tool_call>.")
    assert generation.text.endswith(answer.content)


@pytest.mark.parametrize(("behind", "fits"), [('\n{"na', True), ('{"q', False)])
def test_a_token_that_goes_beyond_the_marker_begins_a_call_or_is_not_chosen(behind, fits):
    tokenizer, beyond = templated("hermes"), f"<tool_call>{behind}"
    tokenizer.add_tokens([AddedToken(beyond, normalized=False)])
    lm = InvariantModel(lm_of("hermes").model, tokenizer)
    calling = ToolCalling(lm, TOOLS, parallel=False)
    generation, answer = generate(calling, max_new_tokens=200, **writing(lm, beyond))
    assert (generation.token_ids[0] == tokenizer.convert_tokens_to_ids(beyond)) == fits
    assert len(answer.tool_calls) == fits


def test_calls_and_their_ids_ignore_the_order_of_segments_and_the_next_turn_has_other_ids():
    calling, answers = ToolCalling(lm_of("hermes"), TOOLS, tool_choice="search", parallel=False), set()
    for order in permutations(["It leaves at noon.", "In winter it does not sail.", "The mill is old."]):
        segments = [Segment(text) for text in order]
        call = {"id": "call_1", "name": "search", "args": {"query": "ferry"}}
        messages = [
            {"role": "user", "content": [*segments, "When?"]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": segments},
        ]
        prompt = calling.prompt(messages)
        assert [len(each) for each in prompt.sets] == [3, 3]
        generation, answer = generate(calling, prompt, max_new_tokens=120)
        answers.add((generation.token_ids, generation.logprobs, repr(answer)))
    assert len(answers) == 1
    (call,) = answer.tool_calls
    turns = [*messages, {"role": "assistant", "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": call.id, "content": "noon"}]
    (following,) = generate(calling, calling.prompt(turns), max_new_tokens=120)[1].tool_calls
    assert (following.name, following.id != call.id) == (call.name, True)


def test_tools_choices_and_requests_that_are_none_are_refused():
    for wrong, error in (
        *(({"messages": None}, InvalidPrompt), ({"prompt": Prompt("a")}, InvalidPrompt), ({"n": 0}, InvalidOption)),
        ({"messages": None, "prompt": Prompt("a"), "tools": TOOLS}, UnsupportedCombination),
    ):
        with pytest.raises(error):
            Answering(lm_of("hermes"), replace(AnswerRequest(messages=QUESTION), **wrong))
    for tools, choice, said in (
        (TOOLS, "find", "choose from 'auto', 'none', 'required', 'any', 'search'"),
        ([], "required", "got none"),
        ([{"function": {"name": "a b"}}], "auto", "of up to 128 letters"),
        *(([each], "auto", "expected a Tool") for each in ({}, 3)),
        ([{"name": "a", "parameters": {"type": "array"}}], "auto", "schema of an object"),
    ):
        with pytest.raises(InvalidTool, match=said):
            ToolCalling(lm_of("hermes"), tools, tool_choice=choice)


THINK = ReasoningFormat("<think>", "</think>", "\n</think>\n\n")
CALLS = (
    ToolCall("", "now", {}),
    ToolCall("", "search", {"query": 'a "quoted} \\" текст <tool_call>', "deep": [{"x": 1}]}),
)
TEXTS = st.sampled_from(
    ["", "Well.", "Well. ", " ключ < <tool_ca", "<tool_call>{}", '<tool_call>\n{"name": "other"', "\n"]
)


@given(
    st.sampled_from(["", "<think>", " <think>\nHm <tool_call>\n</think>\n\n", "</think>"]),
    TEXTS,
    st.sampled_from([(), CALLS[:1], CALLS]),
    TEXTS,
    st.none() | st.integers(-120, -1),
    st.lists(st.integers(0, 300)),
    st.sampled_from(KINDS),
)
@example("", "", CALLS[:1], "<tool_call>\n{}", None, [], "bare")  # text after a call that has to be the whole answer
@example("", "", CALLS, " ключ < ", None, [3], "bare")
@example("", "<tool_call>" + " " * 400, (), "", None, [], "hermes")
def test_however_a_text_is_cut_into_pieces_its_parts_are_the_same(reasoning, text, calls, after, end, cuts, kind):
    written = template_format(templated(kind)).call_format
    whole = (reasoning + text + (written.write(calls) if calls else "") + after)[:end]
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    parser = AnswerParser(written, ("now", "search"), THINK)
    found = [
        Answer.join(parser.parse(each)) for each in ([whole], [whole[a:b] for a, b in pairwise(places)], list(whole))
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_template_writes_is_parsed_also_half_of_it(kind):
    written = template_format(templated(kind)).call_format
    calls, text = CALLS[1:] if written.between is None else CALLS, "" if written.anchored else "Well.\n"
    parser, whole = AnswerParser(written, ("now", "search")), text + written.write(calls)
    answer = Answer.join(parser.parse([whole]))
    assert answer.content == text.rstrip()
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [(c.name, c.arguments) for c in calls]
    cut = Answer.join(parser.parse([whole[: whole.index("search") + 3]]))
    assert (len(cut.tool_calls), cut.content, cut.cut_call.index) == (len(calls) - 1, text.rstrip(), len(calls) - 1)


OTHER = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'


def test_what_is_no_call_is_text_which_is_joined_around_a_call_and_half_a_call_is_an_error():
    parser = AnswerParser(OWN_FORMAT, ("now",), THINK)
    for text, expected in (
        *((text, Answer(text)) for text in ("a <tool_call> b", OTHER, "<tool_call", "a  ", f"x <think>{OTHER}")),
        (f"<think>\n{OTHER} </think>\n\n x ", Answer("x ", OTHER)),
    ):
        assert Answer.join(parser.parse([text])) == expected
    whole, half = OTHER.replace("other", "now"), '<tool_call>\n{"name": "now", "arguments": {"a": '
    for call in (whole, whole.replace(" ", "")):
        assert Answer.join(parser.parse([f"x {call} y"])).content == "x y"
    for text, index, said in ((half, 0, '{"a": '), (half[:14], 0, half[:14]), (f"{whole}\n{half[:24]}", 1, half[:24])):
        cut = Answer.join(parser.parse([text]))
        assert (len(cut.tool_calls), cut.content, cut.cut_call.index) == (index, "", index)
        assert cut.cut_call.arguments.lstrip() == said
        with pytest.raises(IncompleteObject, match=f"call {index}"):
            cut.check_complete()


# --- requests ---

DOCUMENTS = [Segment("The mill grinds barley."), Segment("The ferry leaves at noon."), Segment("Salt is dear.")]
CHAT = [{"role": "user", "content": [SegmentSet(DOCUMENTS), "When does the ferry leave?"]}]
PLAIN = Prompt("Read: ", DOCUMENTS, "When does the ferry leave?")
SCHEMA = {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": ["hour"]}

REQUESTS = {
    "a prompt": AnswerRequest(prompt=PLAIN, max_new_tokens=24, logprobs=True),
    "a conversation": AnswerRequest(messages=CHAT, max_new_tokens=24, citations=True),
    "several sampled answers": AnswerRequest(messages=CHAT, max_new_tokens=12, temperature=1.0, seed=3, n=3),
    "several greedy answers": AnswerRequest(messages=CHAT, max_new_tokens=12, n=2),
    "a forced call": AnswerRequest(messages=QUESTION, tools=TOOLS, tool_choice="required", max_new_tokens=160),
    "a call or text": AnswerRequest(messages=QUESTION, tools=TOOLS, max_new_tokens=40, temperature=1.0, seed=1),
    "an object": AnswerRequest(messages=CHAT, schema=SCHEMA, max_new_tokens=64, temperature=1.0, seed=2),
    "an object or calls": AnswerRequest(messages=CHAT, schema=SCHEMA, tools=TOOLS, max_new_tokens=160),
}


def without_generations(reply):
    return replace(reply, answers=tuple(replace(each, generation=None) for each in reply.answers))


def test_a_ledger_says_which_branch_was_taken_and_promises_nothing_of_documents_that_are_not_known():
    lm, request = lm_of("hermes"), REQUESTS["a conversation"]
    known, unknown = (Answering(lm, replace(request, recognized=each)).reply().ledger for each in (True, False))
    assert (known["invariant"], unknown) == (True, {**known, "invariant": False})
    routed = Answering(lm.with_routing(), request).reply()
    assert routed.ledger["routing"] == routed.first.generation.details["routing"]


@pytest.mark.parametrize("batcher", [None, MicroBatcher()], ids=["alone", "queued"])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_streamed_reply_is_the_whole_one(name, batcher):
    lm, request = lm_of("hermes"), REQUESTS[name]
    whole = Answering(lm, request).reply(batcher)
    *deltas, streamed = Answering(lm, request).stream(batcher)
    assert (without_generations(streamed), streamed.ledger) == (without_generations(whole), whole.ledger)
    assert len(whole.answers) == request.n
    for index, answer in enumerate(whole.answers):
        joined = Answer.join(delta for delta in deltas if delta.index == index)
        assert joined == Answer(answer.content, answer.reasoning, answer.tool_calls, answer.cut_call)
    assert whole.usage.completion_tokens == sum(each.generation.usage.completion_tokens for each in whole.answers)


def test_several_answers_and_several_requests_are_those_of_each_alone():
    lm, several = lm_of("hermes"), REQUESTS["several sampled answers"]
    requests = [replace(several, seed=3 + index, n=1) for index in range(3)]
    requests += [replace(REQUESTS["a prompt"], prompt=Prompt("Read: ", DOCUMENTS[:n], "And?")) for n in (1, 2, 3)]
    alone = [Answering(lm, each).reply().first.content for each in requests]
    assert len(set(alone[:3])) == 3
    assert [each.content for each in Answering(lm, several).reply().answers] == alone[:3]
    assert [each.first.content for each in reply_all([Answering(lm, each) for each in requests])] == alone
    assert reply_all([]) == []


def test_an_answer_stays_as_written_and_its_numbers_lead_to_the_documents():
    lm = lm_of("hermes")
    slots = [Slot(f"[{number}] ", "\n", number=str(number)) for number in (1, 2, 3)]
    cited, written = set(), "At noon [2], as `row[1]` says; see [1] and [3]."
    for order in permutations(DOCUMENTS):
        messages = [{"role": "user", "content": [SegmentSet(order, slots=slots), "When?"]}]
        answering = Answering(lm, AnswerRequest(messages=messages, citations=True, max_new_tokens=47))
        read = answering.prepared.order
        reply = Answering(lm, replace(answering.request, options=writing(lm, written))).reply()
        assert reply.first.content == written
        found = {(written[each.start : each.end], each.segment.text) for each in reply.first.citations or ()}
        assert found >= {(f"[{place + 1}]", order[index].text) for place, index in enumerate(read)}
        cited.add(frozenset(found))
    assert len(cited) == 1


def test_a_stop_string_ends_text_and_neither_calls_nor_objects_also_those_that_ran_out_of_tokens():
    lm, of_both = lm_of("hermes"), replace(REQUESTS["an object or calls"], stop=('"', "{"))
    free = AnswerRequest(messages=QUESTION, tools=TOOLS, max_new_tokens=30)
    for request in (REQUESTS["a prompt"], free):
        said = writing(lm, "one. two. three")
        stopped = Answering(lm, replace(request, stop=(". t",), options=said)).reply().first
        assert (stopped.content, stopped.finish_reason) == ("one", "stop")
    assert Answering(lm, replace(REQUESTS["an object"], stop=("{",))).reply().first.content.startswith("{")
    whole = Answering(lm, of_both).reply().first
    assert whole.tool_calls or whole.content.startswith("{")
    for limit in (len(whole.generation.token_ids) // 2, len(whole.generation.token_ids) - 1):
        cut = Answering(lm, replace(of_both, max_new_tokens=limit)).reply().first
        assert (cut.finish_reason, cut.generation.finish_reason) == ("length", "length")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_in_the_opening_of_a_call_that_ran_out_of_tokens_leaves_length(kind):
    lm = lm_of(kind)
    written = template_format(lm.tokenizer).call_format
    before, stop = "" if written.anchored else "Well. ", ('"', "{", "[", "n", "s")
    opening = before + written.begin[written.begin.index(written.trigger) :] + "now" + written.middle
    first, last = (len(lm.tokenizer.encode(each)) for each in (before + written.trigger, opening))
    for limit in (first, (first + last) // 2, last):
        request = AnswerRequest(messages=QUESTION, tools=TOOLS, stop=stop, max_new_tokens=limit)
        *pieces, streamed = Answering(lm, replace(request, options=writing(lm, opening))).stream()
        cut = Answering(lm, replace(request, options=writing(lm, opening))).reply()
        assert (without_generations(streamed), streamed.ledger) == (without_generations(cut), cut.ledger)
        assert (cut.first.content, cut.first.finish_reason, cut.first.tool_calls) == (before.strip(), "length", ())
        assert cut.first.cut_call == Answer.join(pieces).cut_call != None  # noqa: E711


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [1, -1])
def test_a_call_that_something_else_than_room_cuts_off_is_an_error(order, kind):
    criteria = [MaxTimeCriteria(0.0), StopOnEvent(Event())][::order]
    request = replace(REQUESTS["a forced call"], options={"stopping_criteria": criteria})
    with pytest.raises(IncompleteObject, match=r"ends within call 0|expected a call of a tool"):
        Answering(lm_of(kind), request).reply()


def test_an_abandoned_request_has_no_reply():
    abandoned = Event()
    answering = Answering(lm_of("hermes"), replace(REQUESTS["a prompt"], max_new_tokens=1000))
    pieces = answering.stream(abandoned=abandoned)
    next(pieces)
    abandoned.set()
    with pytest.raises(CancelledError):
        list(pieces)
    with pytest.raises(CancelledError):
        answering.reply(abandoned=abandoned)


def test_what_was_prepared_to_be_measured_is_not_tokenized_again(monkeypatch):
    answering, tokenize = Answering(lm_of("hermes"), REQUESTS["a conversation"]), Mock(wraps=prepare.tokenize_prompt)
    expected = answering.reply()
    monkeypatch.setattr(prepare, "tokenize_prompt", tokenize)
    assert answering.prepared.input_ids
    assert answering.reply() == expected
    assert tokenize.call_count == 1
